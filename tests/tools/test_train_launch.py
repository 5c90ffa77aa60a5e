"""`infinity train --nproc`: ranks, their signals, and their ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity_tools import launch
from support.command import SMALL, environment, run_here, run_process, training

ACT = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
act = sys.argv[-1]
if act == "fail" and rank == 1:
    sys.exit(7)
if act == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if act != "end":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    open(f"ready{rank}", "w").close()
    time.sleep(60)
print(rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"] > "", flush=True)
"""
"""What ranks of these tests do instead of training."""


def started(folder: Path, act: str) -> subprocess.Popen[str]:
    """Start two ranks that do something else than training."""
    (folder / "act.py").write_text(ACT)
    code = (
        "import sys; from infinity_tools import launch; launch._GRACE = 0.2; launch._PROGRAM = ['act.py'];"
        f"sys.exit(launch.launch(2, [{act!r}]))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment(folder / "tmp"),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


@pytest.mark.parametrize(("act", "status"), [("end", 0), ("fail", 7), ("killed", 128 + signal.SIGKILL)])
def test_the_status_is_that_of_the_rank_that_failed(act: str, status: int, tmp_path: Path) -> None:
    """The others, which would wait for it for ever, are ended."""
    process = started(tmp_path, act)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    if act == "end":
        assert sorted(output.splitlines()) == ["0 2 0 True", "1 2 1 True"]


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even if that is killed."""
    process = started(tmp_path, "wait")
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.kill()
    process.wait()
    while any(os.path.exists(f"/proc/{child}/cmdline") and Path(f"/proc/{child}/cmdline").read_bytes()
              for child in children):  # fmt: skip
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(children) == 2


def test_a_signal_ends_the_run_in_order(tmp_path: Path) -> None:
    """It is passed on; the step that runs is finished, and checkpointed."""
    with training(tmp_path, *SMALL, "--nproc", "2", "--steps", "100000", "--out", "o") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.read().count("stopping after this step") == 1
        assert process.wait(300) == 128 + signal.SIGTERM
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert (summary["world_size"], summary["interrupted"]) == (2, True)
    assert summary["checkpointed_step"] == summary["steps"]
    assert summary["next"]["resume"].startswith("infinity train --nproc 2 --model tiny")


@pytest.mark.wide
def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    """By one of the ranks, with its status."""
    ended = run_process(tmp_path, *SMALL, "--nproc", "2", "--batch-tokens", "96", "--out", "o")
    assert ended.status == 2
    assert ended.errors.count("--batch-tokens 96 ") == 1
    assert ended.errors.count("among 2 ranks") == 1


def test_not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would start ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = run_here(*SMALL, "--nproc", "2")
    assert ended.status == 2
    assert "--nproc 2 " in ended.errors
    assert "RANK and WORLD_SIZE are set" in ended.errors
    assert launch.launch
