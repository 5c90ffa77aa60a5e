"""Parts of `infinity tune` without a model: its journal, its files, its folders, what a terminal shows."""

from __future__ import annotations

import io
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity import Config
from infinity.errors import ConfigError, InfinityError
from infinity_tools.tune import trial_folders, trial_worker
from infinity_tools.tune.journal import Journal
from infinity_tools.tune.outcome import Bounds, Outcome, Trial
from infinity_tools.tune.progress_view import View
from infinity_tools.tune.search_space import candidate_of, describe
from infinity_tools.tune.trial import Workload
from infinity_tools.tune.trial_worker import Worker
from infinity_tools.tune.tune_report import effects, write_settings

START = candidate_of(Config(), 2 << 30)
ABOUT = {"model": "tiny", **START, "nvme": ["/nvme0/run"]}
OUTCOME = Outcome(kind="measured", seconds=0.5, samples=(0.4, 0.5, 0.6), effective={"update.cores": 1}, wall=2.0)


def test_a_folder_that_takes_no_file_is_said(tmp_path: Path) -> None:
    """With the fix."""
    (tmp_path / "infinity.toml").mkdir()
    with pytest.raises(ConfigError, match=r"infinity\.toml.* --out"):
        write_settings(tmp_path / "infinity.toml", Config(), [])


def journal(folder: Path, *, resume: bool, about: dict[str, Any] = ABOUT) -> Journal:
    """One in this folder."""
    return Journal(folder / "trials.jsonl", about, time.monotonic(), resume=resume)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A journal with two trials."""
    made = journal(tmp_path, resume=False)
    made.add("start", START, OUTCOME)
    made.add("change", {**START, "storage.queue_depth": 64}, Outcome(kind="failed", reason="[no] room"))
    return tmp_path / "trials.jsonl"


def test_a_journal_answers_what_it_knows(file: Path) -> None:
    """In its order, with its clock; then trials are made and follow."""
    before = file.read_text()
    again = journal(file.parent, resume=True)
    assert again.clock() == 0.0
    assert again.answer("start", START) == OUTCOME
    assert again.answer("change", {**START, "storage.queue_depth": 64}) == Outcome(kind="failed", reason="[no] room")
    assert again.answer("change", {**START, "storage.queue_depth": 16}) is None
    assert file.read_text() == before
    again.add("change", {**START, "storage.queue_depth": 16}, OUTCOME)
    assert file.read_text().startswith(before)
    assert len(file.read_text().splitlines()) == 4


def test_a_journal_drops_what_is_not_asked_again(file: Path) -> None:
    """Such as a comparison at the end, after which a longer search goes on otherwise."""
    again = journal(file.parent, resume=True)
    assert again.answer("start", START) == OUTCOME
    assert again.answer("change", {**START, "storage.queue_depth": 8}) is None
    again.add("change", {**START, "storage.queue_depth": 8}, OUTCOME)
    depths = [json.loads(line)["candidate"]["storage.queue_depth"] for line in file.read_text().splitlines()[1:]]
    assert depths == [32, 8]


@pytest.mark.parametrize("tail", ['{"role": "cha', "null", '{"role": "change"}', "[]", "\x00"])
def test_a_line_that_was_cut_off_is_no_trial(tail: str, file: Path) -> None:
    """It is replaced by the next one."""
    file.write_text(file.read_text() + tail)
    again = journal(file.parent, resume=True)
    assert again.found == 2
    again.answer("start", START)
    again.answer("change", {**START, "storage.queue_depth": 64})
    again.add("again", START, OUTCOME)
    assert [json.loads(line).get("role") for line in file.read_text().splitlines()[1:]] == ["start", "change", "again"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama-1b"}, "model llama-1b (was tiny)"),
        ({"nvme": ["/nvme1/run"]}, "nvme ['/nvme1/run'] (was ['/nvme0/run'])"),
        ({"storage.queue_depth": 1}, "storage.queue_depth 1 (was 32)"),
    ],
)
def test_a_journal_of_another_search_is_refused(changes: dict[str, Any], says: str, file: Path) -> None:
    """With what differs; it stays as it is."""
    before = file.read_text()
    with pytest.raises(ConfigError) as caught:
        journal(file.parent, resume=True, about={**ABOUT, **changes})
    assert says in str(caught.value)
    assert file.read_text() == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 9}', "5\n", "\n\n", "{}"])
def test_what_is_no_journal_is_refused(content: str, tmp_path: Path) -> None:
    """In one line that names it."""
    (tmp_path / "trials.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"trials\.jsonl .*`infinity tune`"):
        journal(tmp_path, resume=True)


def test_a_journal_is_not_written_over(file: Path) -> None:
    """Nor gone on from where there is none."""
    with pytest.raises(ConfigError, match="pass --resume"):
        journal(file.parent, resume=False)
    with pytest.raises(ConfigError, match="remove --resume"):
        journal(file.parent / "elsewhere", resume=True)


def test_folders_of_others_stay(tmp_path: Path) -> None:
    """What is held, what is new and has no lock yet, what only has the name."""
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


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """And those that were made before are gone."""
    (tmp_path / "file").touch()
    places = [str(tmp_path / "a"), str(tmp_path / "file" / "b")]
    with (
        pytest.raises(ConfigError, match=r"storage\.paths.* --nvme"),
        trial_folders.trial_folders(places, Config().telemetry),
    ):
        pytest.fail("it was made")
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == ["file"]


def _die(pipe: Any, *arguments: Any) -> None:
    os._exit(3)


def test_a_worker_that_dies_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says how it has ended."""
    monkeypatch.setattr(trial_worker, "serve", _die)
    workload = Workload(model="tiny", dtype="auto", activation_checkpointing=False, batch_tokens=64, micro_tokens=None,
                        loss_tokens=None, seq=32, max_grad_norm=None, threads=1, seed=0)  # fmt: skip
    with Worker(workload, Config(), []) as started:
        with pytest.raises(InfinityError, match="ended with status 3"):
            started.start()
        with pytest.raises(InfinityError, match="ended with status 3"):
            started.measure(START, Bounds())


def trial(number: int, changes: dict[str, Any], ratio: float) -> Trial:
    """One that was measured."""
    candidate = {**START, **changes}
    return Trial(number=number, role="change", candidate=candidate, changes=changes, outcome=OUTCOME, ratio=ratio,
                 relative=ratio, best_relative=1.0, at=float(number))  # fmt: skip


def test_effects_are_medians_by_value() -> None:
    """Of single changes; what was changed together says nothing about one."""
    depth, both = {"storage.queue_depth": 8}, {"storage.queue_depth": 8, "storage.engine": "threads"}
    again = replace(trial(4, depth, 1.2), role="again")
    rows = list(effects([trial(1, depth, 1.1), trial(2, depth, 1.3), trial(3, both, 9.0), again, trial(5, {}, 1.0)]))
    assert rows == [{"setting": "storage.queue_depth", "value": 8, "ratio": 1.2, "trials": 3}]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_view_fits(width: int) -> None:
    """Best, current trial, trials and time left, on every terminal."""
    changes = {"update.schedule": "in_forward", "memory.page_bytes": 1 << 20, "storage.queue_depth": 128}
    console = Console(file=io.StringIO(), width=width, height=20, force_terminal=True, color_system=None)
    with View(console, START, minutes=5, silent=False) as view:
        view.begin(lambda: 61.0)
        view.tried(trial(1, {}, 1.0))
        view.improved(0.8, {**START, **changes})
        view.trying("change", {**START, "storage.engine": "threads"}, START)
        view._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert all(len(line.rstrip()) <= width for line in lines), lines
    shown = " ".join(" ".join(lines).split())
    for part in ("best so far", "20.0% less time", "engine threads", "trials 1", "time left 3:59", "queue_depth 128"):
        assert part in shown, shown


def test_without_a_terminal_there_are_lines_and_with_json_there_is_nothing() -> None:
    """A line for the start and for every new best."""
    for silent, lines in ((False, 2), (True, 0)):
        console = Console(file=io.StringIO(), width=200)
        with View(console, START, minutes=5, silent=silent) as view:
            view.tried(trial(1, {}, 1.0))
            view.trying("change", START, START)
            view.improved(0.9, {**START, "storage.engine": "[red]threads"})
        said = console.file.getvalue()
        assert len(said.splitlines()) == lines
        assert silent or said.endswith("10.0% less time per step with engine [red]threads\n")


def test_settings_are_described_in_words() -> None:
    """Sizes as sizes; automatic values by name."""
    changes = {"memory.page_bytes": 0, "update.cores": -1, "storage.request_bytes": 1 << 20, "state.format": "split"}
    assert describe(changes) == "page_bytes automatic, cores auto, request_bytes 1 MiB, format split"
    assert describe({}, "the start") == "the start"
