"""Test of `infinity train` on a failing drive: the message, the exit status, and the command that resumes the run."""

from __future__ import annotations

import re
import shlex

from support.command import SMALL, run_here
from support.fault_engine import Fault, FaultKind
from support.train import faulty


def test_drive_error_names_last_checkpoint_and_resume_command() -> None:
    """The command is the last line, and it works after the drive has recovered."""
    with faulty(Fault(kind=FaultKind.EIO, at=tuple(range(250, 10_000)))):
        done = run_here(*SMALL, "--max_steps", "60", "--save_steps", "1", "--out", "out")
    assert done.status == 1
    error, last = done.errors.splitlines()[-2:]
    assert re.search(r"error: (read|write) of .* failed: EIO", error)
    found = re.fullmatch(r"the last checkpoint is step (\d+); resume with: infinity (.*)", last)
    assert found is not None, last
    resumed = run_here(*shlex.split(found[2]), "--max_steps", str(int(found[1]) + 1), "--json")
    assert resumed.summary["first_step"] == int(found[1]) + 1
