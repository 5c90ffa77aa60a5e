"""Tests with other releases of torch and transformers, each in a separate environment. Run with `make test-torch`.

    python tests/torch_versions.py 2.11 2.13 newest --transformers 5.9

A release is the beginning of a version ("2.11": the newest 2.11.x) or "newest". If `constraints.txt` pins a matching
version, the pinned version is used. pip installs each release with the dependencies of the tests. torch with its CUDA
packages takes several GB of downloads and disk space. The last lines of the output are a table of the outcome of each
release. The exit status is 1 if a release failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/fsdp/test_private.py",
    "tests/run/test_unsupported.py",
    "tests/fsdp/test_parity.py",
    "tests/fsdp/test_accumulation.py",
    "tests/formats/test_conversions.py",
    "tests/sources/test_pretrained.py",
    "tests/formats/test_dcp.py",
]
PRINT_VERSIONS = "import torch, transformers; print(torch.__version__, transformers.__version__)"
TRAIN = [
    "train",
    "--model",
    "tiny",
    "--max_length",
    "32",
    "--per_device_train_batch_size",
    "4",
    "--host-memory",
    "1MiB",
    "--max_steps",
    "2",
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of testing one release."""

    torch: str
    transformers: str
    result: str
    seconds: float
    failures: tuple[str, ...] = ()


def main() -> int:
    """Test all releases and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="+", type=release, metavar="RELEASE", help='release of torch: "2.11" or "newest"'
    )
    parser.add_argument(
        "--transformers", default="newest", type=release, metavar="RELEASE", help="release of transformers"
    )
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE", help="test files to run")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="number of pytest processes")
    parser.add_argument(
        "--environments", type=Path, metavar="FOLDER", help="keep environments and logs in this folder, and reuse them"
    )
    arguments = parser.parse_args()
    console, outcomes = Console(), []
    for wanted in arguments.releases:
        # Without --environments, only one environment exists on the disk at a time.
        with tempfile.TemporaryDirectory(prefix="infinity-torch-") as temporary:
            folder = Path(temporary)
            if arguments.environments:
                folder = arguments.environments.resolve() / f"torch-{wanted}-transformers-{arguments.transformers}"
            outcomes.append(
                try_release(wanted, arguments.transformers, arguments.tests, arguments.processes, folder, console)
            )
        for line in outcomes[-1].failures:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table("torch", "transformers", "outcome", "seconds", box=None)
    for found in outcomes:
        table.add_row(found.torch, found.transformers, found.result, f"{found.seconds:.0f}")
    console.print(table)
    return int(any(found.failures for found in outcomes))


def release(text: str) -> str:
    """Return `text`. Raises `argparse.ArgumentTypeError` unless it is the beginning of a version or "newest"."""
    if text != "newest" and not re.fullmatch(r"\d+(\.\d+){1,2}", text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a release. Pass the beginning of a version ("2.11") or "newest".'
        )
    return text


def try_release(
    torch: str, transformers: str, tests: list[str], processes: int, folder: Path, console: Console
) -> Outcome:
    """Install one release and run the tests with it."""
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / "log.txt", time.monotonic()
    environment, python = folder / "environment", str(folder / "environment" / "bin" / "python")
    wanted = [requirement("torch", torch), requirement("transformers", transformers)]
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted, "--editable", f"{ROOT}[dev]"]
    train = [python, "-m", "infinity_tools", *TRAIN, "--nvme", "."]
    selected = ["-m", "not wheel and not gpu"]  # includes the rows that `make test` omits
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(processes), *selected, *tests]
    with log.open("w") as output, tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not environment.exists():
            venv.create(environment, with_pip=True)
        for stage, command, working_dir in (
            ("pip", install, scratch), ("infinity train", train, scratch), ("pytest", pytest, ROOT),
        ):  # fmt: skip
            with console.status(f"torch {torch}, transformers {transformers}: {stage}; output in {log}"):
                done = subprocess.run(
                    command,
                    cwd=working_dir,
                    env=clean_environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if done.returncode:
                break
            if stage == "pip":
                found = subprocess.check_output(
                    [python, "-W", "ignore", "-c", PRINT_VERSIONS], env=clean_environment(), text=True
                )
                torch, transformers = found.split()
    lines = log.read_text(errors="replace").splitlines()
    result, failures = lines[-1].strip("= ") if lines else "", ()
    if done.returncode:
        result = f"FAILED: {stage} exited with status {done.returncode}"
        failures = tuple(line for line in lines if line.startswith(("FAILED", "ERROR"))) or (*lines[-5:], result)
    return Outcome(
        torch=torch, transformers=transformers, result=result, seconds=time.monotonic() - began, failures=failures
    )


def requirement(name: str, wanted: str) -> str:
    """Return the pip requirement for one package, pinned as in `constraints.txt` if a pin matches."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pinned, _, version = line.partition("==")
        if pinned == name and f"{version}.".startswith(f"{wanted}."):
            return line
    return name if wanted == "newest" else f"{name}=={wanted}.*"


def clean_environment() -> dict[str, str]:
    """Return the environment variables, except those that refer to another checkout or process group."""
    excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in excluded} | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
