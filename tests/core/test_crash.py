"""A few of the trials of `make crash-test`: runs and commands, killed or cut off from power at random instants."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_killed_lives_resume_bit_for_bit(tmp_path: Path) -> None:
    """Every resumed state equals that of a run that nobody disturbs, and nothing committed is lost."""
    script = Path(__file__).with_name("core_crash.py")
    command = [sys.executable, str(script), "--trials", "40", "--power", "20", "--seed", "7", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.stdout.splitlines()[-1:] == ["60 trials, 0 failures"], done.stdout + done.stderr[-4000:]
    assert done.returncode == 0
    for ranks in ("1 rank", "2 ranks"):
        found = re.search(
            rf"{ranks}: (\d+) resumes, (\d+) lives killed, of which\s(\d+) lost power.*\s(\d+) were\s+commands",
            done.stdout,
            re.DOTALL,
        )
        assert found, done.stdout
        resumes, killed, losses, commands = map(int, found.groups())
        assert resumes >= 3  # how many lives get as far as a commit depends on how busy the machine is
        assert killed >= 15
        assert losses >= 4
        assert commands >= 3
