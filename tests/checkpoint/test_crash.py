"""Tests of runs and commands that are killed or lose power at random times: a short version of `make crash-test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("trials", "power", "least"),
    [(10, 6, (1, 2, 1, 0)), pytest.param(40, 20, (3, 15, 4, 3), marks=pytest.mark.wide)],
    ids=["some", "more"],
)
def test_killed_runs_resume_bit_for_bit(
    trials: int, power: int, least: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """Every resumed state equals the state of an uninterrupted run, and no checkpoint is lost."""
    numbers = ["--trials", str(trials), "--power", str(power), "--seed", "7"]
    command = [sys.executable, "-m", "support.crash", *numbers, "--dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    assert done.stdout.splitlines()[-1:] == [f"{trials + power} trials, 0 failures"], done.stdout + done.stderr[-4000:]
    assert done.returncode == 0
    for ranks in ("1 rank", "2 ranks"):
        found = re.search(
            rf"{ranks}: (\d+) resumes, (\d+) kills, of\s+which\s+(\d+) with.*\s(\d+)\s+interrupted\s+commands",
            done.stdout,
            re.DOTALL,
        )
        assert found, done.stdout
        # Resumes, kills, power losses, commands. The number of runs that reach a checkpoint depends on the load of the
        # machine.
        assert all(seen >= wanted for seen, wanted in zip(map(int, found.groups()), least, strict=True)), done.stdout
