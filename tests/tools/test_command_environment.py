"""Tests of commands under signals, without a home folder or an optional package, and of the modules they import."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from infinity.cli_errors import failures, write_any_text
from infinity.config import Config
from infinity.estimate.machine import CALL_SECONDS
from infinity_tools.plan import excerpt
from infinity_tools.trial_folders import PREFIX, trial_folders
from support.command import SMALL, environment, run_here


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_plan_removes_measurement_folder(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme, pages = tmp_path / "nvme", []
    nvme.mkdir()
    offload = excerpt._offload

    def interrupted(*arguments: Any) -> Any:
        optimizer = offload(*arguments)
        optimizer.step = lambda: (pages.extend(nvme.glob("*/runs/*/*.pages")), os.kill(os.getpid(), number))
        return optimizer

    rates = {str(nvme): dict.fromkeys(("read", "write", "mixed"), 1e9)}
    monkeypatch.setattr("infinity_tools.plan.plan_drives.quick_rates", lambda names: rates)
    monkeypatch.setattr(excerpt, "_offload", interrupted)
    words = ["--batch-tokens", "64", "--seq", "32", "--host-memory", "64MiB", "--dtype", "fp32", "--nvme", nvme]
    ended = run_here("plan", "--model", "tiny", *words)
    assert ended.status == 128 + number, ended.errors
    assert pages
    assert list(nvme.iterdir()) == []
    assert "Traceback" not in ended.errors


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


def test_unwritable_home_is_named_as_cause(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries keep caches in the home folder, and some of them require it."""
    monkeypatch.setenv("HOME", "/dev/null/home")
    with pytest.raises(typer.Exit) as ending, failures():
        Path("~/.cache").expanduser().mkdir(parents=True)
    assert ending.value.exit_code == 2
    said = capsys.readouterr().err
    assert "Not a directory; HOME is '/dev/null/home', which cannot be written: set HOME to a writable folder" in said


SLOW = ("torch", "numpy", "matplotlib", "transformers", "datasets", "optuna")
PLAN = "plan --parameters 1e9 --layers 4 --hidden 4096 --vocabulary 32000 --nvme-bandwidth 7e9/5e9 --gpu h100"
COMMANDS = (
    "-h",
    "train -h",
    "store ls -h",
    "store ls .",
    "status",
    "probe -h",
    "probe missing",
    "migrate -h",
    "migrate ds.json",
    "doctor -h",
    "top --once --interval 0.1",
    "tune -h",
    "tune --nvme /nowhere/x",
    "plan -h",
    f"{PLAN} --host-memory 8GiB",
)


PROGRAM = f"""
import sys
from contextlib import suppress
from infinity_tools.cli import main
loaded = set()
for command in {COMMANDS!r}:
    sys.argv = ["infinity", *command.split()]
    with suppress(SystemExit):
        main()
    planner = {{"numpy"}} if command.startswith("plan --parameters") else set()
    if new := set(sys.modules) & set({SLOW!r}) - loaded - planner:
        print(f"SLOW: {{command}} imports {{new}}")
        loaded |= new
print("SLOW: done")
"""


def test_commands_do_not_import_slow_packages() -> None:
    """They also run without a home folder, and on a terminal that shows only ASCII: the plan contains µs.

    `make bench-commands` measures the time.
    """
    variables = {**os.environ, "HOME": "/dev/null/home", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("SLOW:")] == ["SLOW: done"]
    assert f"{1e6 * CALL_SECONDS:.1f} ?s per call" in " ".join(done.stdout.split())
    assert (done.stdout + done.stderr).isascii()


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", b"\xc2\xb5 \xff ?"), ("ascii", b"? \xff ?")])
def test_any_text_can_be_written(encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a file name are written unchanged."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    write_any_text()
    print("µ \udcff \ud800", end="", flush=True)
    assert written.getvalue() == shown


def test_missing_package_names_extra(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The message is one line, the status is 2, and nothing is trained."""
    for package, arguments, extra in [
        ("prometheus_client", [*SMALL, "--metrics-port", "0"], "daemon"),
        ("trl", SMALL, "train"),
        ("torchao", [*SMALL, "--quantize", "nf4", "--peft.r", "4"], "qlora"),
        ("transformers", ["train", "--model", "list"], "cli"),
    ]:
        with subtests.test(package=package), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setitem(sys.modules, package, None)  # which makes the import fail
            monkeypatch.delitem(sys.modules, "infinity.telemetry.exporter", raising=False)
            monkeypatch.delattr("infinity.telemetry.exporter", raising=False)
            done = run_here(*arguments, *(["--out", tmp_path / "out"] if "--max_length" in arguments else []))
            assert done.status == 2
            assert done.output == ""
            assert len(done.errors.splitlines()) == 1, done.errors
            assert done.errors.endswith(
                f"needs the package {package}, which is not installed: pip install 'infinity-offload[{extra}]'\n"
            )
            assert not [*tmp_path.glob("out/nvme/*")]
