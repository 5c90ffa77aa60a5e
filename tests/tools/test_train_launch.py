"""Tests of `infinity train --nproc`: ranks, signals and exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from infinity_tools import launch
from support.command import SMALL, environment, run_here, run_ranks
from support.daemon_process import until
from support.processes import fork_server

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


def launch_act(folder: str, act: str) -> int:
    """Run `ACT` instead of training on two ranks."""
    Path(folder, "act.py").write_text(ACT)
    with patch.multiple(launch, _PROGRAM=[f"{folder}/act.py"], _GRACE=0.2), contextlib.chdir(folder):
        return launch.launch(2, [act])


@pytest.mark.parametrize(("act", "status"), [("end", 0), ("fail", 7), ("killed", 128 + signal.SIGKILL)])
def test_exit_status_is_that_of_failed_rank(
    act: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other ranks, which would wait forever, are stopped."""
    assert launch_act(str(tmp_path), act) == status
    if act == "end":
        assert sorted(capfd.readouterr().out.splitlines()) == ["0 2 0 True", "1 2 1 True"]


def test_ranks_exit_with_their_launcher(tmp_path: Path) -> None:
    """The launcher is killed without a chance to stop them."""
    process = fork_server().Process(target=launch_act, args=(str(tmp_path), "wait"))
    process.start()
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)) or not process.is_alive())
    children = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    assert len(children) == 2
    assert not psutil.wait_procs(children, timeout=120)[1]


TRAIN = [*SMALL, "--max_steps", "100000", "--out", "o"]


def signalled(number: signal.Signals, folder: Path) -> tuple[int, str]:
    """Train on two ranks, signal their launcher after the first step, and return the status and the error output."""
    log = folder / "o/steps.jsonl"

    def send() -> None:
        until(lambda: log.exists() and log.read_text())
        os.kill(os.getpid(), number)

    before = signal.signal(number, lambda *_: None)  # a late signal must not end this process
    sender = threading.Thread(target=send)
    sender.start()
    try:
        ended = run_ranks(*TRAIN)
    finally:
        sender.join()
        signal.signal(number, before)
    return ended.status, ended.errors


def test_signal_stops_all_ranks_with_checkpoint(tmp_path: Path) -> None:
    """The current step is finished first."""
    status, errors = signalled(signal.SIGUSR1, tmp_path)
    assert status == 128 + signal.SIGUSR1, errors
    assert errors.count("stopping after this step") == 1
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert (summary["world_size"], summary["interrupted"]) == (2, True)
    assert summary["checkpointed_step"] == summary["steps"]
    assert summary["next"]["resume"].endswith("recipe.yaml --resume --nproc 2")


@pytest.mark.wide
def test_torchrun_passes_on_warning_of_slurm(tmp_path: Path) -> None:
    """Without `--signals-to-handle`, SIGUSR1 ends torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--shutdown-timeout=300", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", "-m", "infinity_tools", *TRAIN]
    with subprocess.Popen(command, env=environment(tmp_path / "tmp"), stderr=subprocess.PIPE, text=True) as process:
        try:
            while "step 1/" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGUSR1)
            errors = process.stderr.read()
            assert process.wait(300) != 0
        finally:
            process.kill()
    assert "stopping after this step" in errors
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["interrupted"]
    assert summary["checkpointed_step"] == summary["steps"]


def test_nproc_under_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each rank would start ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = run_here(*SMALL, "--nproc", "2")
    assert ended.status == 2
    assert "--nproc 2 " in ended.errors
    assert "RANK and WORLD_SIZE are set" in ended.errors
