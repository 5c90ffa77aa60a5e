"""Tests of `infinity tune`: results, stopped searches and cleanup, with real trials and with simulated ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from infinity import Config, load_config
from infinity_tools.trial_folders import PREFIX, trial_folders
from infinity_tools.tune import tuning
from infinity_tools.tune.outcome import Bounds, Outcome
from infinity_tools.tune.trial import Trials, Workload
from support.command import run_here
from support.daemon_process import until
from support.processes import fork_server

SMALL = ["tune", "--model", "tiny", "--seq", "32", "--batch-tokens", "64", "--host-memory", "2MiB", "--threads", "1"]
SMALL += ["--out", "tuned"]


def test_search_with_real_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are not tuned are kept, and no trial files remain."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "start.toml").write_text(
        '[storage]\npaths = ["a", "b"]\nqueue_depth = 8\nretries = 5\n'
        '[run]\nretained_checkpoints = 2\nresume = "latest"\n'
        '[telemetry]\ntimeline = "trace.json"\n'
    )
    words = [*SMALL, "--config", "start.toml", "--minutes", "0.05", "--max-grad-norm", "1", "--micro-tokens", "32"]
    words += ["--loss-tokens", "10", "--activations", "nvme", "--allow-format", "split", "--repeats", "1", "--json"]
    done = run_here(*words)
    assert (done.status, done.errors) == (0, "")
    stored = json.loads((tmp_path / "tuned/tune.json").read_text())
    records = stored.pop("trial_records")
    assert stored == done.summary
    assert (records[0]["role"], records[0]["candidate"]["storage.queue_depth"]) == ("start", 8)
    assert records[0]["outcome"]["seconds"] > 0
    assert sum(stored["trials"].values()) == len(records)
    assert stored["written_bytes"] > stored["parameters"] * 14, "every trial stores the model"
    found = load_config("tuned/infinity.toml")
    assert found.storage.paths == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert (found.storage.retries, found.run.retained_checkpoints, found.run.resume) == (5, 2, "latest")
    assert found.activations.tier == "nvme"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start.toml", "tmp", "tuned"]
    assert not list(tmp_path.rglob("*.stats"))


class SimulatedWorker:
    """Worker whose steps take half as long with 64 requests in flight. A signal arrives after `left` trials."""

    facts: ClassVar = {"model": "tiny", "parameters": 1, "dtype": "fp32", "device": "cpu", "torch": "2"}
    left = sys.maxsize

    def __init__(self, *_: object) -> None:
        self.trials = 0

    def __enter__(self) -> SimulatedWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    def measure(self, candidate: dict[str, Any], bounds: Bounds) -> Outcome:
        self.trials += 1
        if self.trials > self.left:
            raise SystemExit(130)
        return Outcome(kind="measured", seconds=0.5 if candidate["storage.queue_depth"] == 64 else 1.0)


def test_best_settings_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is stopped writes the best settings so far, if a candidate was faster.

    The files of an earlier search are replaced or removed together.
    """
    monkeypatch.setattr(tuning, "Worker", SimulatedWorker)
    done = run_here(*SMALL, "--nvme", "nvme")
    assert done.status == 0, done.errors
    assert "2.00 times as fast as the defaults (2.00 to 2.00 in 3 rounds): 1 → 0.5 s per step" in done.output
    assert load_config("tuned/infinity.toml").storage.queue_depth == 64
    summary = json.loads(Path("tuned/tune.json").read_text())
    assert summary["changes"] == {"storage.queue_depth": 64}
    assert Path("tuned/tune.png").read_bytes().startswith(b"\x89PNG")
    assert "--config tuned/infinity.toml" in done.output
    most = len(summary["trial_records"]) - 1
    for left, found, files in ((2, False, sorted(tuning.FILES)), (most, True, ["infinity.toml"]), (2, False, [])):
        if not files:
            shutil.rmtree("tuned")
        monkeypatch.setattr(SimulatedWorker, "left", left)
        done = run_here(*SMALL, "--nvme", "nvme")
        assert done.status == 130
        assert sorted(path.name for path in Path().glob("tuned/*")) == files
        assert ("queue_depth 64" in done.errors.splitlines()[-1]) == found, done.errors
        assert not files or load_config("tuned/infinity.toml").storage.queue_depth == 64
    assert not Path("nvme").exists()


def test_exit_status_of_a_stopped_search_does_not_depend_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "Worker", SimulatedWorker)
    monkeypatch.setattr(SimulatedWorker, "left", 2)
    say = tuning.View.say

    def closed(view: tuning.View, text: str) -> None:
        if text.startswith("stopped"):
            raise BrokenPipeError
        say(view, text)

    monkeypatch.setattr(tuning.View, "say", closed)
    assert run_here(*SMALL, "--nvme", "nvme").status == 130


def search(folder: Path) -> None:
    """Search until a signal arrives, and write the error output to a file."""
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None  # TMPDIR has changed
    done = run_here(*SMALL, "--nvme", "nvme", "--minutes", "10")
    (folder / "errors").write_text(done.errors)
    sys.exit(done.status)


def begin(folder: Path) -> tuple[BaseProcess, list[psutil.Process]]:
    """Start a search, wait until a trial has files on the drive, and return its process and its child processes."""
    process = fork_server().Process(target=search, args=(folder,))
    process.start()
    until(lambda: list(folder.glob(f"nvme/{PREFIX}*/runs/*/*.pages")) or not process.is_alive())
    assert process.is_alive(), (folder / "errors").read_text()
    return process, psutil.Process(process.pid).children(recursive=True)


def leftovers(folder: Path) -> list[Path]:
    """Return the trial folders and stats files that remain."""
    return [path for path in folder.rglob("*") if path.name.startswith(PREFIX) or path.suffix == ".stats"]


@pytest.mark.parametrize(
    ("number", "everyone"), [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.wide)]
)
def test_stopped_search_leaves_neither_processes_nor_files(
    number: signal.Signals, everyone: bool, tmp_path: Path
) -> None:
    """Ctrl-C in a terminal signals all processes."""
    process, started = begin(tmp_path)
    for one in (*(started if everyone else ()), psutil.Process(process.pid)):
        one.send_signal(number)
    process.join(600)
    assert process.exitcode == 128 + number
    assert "stopped: " in (tmp_path / "errors").read_text()
    assert not psutil.wait_procs(started, timeout=600)[1]
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "nvme").exists(), "the search created the folder"


@pytest.mark.parametrize("everyone", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_files_of_killed_search_are_removed(everyone: bool, tmp_path: Path) -> None:
    """The worker removes them or, if it was killed too, the next search."""
    process, started = begin(tmp_path)
    for one in (*(started if everyone else ()), psutil.Process(process.pid)):
        one.kill()
    process.join(600)
    assert not psutil.wait_procs(started, timeout=600)[1]
    assert bool(leftovers(tmp_path)) == everyone
    (tmp_path / "nvme").mkdir(exist_ok=True)
    with trial_folders([str(tmp_path / "nvme")], Config().telemetry):
        assert len(list((tmp_path / "nvme").iterdir())) == 1
    assert leftovers(tmp_path / "nvme") == []


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
    monkeypatch.setattr("infinity_tools.tune.trial._LEAST_SECONDS", 0.0)
    workload = Workload(model="tiny", dtype="bf16", activation_checkpointing=True, batch_tokens=512, micro_tokens=None,
                        loss_tokens=100, seq=32, max_grad_norm=1.0, threads=1)  # fmt: skip
    outcome = Trials(workload).run(settings, {}, [str(tmp_path)], Bounds())
    assert (outcome.kind, outcome.effective["update.schedule"]) == ("measured", "in_forward"), outcome.reason
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
