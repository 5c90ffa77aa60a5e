"""Tests of the parts of `infinity tune` without a model: settings files, folders, trial process and progress view."""

from __future__ import annotations

import io
import os
import re
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity import Config, load_config
from infinity.errors import ConfigError, InfinityError
from infinity.store.marker import new_run_id
from infinity_tools import trial_folders
from infinity_tools.toml import settings_toml, tree_toml
from infinity_tools.tune import trial_worker, tune_command
from infinity_tools.tune.outcome import Bounds, Outcome, Trial
from infinity_tools.tune.progress_view import View
from infinity_tools.tune.search_space import candidate_of
from infinity_tools.tune.trial import Workload
from infinity_tools.tune.trial_worker import Worker
from infinity_tools.tune.tune_report import effects
from support.command import run_here

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
    (tmp_path / f"{trial_folders.PREFIX}other").mkdir()
    (tmp_path / f"{trial_folders.PREFIX}other" / "lock").touch()
    assert len(trial_folders.left_over(tmp_path)) == 1
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert trial_folders.left_over(tmp_path) == []


def test_trial_folders_of_other_searches_are_kept(tmp_path: Path) -> None:
    """Locked folders, new folders without a lock and links are kept."""
    telemetry = Config().telemetry
    new = tmp_path / f"{trial_folders.PREFIX}new"
    old = tmp_path / f"{trial_folders.PREFIX}old"
    for folder in (new, old):
        (folder / "runs").mkdir(parents=True)
    os.utime(old, (1, 1))
    (tmp_path / f"{trial_folders.PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    with trial_folders.trial_folders([str(tmp_path)], telemetry) as (runs,):
        trial_folders.remove_left_over(tmp_path, telemetry)
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
