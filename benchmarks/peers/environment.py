"""Separate environment of DeepSpeed, so that its dependencies are not installed next to infinity."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("deepspeed==0.19.8", "transformers", "accelerate", "ninja")
"""Packages in addition to torch, whose version is pinned in `constraints.txt`."""
VARIABLES = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}


class MissingToolError(RuntimeError):
    """A tool that DeepSpeed needs to compile is missing. The message names it."""


def make(folder: Path) -> float:
    """Install DeepSpeed into a separate environment if it is not installed yet.

    Args:
        folder: Folder of the environment.

    Returns:
        Duration of the installation in seconds; 0 if the environment was already complete.

    Raises:
        MissingToolError: if the C++ compiler or the headers of libaio are missing (Debian: g++, libaio-dev).
        subprocess.CalledProcessError: if pip fails.
    """
    if shutil.which("c++") is None:
        raise MissingToolError("cannot compile DeepSpeed: no C++ compiler. Install g++.")
    if not Path("/usr/include/libaio.h").exists():
        raise MissingToolError("cannot compile DeepSpeed: the headers of libaio are missing. Install libaio-dev.")
    done = folder / ".installed"
    wanted = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == wanted:
        return 0.0
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    done.write_text(wanted)
    return time.perf_counter() - began


def variables(python: Path, threads: int) -> dict[str, str]:
    """Return the environment variables of a process. Compiled extensions are stored in its environment."""
    found = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": str(threads)}
    found["PATH"] = f"{python.parent}{os.pathsep}{found['PATH']}"
    found["TORCH_EXTENSIONS_DIR"] = str(python.parent.parent / "extensions")
    found.pop("PYTHONPATH", None)
    return found
