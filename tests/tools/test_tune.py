"""Tests of `infinity tune` with a real model: results, resuming and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from infinity import Config, load_config
from infinity_tools.trial_folders import PREFIX, trial_folders
from infinity_tools.tune.outcome import Bounds, Outcome
from infinity_tools.tune.trial import Trials, Workload
from support.command import environment, run_here

SMALL = ["tune", "--model", "tiny", "--seq", "32", "--batch-tokens", "64", "--host-memory", "2MiB", "--threads", "1"]
SMALL += ["--nvme", "nvme", "--out", "tuned"]


def leftovers(folder: Path) -> list[str]:
    """Return the trial folders and stats files that remain."""
    return [str(path) for path in folder.rglob("*") if path.name.startswith(PREFIX) or path.suffix == ".stats"]


def workers(pid: int) -> list[psutil.Process]:
    """Return the processes that a search has started."""
    return psutil.Process(pid).children(recursive=True)


def begin(folder: Path, *more: str, minutes: str = "10") -> subprocess.Popen[str]:
    """Start a long search and wait until a trial has files on the drive."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity_tools", *SMALL, "--minutes", minutes, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment(folder / "tmp"), text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(folder.glob(f"nvme/{PREFIX}*/runs/*/*.pages")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def ended(processes: list[psutil.Process]) -> bool:
    """Return whether all processes exit in time."""
    return not psutil.wait_procs(processes, timeout=600)[1]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder in which a search has run, and its JSON output."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tmp").mkdir()
    (folder / "nvme").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "infinity_tools", *SMALL, "--minutes", "0.1", "--repeats", "1", "--json"],
        capture_output=True, text=True, cwd=folder, env=environment(folder / "tmp"), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return folder, json.loads(done.stdout)


def test_tune_writes_journal_plot_and_json(tuned: tuple[Path, dict[str, Any]]) -> None:
    """The stored results match the output of `--json`."""
    folder, summary = tuned
    stored = json.loads((folder / "tuned/tune.json").read_text())
    journal = stored.pop("journal")
    assert stored == summary
    assert journal[0]["role"] == "start"
    assert journal[0]["outcome"]["seconds"] > 0
    assert sum(summary["trials"].values()) == len(journal)
    assert summary["written_bytes"] > summary["parameters"] * 14, "every trial stores the model"
    assert (folder / "tuned/tune.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((folder / "tuned/trials.json").read_text())["trials"]) == len(journal)
    assert summary["faster"] == (summary["best"] != summary["start"])
    if not summary["faster"]:
        assert summary["gain"]["over_start"] == 1.0


def test_finished_search_removes_trial_files(tuned: tuple[Path, dict[str, Any]]) -> None:
    """Stats files are removed as well."""
    folder, _ = tuned
    assert leftovers(folder) == []
    assert list((folder / "nvme").iterdir()) == []


def test_train_uses_tuned_settings(tuned: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, summary = tuned
    monkeypatch.chdir(folder)
    settings = load_config("tuned/infinity.toml")
    assert settings.storage.paths == (str(folder / "nvme"),)
    assert settings.memory.host_bytes == summary["best"]["memory.host_bytes"] <= 2 << 20
    words = ["--model", "tiny", "--max_length", "32", "--max_steps", "1", "--out", "out", "--json"]
    done = run_here("train", "--config", "tuned/infinity.toml", *words)
    assert done.status == 0, done.errors
    assert done.summary["nvme_paths"] == [str((folder / "nvme").resolve())]


def test_resume_reuses_completed_trials(tuned: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same time limit, no new trial is run; a different search is rejected."""
    folder, summary = tuned
    monkeypatch.chdir(folder)
    journal = folder / "tuned/trials.json"
    before = journal.read_text()
    again = run_here(*SMALL, "--minutes", "0.1", "--repeats", "1", "--json", "--resume")
    assert again.status == 0, again.errors
    assert again.summary["trials"] == summary["trials"]
    assert again.summary["best"] == summary["best"]
    assert journal.read_text() == before
    rejected = run_here(*SMALL, "--minutes", "0.1")
    assert rejected.status == 2
    assert "pass --resume" in rejected.errors
    other = run_here(*SMALL, "--minutes", "0.1", "--resume", "--batch-tokens", "128", "--host-memory", "3MiB")
    assert other.status == 2
    assert "batch-tokens 128 (was 64)" in other.errors
    assert "host-memory 3145728 (was 2097152)" in other.errors
    assert journal.read_text() == before


def test_stopped_search_keeps_only_its_journal(tmp_path: Path) -> None:
    """No process or folder remains, also if Ctrl-C in a terminal signals all processes."""
    for number, everyone in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        process = begin(tmp_path)
        wait_for_trials(process, tmp_path, lambda rows: len(rows) > 0)  # there is no journal before
        started = workers(process.pid)
        assert started
        for one in (*(started if everyone else ()), psutil.Process(process.pid)):
            one.send_signal(number)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
        assert "stopped: " in errors
        assert ended(started)
        assert leftovers(tmp_path) == []
        assert not (tmp_path / "nvme").exists(), "the search created the folder"
        (journal,) = (tmp_path / "tuned").iterdir()
        journal.unlink()


def test_worker_cleans_up_after_killed_search(tmp_path: Path) -> None:
    """The worker notices, closes its run and removes the folders."""
    process = begin(tmp_path)
    started = workers(process.pid)
    process.kill()
    assert ended(started)
    process.communicate(timeout=600)
    assert leftovers(tmp_path) == []


def test_next_search_removes_leftovers_of_killed_search(tmp_path: Path) -> None:
    process = begin(tmp_path)
    started = workers(process.pid)
    for one in (*started, psutil.Process(process.pid)):
        one.kill()
    process.communicate(timeout=600)
    assert ended(started)
    assert leftovers(tmp_path / "nvme")
    telemetry = load_config(None).telemetry
    with trial_folders([str(tmp_path / "nvme")], telemetry):
        assert len(list((tmp_path / "nvme").iterdir())) == 1
    assert list((tmp_path / "nvme").iterdir()) == []


def test_killed_trial_is_recorded_as_failed(tmp_path: Path) -> None:
    """The search continues in a new process."""
    process = begin(tmp_path)
    assert len(wait_for_trials(process, tmp_path, lambda rows: len(rows) > 0)) == 1, "the second trial is running"
    (worker,) = [one for one in workers(process.pid) if "spawn_main" in " ".join(one.cmdline())]
    worker.kill()
    kinds = partial(map, lambda row: row["outcome"]["kind"])
    rows = wait_for_trials(
        process, tmp_path, lambda rows: "measured" in kinds(rows[2:])
    )  # it may skip unpromising candidates
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in errors) == (128 + signal.SIGINT, False)
    assert [*kinds(rows[:2])] == ["measured", "failed"]
    assert rows[1]["outcome"]["reason"] == "the trial process was killed (out of memory?)"
    assert leftovers(tmp_path) == []


def wait_for_trials(
    process: subprocess.Popen[str], folder: Path, done: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Wait until the trials in the journal satisfy `done`, and return them."""
    journal, deadline = folder / "tuned/trials.json", time.monotonic() + 300
    rows: list[dict[str, Any]] = []
    while not done(rows):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
        if journal.exists():
            rows = json.loads(journal.read_text())["trials"]
    return rows


def test_settings_file_is_kept_except_tuned_settings(tmp_path: Path) -> None:
    """Clipping excludes updates in backward, and the storage paths may come from the file."""
    (tmp_path / "start.toml").write_text(
        '[storage]\npaths = ["a", "b"]\nqueue_depth = 8\nretries = 5\n'
        '[run]\nretained_checkpoints = 2\nresume = "latest"\n'
        '[telemetry]\ntimeline = "trace.json"\n'
    )
    words = [*SMALL[: SMALL.index("--nvme")], "--out", "tuned", "--config", "start.toml", "--minutes", "0.05"]
    words += ["--max-grad-norm", "1", "--micro-tokens", "32", "--loss-tokens", "10", "--activations", "nvme"]
    done = run_here(*words, "--allow-format", "split", "--repeats", "1")
    assert done.status == 0, done.errors
    found = load_config("tuned/infinity.toml")
    assert found.storage.paths == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert (found.storage.retries, found.run.retained_checkpoints, found.run.resume) == (5, 2, "latest")
    assert found.activations.tier == "nvme"
    rows = json.loads((tmp_path / "tuned/trials.json").read_text())["trials"]
    assert ["start", "defaults"][: len(rows)] == [row["role"] for row in rows][:2], (
        "the second trial requires enough time"
    )
    assert rows[0]["candidate"]["storage.queue_depth"] == 8
    measured = [row["outcome"] for row in rows if row["outcome"]["kind"] == "measured"]
    assert {row["effective"]["update.schedule"] for row in measured} == {"in_forward"}
    assert not (tmp_path / "trace.json").exists(), "trials write no timeline"
    assert not (tmp_path / "a").exists(), "the search created the folder"
    assert "--loss-tokens" in done.output.splitlines()[-1]
    again = run_here(*words[:-3], "20", "--activations", "device", "--resume")
    assert "loss-tokens 20 (was 10)" in again.errors
    assert "activations device (was nvme)" in again.errors
    assert " the start" in done.output


def test_trials_use_training_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials slice the loss and page activations as `infinity train` does."""
    settings = Config().with_values(**{"memory.host_bytes": "4MiB", "activations.tier": "nvme"})
    seen = []
    measure = Trials._measure

    def look(trials: Trials, model: Any, paged: Any, bounds: Bounds) -> Outcome:
        outcome = measure(trials, model, paged, bounds)
        seen.append((model.forward.tokens, paged.run.activation_traffic.kept))
        return outcome

    monkeypatch.setattr(Trials, "_measure", look)
    workload = Workload(model="tiny", dtype="bf16", activation_checkpointing=True, batch_tokens=512, micro_tokens=None,
                        loss_tokens=100, seq=32, max_grad_norm=None, threads=1)  # fmt: skip
    outcome = Trials(workload).run(settings, {}, [str(tmp_path)], Bounds())
    assert outcome.kind == "measured", outcome.reason
    ((tokens, kept),) = seen
    assert tokens == 100
    assert kept > 0


def test_tune_under_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each rank would run its own search."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run_here(*SMALL)
    assert done.status == 2
    assert "WORLD_SIZE=2" in done.errors
    assert not Path("tuned").exists()
