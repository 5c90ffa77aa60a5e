"""Tests of `infinity tune`: results, stopped searches, cleanup and files, with real trials and with simulated ones."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from rich.console import Console

from infinity import Config, load_config
from infinity.errors import ConfigError, InfinityError
from infinity.store.marker import new_run_id
from infinity_tools import trial_folders
from infinity_tools.toml import settings_toml, tree_toml
from infinity_tools.trial_folders import PREFIX
from infinity_tools.tune import trial_worker, tune_command, tuning
from infinity_tools.tune.outcome import Bounds, Outcome, Trial
from infinity_tools.tune.progress_view import View
from infinity_tools.tune.search_space import candidate_of
from infinity_tools.tune.trial import Trials, Workload
from infinity_tools.tune.trial_worker import Worker
from infinity_tools.tune.tune_report import effects
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
    with trial_folders.trial_folders([str(tmp_path / "nvme")], Config().telemetry):
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


START = candidate_of(Config(), 2 << 30)
OUTCOME = Outcome(kind="measured", seconds=0.5, effective={"update.cores": 1}, wall=2.0)


def test_unwritable_settings_file_is_reported(tmp_path: Path) -> None:
    """The search does not start."""
    (tmp_path / "tuned/infinity.toml").mkdir(parents=True)
    for out, why in (("tuned", "infinity.toml cannot be written"), ("x" * 300, "cannot be created: File name too")):
        ended = run_here("tune", "--model", "tiny", "--nvme", "nvme", "--out", out)
        assert (ended.status, why in " ".join(ended.errors.split())) == (2, True), ended.errors


def test_trial_folders_of_other_users_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may contain links to folders of this user."""
    (tmp_path / f"{PREFIX}other").mkdir()
    (tmp_path / f"{PREFIX}other" / "lock").touch()
    assert len(trial_folders.left_over(tmp_path)) == 1
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert trial_folders.left_over(tmp_path) == []


def test_trial_folders_of_other_searches_are_kept(tmp_path: Path) -> None:
    """Locked folders, new folders without a lock and links are kept."""
    telemetry = Config().telemetry
    new = tmp_path / f"{PREFIX}new"
    old = tmp_path / f"{PREFIX}old"
    for folder in (new, old):
        (folder / "runs").mkdir(parents=True)
    os.utime(old, (1, 1))
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    with trial_folders.trial_folders([str(tmp_path)], telemetry) as (runs,):
        assert Path(runs).is_dir()
        assert new.is_dir()
        assert not old.exists()
        assert (tmp_path / "elsewhere" / "lock").exists()
    assert not Path(runs).parent.exists()


def test_uncreatable_trial_folder_is_reported(tmp_path: Path) -> None:
    """Folders that were created before the error are removed."""
    (tmp_path / "file").touch()
    places = [str(tmp_path / "a"), str(tmp_path / "file" / "b")]
    with (
        pytest.raises(ConfigError, match=r"storage\.paths.* --nvme"),
        trial_folders.trial_folders(places, Config().telemetry),
    ):
        pytest.fail("the folder was created")
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == ["file"]


def _die(pipe: Any, *arguments: Any) -> None:
    os._exit(3)


def _die_in_first_trial(pipe: Any, workload: Workload, settings: Config, folders: Any) -> None:
    pipe.send(("ready", {}))
    while True:
        candidate, _ = pipe.recv()
        if candidate == START:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(OUTCOME)


WORKLOAD = Workload(model="tiny", dtype="auto", activation_checkpointing=False, batch_tokens=64, micro_tokens=None,
                    loss_tokens=None, seq=32, max_grad_norm=None, threads=1)  # fmt: skip


def test_worker_exit_at_startup_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_worker, "serve", _die)
    with Worker(WORKLOAD, Config(), []) as started, pytest.raises(InfinityError, match="ended with status 3"):
        started.start()


def test_killed_trial_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are removed, and the next trial runs in a new process."""
    monkeypatch.setattr(trial_worker, "serve", _die_in_first_trial)
    with Worker(WORKLOAD, Config(), [str(tmp_path / "runs")]) as worker:
        worker.start()
        (tmp_path / "runs" / new_run_id()).mkdir(parents=True)
        failed = worker.measure(START, Bounds())
        assert (failed.kind, failed.reason) == ("failed", "the trial process was killed (out of memory?)")
        assert list((tmp_path / "runs").iterdir()) == []
        assert worker.measure({**START, "storage.queue_depth": 1}, Bounds()) == OUTCOME


def test_train_command_matches_workload() -> None:
    workload = Workload(model="tiny", dtype="fp32", activation_checkpointing=False, batch_tokens=128, micro_tokens=64,
                        loss_tokens=None, seq=32, max_grad_norm=1, threads=3)  # fmt: skip
    assert tune_command._next_lines(Path("tuned"), workload)[-1] == (
        "OMP_NUM_THREADS=3 infinity train --config tuned/infinity.toml --model tiny --max_length 32 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing false "
        "--max_grad_norm 1 --bf16 false"
    )
    said = tune_command._next_lines(Path("tuned"), replace(workload, loss_tokens=10))[-1]
    assert "--loss-tokens" in said
    assert "--config" not in said


def trial(number: int, changes: dict[str, Any], ratio: float) -> Trial:
    """Return a measured trial."""
    candidate = {**START, **changes}
    return Trial(number=number, role="change", candidate=candidate, changes=changes, outcome=OUTCOME, ratio=ratio,
                 relative=ratio, best_relative=1.0, at=float(number))  # fmt: skip


def test_effects_are_medians_of_single_changes() -> None:
    """Trials that change several settings are ignored."""
    depth, both = {"storage.queue_depth": 8}, {"storage.queue_depth": 8, "storage.engine": "threads"}
    again = replace(trial(4, depth, 1.2), role="again")
    rows = list(effects([trial(1, depth, 1.1), trial(2, depth, 1.3), trial(3, both, 9.0), again, trial(5, {}, 1.0)]))
    assert rows == [{"setting": "storage.queue_depth", "value": 8, "ratio": 1.2, "trials": 3}]


def test_progress_view_fits_terminal_width(subtests: pytest.Subtests) -> None:
    changes = {"update.schedule": "in_forward", "memory.page_bytes": 1 << 20, "storage.queue_depth": 128}
    parts = "20.0% less time", "queue_depth 128", "3:59 left, trial 2: engine threads"
    for width in (40, 60, 80, 120):
        console = Console(file=io.StringIO(), width=width, height=20, force_terminal=True, color_system=None)
        with View(console, START, minutes=5, silent=False) as view:
            view.begin(lambda: 61.0)
            view.tried(trial(1, {}, 1.0))
            view.improved(0.8, {**START, **changes})
            view.trying("change", {**START, "storage.engine": "threads"}, START)
            view._live.refresh()
        lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()))
        with subtests.test(width=width):
            assert max(len(line.rstrip()) for line in lines) <= width
            assert [part for part in parts if part not in " ".join(" ".join(lines).split())] == []


def test_progress_without_terminal_prints_lines() -> None:
    """One line is printed for the start and for each new best; with `--json`, none."""
    for silent, lines in ((False, 2), (True, 0)):
        console = Console(file=io.StringIO(), width=200)
        with View(console, START, minutes=5, silent=silent) as view:
            view.tried(trial(1, {}, 1.0))
            view.trying("change", START, START)
            view.improved(0.9, {**START, "storage.engine": "[red]threads"})
        said = console.file.getvalue()
        assert len(said.splitlines()) == lines
        assert silent or said.endswith("10.0% less time per step with engine [red]threads\n")


def test_written_settings_load_unchanged() -> None:
    """Only values that differ from the defaults are written."""
    odd = ('/nvme "0"/a\\b', "/nvme\t[1]/ü\x7f", "/nvme'2'/#")
    settings = Config().with_values(
        **{"storage.paths": odd, "storage.queue_depth": 64, "memory.host_bytes": 3 << 30,
           "memory.page_bytes": 65536 * 3, "storage.request_bytes": 12288, "run.seed": 7, "update.cores": 0}
    )  # fmt: skip
    text = settings_toml(settings, ["how it was found", 'with "quotes"'])
    assert load_config(tomllib.loads(text)) == settings
    assert text.startswith("# how it was found\n# with ")
    assert 'host_bytes = "3GiB"' in text
    assert "timeout_seconds" not in text
    assert load_config(tomllib.loads(settings_toml(Config()))) == Config()


def test_unreadable_settings_are_rejected(subtests: pytest.Subtests) -> None:
    for tree, words in [({"memory": {"host_byte": 1}}, "host_byte"), ({"storage": {"paths": ["/a\udcff"]}}, "TOML")]:
        with subtests.test(words), pytest.raises(ConfigError, match=words):
            tree_toml(tree)
