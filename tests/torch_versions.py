"""Tests on other releases of torch and transformers, each in an environment of its own: `make test-torch`.

    python tests/torch_versions.py 2.11 2.13 newest --transformers 5.9

A release is the beginning of a version ("2.11": the newest 2.11.x), or "newest". It is installed by pip, with what the
tests need; torch with its CUDA packages takes several GB of downloads and disk. One line per release says how it ended;
the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/core/test_private.py",
    "tests/core/test_refusals.py",
    "tests/core/test_parity_one_rank.py",
    "tests/core/test_parity_two_ranks.py",
    "tests/core/test_accumulation.py",
    "tests/core/test_conversions.py",
    "tests/core/test_pretrained.py",
]
WHICH = "import torch, transformers; print(f'torch {torch.__version__}, transformers {transformers.__version__}')"
TRAIN = ["train", "--model", "tiny", "--seq", "32", "--batch-tokens", "128", "--host-memory", "1MiB", "--steps", "2"]


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help='of torch: "2.11", "2.13.1" or "newest"')
    parser.add_argument("--transformers", default="newest", metavar="RELEASE", help="of transformers")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE", help="what pytest runs")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="of pytest")
    parser.add_argument(
        "--environments", type=Path, metavar="FOLDER", help="keep the environments and logs here, and use them again"
    )
    given = parser.parse_args()
    failed = False
    for release in given.releases:
        # Without a name, one environment at a time is on the disk.
        with tempfile.TemporaryDirectory(prefix="infinity-torch-") as temporary:
            folder = Path(temporary)
            if given.environments:
                folder = given.environments.resolve() / f"torch-{release}-transformers-{given.transformers}"
            failed |= try_release(release, given.transformers, given.tests, given.processes, folder)
    return int(failed)


def try_release(release: str, transformers: str, tests: list[str], processes: int, folder: Path) -> bool:
    """Install and test one release; say how it ended; return whether it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    log, began, which = folder / "log.txt", time.monotonic(), f"torch {release}, transformers {transformers}"
    environment, python = folder / "environment", str(folder / "environment" / "bin" / "python")
    wanted = [f"{name}=={asked}.*" if asked != "newest" else name
              for name, asked in (("torch", release), ("transformers", transformers))]  # fmt: skip
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted, "--editable", f"{ROOT}[dev]"]
    train = [python, "-m", "infinity_tools", *TRAIN, "--nvme", "."]
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(processes), *tests]
    with log.open("w") as output, tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not environment.exists():
            venv.create(environment, with_pip=True)
        for what, command, place in (
            ("pip", install, scratch), ("infinity train", train, scratch), ("pytest", pytest, ROOT),
        ):  # fmt: skip
            done = subprocess.run(command, cwd=place, env=clean(), stdout=output, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                break
            if what == "pip":
                which = subprocess.check_output([python, "-W", "ignore", "-c", WHICH], env=clean(), text=True).strip()
    words = log.read_text(errors="replace").splitlines()
    seconds = f"{time.monotonic() - began:.0f} s"
    if not done.returncode:
        print(f"{which}: passed in {seconds}: {words[-1].strip('= ')}", flush=True)
        return False
    failed = [line for line in words if line.startswith(("FAILED", "ERROR"))] or words[-5:]
    print(f"{which}: FAILED in {seconds}: {what} ended with status {done.returncode}", flush=True)
    print(*failed, sep="\n", file=sys.stderr, flush=True)
    return True


def clean() -> dict[str, str]:
    """Return an environment in which another checkout is not imported."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
