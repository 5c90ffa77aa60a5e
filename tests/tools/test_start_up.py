"""Commands start quickly: what takes long to import is imported when it is used, and not to print help."""

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
    """Run a command in a process of its own; return which of the slow packages it has imported."""
    done = subprocess.run([sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    "words", ["-h", "train -h", "store ls -h", "version", "store ls .", "status", "tune -h", "tune --nvme /nowhere/x"]
)
def test_what_needs_no_torch_does_not_import_it(words: str) -> None:
    """`make bench-commands` has the seconds."""
    assert imported(*words.split()) == []
