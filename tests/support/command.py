"""Run the command line, in this process or in a new one."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from infinity_tools.cli import app, main
from support.processes import fork_server

os.environ["HF_HUB_OFFLINE"] = "1"  # no requests to the Hub
ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train", "--model", "tiny", "--max_length", "32", "--per_device_train_batch_size", "4"]
SMALL += ["--host-memory", "1MiB"]
_LIBRARY = 1 << 16
"""Bytes of the default data, whose preparation takes longer than training."""


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


@functools.cache
def _freeze_train_modules() -> None:
    """Exclude the modules that are imported so far from garbage collection, which Trainer triggers in every run."""
    gc.collect()
    gc.freeze()


def run_here(*arguments: object, picture: bool = False) -> Finished:
    """Run `infinity` in this process.

    Without `picture`, training does not draw summary.png, which takes 0.5 s. The default data is shorter.
    """
    with ExitStack() as stack:
        stack.enter_context(loggers_restored())
        if arguments[:1] == ("train",):
            stack.enter_context(patch("infinity_tools.train.datasets._LIBRARY", _LIBRARY))
            if not picture:
                stack.enter_context(patch("infinity_tools.train.run.write_picture", lambda out, summary: None))
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if arguments[:1] == ("train",) and not result.exit_code:
        _freeze_train_modules()
    return Finished(status=result.exit_code, output=result.stdout, errors=result.stderr)


def on_one_line(*arguments: object) -> tuple[int, str]:
    """Run `infinity` in this process; return its status and all of its output on one line."""
    done = run_here(*arguments)
    return done.status, " ".join((done.output + done.errors).split())


class Forked:
    """`infinity` in a process of `fork_server`, which starts quickly, with the interface of `subprocess.Popen`.

    Its output is appended to the files or pipes `stdout` and `stderr` in the current folder.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        words = [str(word) for word in command[command.index("infinity_tools") + 1 :]]
        self._process = fork_server().Process(target=_run_command, args=(words, dict(env), os.getcwd()))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_command(words: list[str], variables: dict[str, str], folder: str) -> None:
    import torch

    from infinity_tools.train import datasets

    gc.freeze()
    datasets._LIBRARY = _LIBRARY
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR has changed
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["infinity", *words]
    main()


def run_ranks(*arguments: object) -> Finished:
    """Run `infinity … --nproc 2` in this process, and its ranks in processes of `fork_server`."""
    files = Path("stdout"), Path("stderr")
    for file in files:
        file.write_text("")
    with (
        patch("infinity_tools.launch.subprocess", SimpleNamespace(Popen=Forked)),
        patch.dict(os.environ, {"TMPDIR": tempfile.gettempdir(), "COLUMNS": "200"}),
    ):
        done = run_here(*arguments, "--nproc", 2)
    output, errors = (file.read_text() for file in files)
    return Finished(status=done.status, output=done.output + output, errors=done.errors + errors)


@contextmanager
def at_step(step: int, action: Callable[[], object]) -> Iterator[None]:
    """Call a function at the end of a training step of runs in this process."""
    from infinity_tools.train.callbacks import RunCallback

    original = RunCallback.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == step:
            action()
        original(self, args, state, control, **named)

    with patch.object(RunCallback, "on_step_end", on_step_end):
        yield
