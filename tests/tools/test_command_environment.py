"""Tests of commands under signals, without a usable home folder, and on terminals that show only ASCII."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from infinity.cli_errors import failures
from infinity.config import Config
from infinity_tools.trial_folders import PREFIX, trial_folders
from support.command import environment, run_here
from support.daemon_process import until
from support.processes import fork_server

PLAN = ["plan", "--model", "tiny", "--batch-tokens", "64", "--seq", "32", "--host-memory", "64MiB"]


def _plan_for_ever(folder: str, errors: str) -> None:
    """Run `infinity plan`, whose measurement does not end."""
    from infinity_tools.cli import main

    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.chdir(folder)
    sys.argv = ["infinity", *PLAN, "--dtype", "fp32", "--nvme", "nvme"]
    rates = {str(Path("nvme").resolve()): dict.fromkeys(("read", "write", "mixed"), 1e9)}
    with (
        patch("infinity_tools.plan.plan_drives.quick_rates", lambda names: rates),
        patch("infinity_tools.plan.excerpt._STEPS", 10**9),
    ):
        main()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.wide)])
def test_signal_to_plan_removes_measurement_folder(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "nvme").mkdir()
    process = fork_server().Process(target=_plan_for_ever, args=(str(tmp_path), str(tmp_path / "errors")))
    process.start()
    assert process.pid is not None
    try:
        until(lambda: bool(list(tmp_path.glob("nvme/*/runs/*/*.pages"))) or not process.is_alive())
        os.kill(process.pid, number)
        process.join(300)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 128 + number, (tmp_path / "errors").read_text()
    assert list((tmp_path / "nvme").iterdir()) == []
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_store_gc_removes_what_killed_measurements_left(tmp_path: Path) -> None:
    """Folders of live measurements are kept."""
    left, file = Path(f"{PREFIX}left"), Path(".infinity-probe-left")
    with trial_folders(["."], Config().telemetry) as (runs,):
        (left / "runs").mkdir(parents=True)
        (left / "runs" / "pages").write_bytes(bytes(100_000))
        (left / "lock").touch()
        file.touch()
        os.utime(file, (1, 1))
        done = run_here("store", "gc", ".", "--yes")
        assert Path(runs).is_dir()
    assert done.status == 0, done.errors
    assert "removed 2 items, " in done.output
    assert not left.exists()
    assert not file.exists()


@pytest.mark.parametrize("module", ["infinity_tools", "infinity_daemon"])
def test_ctrl_c_during_imports_ends_silently(tmp_path: Path, module: str) -> None:
    """A module that interrupts its import takes the place of the first one that is slow."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n1 / 0\n")
    variables = environment(tmp_path / "tmp")
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    with _interruptible():
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], env=variables, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Do not ignore SIGINT in processes that are started in the block, even if this one runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_command_runs_without_home_and_with_ascii_output(tmp_path: Path) -> None:
    """Characters that the terminal lacks are replaced: the plan contains µs."""
    words = [*PLAN, "--no-changes", "--gpu", "h100", "--nvme-bandwidth", "7e9/5e9"]
    variables = {**environment(tmp_path / "tmp"), "HOME": "/dev/null/home", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "infinity_tools", *words]
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"500 us per page access" in b" ".join(done.stdout.split())
    assert done.stdout.isascii()
    assert done.stderr.isascii()


def test_unwritable_home_is_named_as_cause(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries keep caches in the home folder, and some of them require it."""
    monkeypatch.setenv("HOME", "/dev/null/home")
    with pytest.raises(typer.Exit) as ending, failures():
        Path("~/.cache").expanduser().mkdir(parents=True)
    assert ending.value.exit_code == 2
    said = capsys.readouterr().err
    assert "Not a directory; HOME is '/dev/null/home', which cannot be written: set HOME to a writable folder" in said
