"""Tests of `infinity train --nproc`: ranks, signals and exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
"""Program that the ranks run instead of training."""


def start_ranks(folder: Path, act: str) -> subprocess.Popen[str]:
    """Start two ranks that run `ACT` instead of training."""
    (folder / "act.py").write_text(ACT)
    code = (
        "import sys; from infinity_tools import launch; launch._GRACE = 0.2; launch._PROGRAM = ['act.py'];"
        f"sys.exit(launch.launch(2, [{act!r}]))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment(folder / "tmp"),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


@pytest.mark.parametrize(("act", "status"), [("end", 0), ("fail", 7), ("killed", 128 + signal.SIGKILL)])
def test_exit_status_is_that_of_failed_rank(act: str, status: int, tmp_path: Path) -> None:
    """The other ranks, which would wait forever, are stopped."""
    process = start_ranks(tmp_path, act)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    if act == "end":
        assert sorted(output.splitlines()) == ["0 2 0 True", "1 2 1 True"]


def test_ranks_exit_with_their_launcher(tmp_path: Path) -> None:
    """The launcher is killed without a chance to stop them."""
    process = start_ranks(tmp_path, "wait")
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_stop_all_ranks_with_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    """The current step is finished first."""
    with training(tmp_path, *SMALL, "--nproc", "2", "--max_steps", "100000", "--out", "o") as process:
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.read().count("stopping after this step") == 1
        assert process.wait(300) == 128 + number
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert (summary["world_size"], summary["interrupted"]) == (2, True)
    assert summary["checkpointed_step"] == summary["steps"]
    assert summary["next"]["resume"].endswith("recipe.yaml --resume --nproc 2")


@pytest.mark.wide
def test_torchrun_passes_on_warning_of_slurm(tmp_path: Path) -> None:
    """Without `--signals-to-handle`, SIGUSR1 ends torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--shutdown-timeout=300"]
    launcher += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", "-m", "infinity_tools"]
    command = [*SMALL, "--max_steps", "100000", "--out", "o"]
    with training(tmp_path, *command, program=launcher) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        assert "stopping after this step" in process.stderr.read()
        assert process.wait(300) != 0
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["interrupted"]
    assert summary["checkpointed_step"] == summary["steps"]


@pytest.mark.wide
def test_invalid_option_is_reported_by_one_rank(tmp_path: Path) -> None:
    ended = run_process(tmp_path, *SMALL, "--nproc", "2", "--host-memory", "64KiB", "--out", "o")
    assert ended.status == 2
    assert ended.errors.count("the host cache is too small") == 1


def test_nproc_under_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each rank would start ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = run_here(*SMALL, "--nproc", "2")
    assert ended.status == 2
    assert "--nproc 2 " in ended.errors
    assert "RANK and WORLD_SIZE are set" in ended.errors
