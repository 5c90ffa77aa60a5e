"""The environment that DeepSpeed is measured in: its own, so that nothing of it is installed beside infinity."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("deepspeed==0.19.8", "transformers", "accelerate", "ninja")
"""Beside torch, which `constraints.txt` pins for everybody. DeepSpeed compiles its extensions at their first use."""
VARIABLES = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}


class MissingToolError(RuntimeError):
    """Something that DeepSpeed needs to compile is not there; the message says what."""


def make(folder: Path) -> float:
    """Install DeepSpeed into an environment of its own, if it is not there; return the seconds that it took.

    Raises:
        MissingToolError: no C++ compiler, or no headers of libaio (Debian: g++, libaio-dev).
        subprocess.CalledProcessError: pip failed.
    """
    if shutil.which("c++") is None:
        raise MissingToolError("DeepSpeed needs a C++ compiler (g++)")
    if not Path("/usr/include/libaio.h").exists():
        raise MissingToolError("DeepSpeed needs the headers of libaio (libaio-dev)")
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
    """Return the variables of a process in an environment; its compiled extensions are kept in it."""
    found = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": str(threads)}
    found["PATH"] = f"{python.parent}{os.pathsep}{found['PATH']}"
    found["TORCH_EXTENSIONS_DIR"] = str(python.parent.parent / "extensions")
    found.pop("PYTHONPATH", None)
    return found
