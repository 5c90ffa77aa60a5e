"""Run the command line, in this process or in a new one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from infinity_tools.cli import app

os.environ["HF_HUB_OFFLINE"] = "1"  # no requests to the Hub
ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "train",
    "--model",
    "tiny",
    "--max_length",
    "32",
    "--per_device_train_batch_size",
    "4",
    "--host-memory",
    "1MiB",
]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Result of a command."""

    status: int
    output: str
    errors: str

    @property
    def summary(self) -> dict[str, Any]:
        """Output of `--json`."""
        return json.loads(self.output)


def environment(runtime: Path) -> dict[str, str]:
    """Return an environment that imports this checkout and uses a separate folder for stats files."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "XDG_RUNTIME_DIR")
    }
    paths = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests"), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TMPDIR": str(runtime),
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # threads of several processes that spin on the same cores are many times slower
    }


@contextmanager
def loggers_restored() -> Iterator[None]:
    """Undo changes of loggers, which would hide log messages from later tests."""
    loggers = [
        logging.getLogger(name) for name in ("infinity", "transformers", "trl", "datasets", "accelerate", "peft")
    ]
    before = [(log.handlers[:], log.level, log.propagate) for log in loggers]
    try:
        yield
    finally:
        for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)


def run_here(*arguments: object, picture: bool = False) -> Finished:
    """Run `infinity` in this process. Without `picture`, training does not draw summary.png, which takes 0.5 s."""
    with ExitStack() as stack:
        stack.enter_context(loggers_restored())
        if arguments[:1] == ("train",) and not picture:
            stack.enter_context(patch("infinity_tools.train.run.write_picture", autospec=True))
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(status=result.exit_code, output=result.stdout, errors=result.stderr)


def run_process(
    folder: Path, *arguments: str, ranks: int = 0, program: Sequence[str] = ("-m", "infinity_tools")
) -> Finished:
    """Run `infinity` in a new process in `folder`, started by torchrun if `ranks` is not 0."""
    launcher: Sequence[str] = ()
    if ranks:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = subprocess.run(
        [sys.executable, *launcher, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
        env=environment(folder / "tmp"),
        check=False,
    )
    return Finished(status=done.returncode, output=done.stdout, errors=done.stderr)


@contextmanager
def training(
    folder: Path, *arguments: str, program: Sequence[str] = ("infinity_tools",)
) -> Iterator[subprocess.Popen[str]]:
    """Run `infinity` in a folder, and yield its process after the first step. The process is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", *program, *arguments],
        cwd=folder,
        env=environment(folder / "tmp"),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            while "step 1/" not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()
