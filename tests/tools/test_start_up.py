"""Tests of command startup: slow packages are imported only when they are used."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from infinity.cli_errors import write_any_text
from infinity.estimate.machine import CALL_SECONDS

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
