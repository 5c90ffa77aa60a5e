"""Tests of command startup: slow packages are imported only when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = ("torch", "numpy", "matplotlib", "transformers", "datasets", "optuna")
COUNT = f"""
import sys
from contextlib import suppress
from infinity_tools.cli import app
with suppress(SystemExit):
    app(sys.argv[1:], prog_name="infinity")
print(*sorted(set(sys.modules) & set({SLOW!r})), file=sys.stderr)
"""


def imported(*words: str) -> list[str]:
    """Return the slow packages that a command imports in a separate process."""
    done = subprocess.run([sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1].split()


PLAN = "plan --parameters 1e9 --layers 4 --hidden 4096 --vocabulary 32000 --nvme-bandwidth 7e9/5e9 --gpu h100"
COMMANDS = (
    "-h",
    "train -h",
    "store ls -h",
    "store ls .",
    "version",
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


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_do_not_import_slow_packages(words: str) -> None:
    """`make bench-commands` measures the time."""
    assert imported(*words.split()) == []
