"""Tests of `infinity train` on a failing drive: one message per rank, an error status, and a bitwise exact resume."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import infinity.run.run
from support.command import SMALL, Finished, environment, run_here
from support.command_faults import inject_faults

STEPS = ["--max_steps", "8", "--save_steps", "2", "--json"]
EIO = r"StorageError: (read|write) of \d+ bytes at offset \d+ of \S+rank00001\.pages failed: EIO \(Input/output error\)"


def train(folder: Path, *fault: str, out: str, resume: bool = False) -> Finished:
    """Train on two ranks; `fault` contains the arguments of `support/command_faults.py`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["support.command_faults", *fault] if fault else ["infinity_tools"]
    command += [*SMALL, *STEPS, "--out", out, *(["--resume"] if resume else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment(folder / "tmp"), check=False
    )
    return Finished(status=done.returncode, output=done.stdout, errors=done.stderr)


def test_drive_error_names_last_checkpoint_and_resume_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is the last line, and it works after the drive has recovered."""
    command = [*SMALL, "--max_steps", "60", "--save_steps", "1", "--out", "out"]
    with monkeypatch.context() as broken:
        broken.setattr("infinity.run.run.open_engine", infinity.run.run.open_engine)  # restored at the end
        inject_faults("eio", 250, 9999)
        done = run_here(*command)
    assert done.status == 1
    error, last = done.errors.splitlines()[-2:]
    assert re.search(r"error: (read|write) of .* failed: EIO", error)
    found = re.fullmatch(r"the last checkpoint is step (\d+); resume with: infinity (.*)", last)
    assert found is not None, last
    resumed = run_here(*shlex.split(found[2]), "--max_steps", str(int(found[1]) + 1), "--json")
    assert resumed.summary["first_step"] == int(found[1]) + 1


@pytest.mark.slow
@pytest.mark.wide
def test_drive_error_stops_both_ranks_and_resume_is_bitwise(tmp_path: Path) -> None:
    straight = train(tmp_path, "1", "eio", "100", "1", out="a")
    assert straight.summary["nvme_retries_total"] == 1
    assert "retrying" not in straight.output
    broken = train(tmp_path, "1", "eio", "240", "9999", out="b")
    assert broken.status != 0
    said = [line for line in broken.errors.splitlines() if re.match(r"rank \d: error: ", line)]
    mine, *others = sorted(said, reverse=True)
    assert re.match(rf"rank 1: error: {EIO.removeprefix('StorageError: ')}", mine), mine
    # torchrun stops the other rank when the first one exits, perhaps before it can report the reason.
    assert len(others) <= 1, broken.errors
    assert all(re.match(rf"rank 0: error: rank 1 failed: {EIO}", line) for line in others), others
    assert 'File "' not in re.sub(r"(?s)\S*torch/distributed/.*", "", broken.errors), "only torchrun prints a traceback"
    seen = [json.loads(line)["loss"] for line in (tmp_path / "b/steps.jsonl").read_text().splitlines()]
    assert seen == [loss for _, loss in straight.summary["losses"][: len(seen)]]
    rest = train(tmp_path, out="b", resume=True).summary
    assert 1 < rest["first_step"] <= len(seen) + 1
    assert rest["losses"] == straight.summary["losses"][rest["first_step"] - 1 :]
