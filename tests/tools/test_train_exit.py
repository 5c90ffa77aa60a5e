"""Tests of how `infinity train` exits: finished runs, closed streams, full and failing drives, and signals."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerControl

from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.plot import write_picture
from infinity_tools.signals import StopRequest
from infinity_tools.train.callbacks import RunCallback
from support.command import SMALL, Finished, Forked, at_step, environment, run_here
from support.daemon_process import until
from support.fault_engine import Fault, FaultKind
from support.train import faulty


def test_resuming_finished_run_changes_nothing(tmp_path: Path) -> None:
    """A supervisor that restarts a run until it finishes can then stop."""
    train = [*SMALL, "--out", "out", "--nvme", "nvme", "--save_steps", "2"]
    first = run_here(*train, "--max_steps", "4", "--save_total_limit", "2", "--json").summary
    before = contents(tmp_path)
    assert len([file for file in before if file.name.endswith(".json") and file.name.startswith("step")]) == 2
    for options, step in (
        (["--max_steps", "4", "--resume"], 4),
        (["--max_steps", "4", "--resume", "auto"], 4),
        (["--max_steps", "2", "--resume"], 4),
        (["--max_steps", "2", "--resume", "out/checkpoint-2"], 2),
    ):
        again = run_here(*train, *options)
        assert again.status == 0
        assert f"run {first['run_id']} has already finished at step {step}" in again.errors
        assert contents(tmp_path) == before
        assert not (tmp_path / "runs").exists()
    asked = run_here(*train, "--max_steps", "4", "--resume", "--json")
    assert (asked.status, asked.summary["finished"], asked.summary["last_step"]) == (0, True, 4)


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the state of a run and its results."""
    files = [file for file in folder.glob("nvme/*/**/*") if file.is_file()]
    return {file: file.read_bytes() for file in [folder / "out/summary.json", *files]}


def test_full_output_folder_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write error is reported once, the run is checkpointed, and the status is 0. Earlier runs are counted."""
    (tmp_path / "nvme").mkdir()
    for number in (1, 2):
        RunFolder.of([tmp_path / "nvme"], f"2026010{number}-000000-aaaaaa").create()
    (tmp_path / "out/summary.json").mkdir(parents=True)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("steps.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    ended = run_here(*SMALL, "--nvme", "nvme", "--out", "out", "--max_steps", "3", "--save_steps", "3")
    assert ended.status == 0
    assert "nvme contains 2 earlier runs (" in " ".join(ended.errors.split())
    said = "".join(ended.errors.split())  # a long path is wrapped
    assert said.count("steps.jsonlismissingstepsfrom1on:Nospaceleftondevice") == 1
    assert said.count(f"{tmp_path}/out:Isadirectory;therunitselfiscomplete") == 1
    assert "summary.png" not in ended.output, "a file that was not written is not mentioned"
    assert run_here(*SMALL, "--nvme", "nvme", "--out", "out", "--max_steps", "3", "--resume", "--json").summary[
        "finished"
    ]


def test_output_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    """No file is changed and no state is stored; `--resume` continues the log."""
    train = [*SMALL, "--out", "out", "--nvme", "nvme"]
    run_here(*train, "--max_steps", "2")
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.is_file()}
    runs = [*(tmp_path / "nvme").iterdir()]
    ended = run_here(*train, "--max_steps", "3")
    assert ended.status == 2
    assert ended.errors.startswith(f"error: {tmp_path}/out/steps.jsonl belongs to an earlier run")
    assert len(ended.errors.splitlines()) == 1
    assert all(fix in ended.errors for fix in ("choose another --out", "with --resume"))
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.is_file()} == before
    assert [*(tmp_path / "nvme").iterdir()] == runs
    assert run_here(*train, "--max_steps", "3", "--resume", "--json").summary["first_step"] == 3
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_second_run_in_output_folder_is_rejected(tmp_path: Path) -> None:
    """It is rejected even if its state is stored elsewhere."""
    second = [*SMALL, "--out", "out", "--nvme", "other", "--max_steps", "1"]
    rejected: list[Finished] = []
    with at_step(1, lambda: rejected.extend((run_here(*second), run_here(*second, "--resume", "auto")))):
        assert run_here(*SMALL, "--out", "out", "--max_steps", "2", "--json").summary["steps"] == 2
    for ended in rejected:
        assert ended.status == 2
        assert ended.errors.startswith(f"error: another run is writing to --out '{tmp_path}/out'")
        assert len(ended.errors.splitlines()) == 1
    assert len(rejected) == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("kind", "reason"), [("pipe", "No such device"), ("link", "it is a link"), ("folder", "Is a directory")]
)
def test_steps_log_must_be_regular_file(kind: str, reason: str, tmp_path: Path) -> None:
    """The run neither waits for a pipe nor follows a link, and stores nothing on NVMe."""
    (tmp_path / "out").mkdir()
    (tmp_path / "other").write_text("kept")
    log = tmp_path / "out/steps.jsonl"
    {"pipe": lambda: os.mkfifo(log), "link": lambda: log.symlink_to(tmp_path / "other"), "folder": log.mkdir}[kind]()
    ended = run_here(*SMALL, "--out", "out", "--max_steps", "1")
    assert ended.status == 2
    assert f"out/steps.jsonl cannot be written: {reason}" in ended.errors
    assert "choose another --out" in ended.errors
    assert not (tmp_path / "out/nvme").exists()
    assert (tmp_path / "other").read_text() == "kept"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("streams", "options", "status"),
    [("<&- >&- 2>&-", "", 0), (">/dev/full 2>/dev/full", "", 1), ("2>&1 | true", "--save_steps 1", 0)],
    ids=["closed", "full", "no reader"],
)
def test_unusable_standard_streams_do_not_stop_training(
    streams: str, options: str, status: int, tmp_path: Path
) -> None:
    """The run finishes with a checkpoint, and no message is written into its files.

    The status is 1 if the result cannot be printed.
    """
    train = f"{sys.executable} -m infinity_tools {' '.join(SMALL)} --out out --max_steps 2 {options}"
    script = f"set -o pipefail; {train} {streams}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path / "tmp"), timeout=600, check=False
    )
    assert done.returncode == status
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["checkpointed_step"] == 2
    assert run_here("store", "verify", "out/nvme").status == 0


@pytest.mark.wide
def test_closed_terminal_stops_run_with_checkpoint(tmp_path: Path) -> None:
    """The output has no reader any more, which does not stop training. SIGHUP may arrive more than once."""
    for name in ("stdout", "stderr"):
        os.mkfifo(name)
    process = Forked(["infinity_tools", *SMALL, "--out", "out", "--max_steps", "100000"], env=environment(tmp_path))
    log = tmp_path / "out/steps.jsonl"
    try:
        with open("stdout"), open("stderr") as errors:
            assert errors.readline().startswith("loading"), errors.read()
        until(lambda: (log.exists() and len(log.read_text().splitlines()) > 4) or process.poll() is not None)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        assert process.wait(300) == 128 + signal.SIGHUP
    finally:
        process.kill()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["interrupted"]
    assert summary["checkpointed_step"] == summary["steps"] > 4
    assert run_here("store", "verify", "out/nvme").status == 0


def test_signal_at_end_of_epoch_saves_once_without_evaluation(tmp_path: Path) -> None:
    """The weights stay those from which the run resumes."""
    view, stop = cast("Any", None), cast("Any", SimpleNamespace(received=signal.SIGTERM))
    args = SimpleNamespace(save_strategy="epoch", save_only_model=False, load_best_model_at_end=True)
    state, control = SimpleNamespace(global_step=7, best_model_checkpoint="o/checkpoint-3"), TrainerControl()
    callback = RunCallback(tmp_path, Ranks(0, 0, 1), view, stop, print)
    callback.on_step_end(args, state, control)
    assert (control.should_save, control.should_training_stop) == (True, True)
    callback.on_save(args, state, control)
    assert (callback.checkpointed, callback.best) == (7, 0)
    control.should_save = control.should_evaluate = True  # as the Trainer does at the end of an epoch
    callback.on_epoch_end(args, state, control)
    assert (control.should_save, control.should_evaluate) == (False, False)


def test_forwarded_signals_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal that arrives later ends the run immediately."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopRequest() as stop:
        stop.patient = True
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.received == signal.SIGTERM
        now = 110.0
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SystemExit) as ending:
            os.kill(os.getpid(), signal.SIGTERM)
    assert ending.value.code == 128 + signal.SIGTERM


def test_run_longer_than_record_limit_writes_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step records are bounded, but the losses of all steps are kept."""
    monkeypatch.setattr("infinity.run.optimizer._KEPT_RECORDS", 3)
    ended = run_here(*SMALL, "--out", "out", "--max_steps", "5")
    assert ended.status == 0
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").glob("s*.*")} == {0o644}
    assert "not included" not in ended.output
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["steps"], len(summary["losses"])) == (5, 5)
    assert [record["step"] for record in summary["step_records"]] == [3, 4, 5]
    (tmp_path / "full").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            write_picture(tmp_path / "full", summary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "full").iterdir()), "the partial file is removed"


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
