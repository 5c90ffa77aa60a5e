"""Runs that nobody holds: what is listed, and that nothing is removed that anybody could want."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infinity.errors import ConfigError
from infinity.io.block_devices import locate
from infinity.store.folder import FolderLock, RunFolder, no_starts
from infinity.store.marker import new_run_id
from infinity_daemon import stale
from infinity_daemon.collect_stale import StaleCollector
from infinity_daemon.collection import Collection
from infinity_daemon.daemon_config import StaleConfig, load_daemon_config
from infinity_daemon.stale import StaleRuns
from support.daemon_process import daemon, get, talk, until

MIB = 1 << 20
DAY = 86_400
BOTH = StaleConfig(remove_after_seconds=DAY, remove_checkpointed_after_seconds=10 * DAY)


class Clock:
    """The times that the daemon goes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        wall, monotonic = time.time, time.monotonic  # they go on too: others wait by them
        monkeypatch.setattr(stale.time, "time", lambda: wall() + self.passed)
        monkeypatch.setattr(stale.time, "monotonic", lambda: monotonic() + self.passed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that tests move."""
    return Clock(monkeypatch)


def make_run(*paths: Path, checkpointed: bool = False) -> RunFolder:
    """Make a run that has ended, with a data file of 1 MiB on each path."""
    for path in paths:
        path.mkdir(exist_ok=True)
    run = RunFolder.of(paths, new_run_id())
    run.create()
    for number in range(len(paths)):
        run.data_file(number, 0).write_bytes(bytes(MIB))
    if checkpointed:
        (run.checkpoints / "step000000000001.rank00000-of-00008.json").write_text("{}")
    return run


@contextmanager
def held(run: RunFolder) -> Iterator[None]:
    """Have a run open."""
    lock = FolderLock.acquire([root.parent for root in run.roots], run.run_id, 0)
    try:
        yield
    finally:
        lock.release()


def looking(settings: StaleConfig, *paths: Path) -> StaleRuns:
    """Return what looks into these folders."""
    runs = StaleRuns()
    runs.settings, runs.paths = settings, tuple(map(str, paths))
    return runs


def names(runs: StaleRuns) -> list[str]:
    """Return the ids of those that were found by another look."""
    runs.look()
    return [run.run_id for run in runs.found]


def test_runs_that_nobody_holds_are_listed_with_what_they_take(tmp_path: Path) -> None:
    """Live ones are not, nor what is no run."""
    plain, full, live = make_run(tmp_path), make_run(tmp_path, checkpointed=True), make_run(tmp_path)
    (tmp_path / "20260101-000000-abcdef").mkdir()
    (tmp_path / "project").mkdir()
    with held(live):
        runs = looking(StaleConfig(), Path(f"{tmp_path}/"))
        assert names(runs) == [plain.run_id, full.run_id]
    first, second = runs.found
    assert (first.checkpointed, second.checkpointed) == (False, True)
    assert MIB <= first.nbytes <= MIB + 64 * 1024
    assert first.changed == pytest.approx(time.time(), abs=600)
    drive = locate(str(tmp_path)).drive.name
    assert stale.by_drive(runs.drives, runs.found) == {drive: (2, first.nbytes + second.nbytes)}
    assert len(names(runs)) == 3


def test_by_default_nothing_is_ever_removed(tmp_path: Path, clock: Clock) -> None:
    """However old it is."""
    make_run(tmp_path), make_run(tmp_path, checkpointed=True)
    runs = looking(StaleConfig(), tmp_path)
    for _ in range(3):
        assert len(names(runs)) == 2
        clock.passed += 1000 * DAY


def test_what_has_no_checkpoint_goes_after_its_grace_and_checkpoints_after_theirs(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is counted from the last change of anything in the run."""
    caplog.set_level(logging.INFO)
    plain, full = make_run(tmp_path), make_run(tmp_path, checkpointed=True)
    runs = looking(BOTH, tmp_path)
    for days, left in ((0.9, [plain, full]), (1.1, [full]), (9.9, [full]), (10.1, [])):
        clock.passed = days * DAY
        assert names(runs) == [run.run_id for run in left]
        assert sorted(os.listdir(tmp_path)) == [run.run_id for run in left]
    assert f"stale.removed run={plain.run_id}" in caplog.text
    assert caplog.text.count("stale.removed") == 2


@pytest.mark.parametrize("setting", ["remove_after_seconds", "remove_checkpointed_after_seconds"])
def test_one_setting_says_nothing_of_the_other(tmp_path: Path, clock: Clock, setting: str) -> None:
    """A run with a checkpoint is removed only by the setting that says so."""
    plain, full = make_run(tmp_path), make_run(tmp_path, checkpointed=True)
    runs = looking(StaleConfig(**{setting: DAY}), tmp_path)
    runs.look()
    clock.passed = 100 * DAY
    assert names(runs) == [full.run_id if setting == "remove_after_seconds" else plain.run_id]


def test_what_is_changed_or_held_again_begins_anew(tmp_path: Path, clock: Clock) -> None:
    """Whoever resumes a run has all of the grace again."""
    run = make_run(tmp_path)
    runs = looking(BOTH, tmp_path)
    runs.look()
    clock.passed = 2 * DAY
    with held(run):
        assert names(runs) == []
    assert run.roots[0].exists()
    assert names(runs) == [run.run_id]  # it has just been seen to be free
    clock.passed += 700
    now = time.time()
    os.utime(run.data_file(0, 0), (now, now - 10))
    assert names(runs) == [run.run_id]
    clock.passed += DAY
    assert names(runs) == []


def test_a_clock_that_jumps_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of files are of a clock; that nobody holds a run is seen."""
    make_run(tmp_path)
    runs = looking(BOTH, tmp_path)
    monkeypatch.setattr(stale.time, "time", lambda: 2e9)
    for _ in range(3):
        assert len(names(runs)) == 1


def test_a_run_on_several_paths_goes_as_a_whole_or_not_at_all(tmp_path: Path, clock: Clock) -> None:
    """Where its checkpoints are cannot be seen, it may have some."""
    paths = [tmp_path / name for name in "abc"]
    run = make_run(*paths)
    some, others, both = looking(BOTH, paths[1]), looking(BOTH, *paths[:2]), looking(BOTH, *paths[::-1])
    for runs in (some, others, both):
        runs.look()
    assert [run.checkpointed for run in some.found] == [True]
    assert [run.checkpointed for run in others.found] == [False]
    clock.passed = 100 * DAY
    assert names(some) == names(others) == [run.run_id]
    assert all(root.exists() for root in run.roots)
    with held(run):
        assert names(both) == []
    both.look()
    clock.passed += DAY
    assert names(both) == []
    assert [os.listdir(path) for path in paths] == [[], [], []]


def test_nothing_is_removed_while_runs_start_or_are_removed(tmp_path: Path, clock: Clock) -> None:
    """The next look comes."""
    make_run(tmp_path)
    runs = looking(BOTH, tmp_path)
    runs.look()
    clock.passed = 2 * DAY
    with no_starts([tmp_path]):
        assert len(names(runs)) == 1
    assert names(runs) == []


def test_a_run_that_begins_just_before_its_removal_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at again when nothing can start any more."""
    run = make_run(tmp_path)
    runs = looking(BOTH, tmp_path)
    runs.look()
    clock.passed = 2 * DAY
    original = stale.no_starts
    locks = []

    def late(paths: list[Path]):  # type: ignore[no-untyped-def]
        if not locks:
            locks.append(FolderLock.acquire(paths, run.run_id, 0))
        return original(paths)

    monkeypatch.setattr(stale, "no_starts", late)
    assert names(runs) == [run.run_id]
    assert run.data_file(0, 0).exists()
    locks[0].release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_runs_of_others_are_never_removed(tmp_path: Path, clock: Clock) -> None:
    """Root could."""
    run = make_run(tmp_path)
    os.chown(run.roots[0], 65534, -1)
    runs = looking(BOTH, tmp_path)
    runs.look()
    clock.passed = 100 * DAY
    assert names(runs) == [run.run_id]


def test_a_folder_that_is_gone_hides_no_other(tmp_path: Path) -> None:
    """It is a failure of the collector of drives."""
    run = make_run(tmp_path / "here")
    assert names(looking(BOTH, tmp_path / "gone", tmp_path / "here")) == [run.run_id]


def test_they_are_served(tmp_path: Path) -> None:
    """A drive without any has 0."""
    runs = looking(StaleConfig(), tmp_path)
    registry = CollectorRegistry()
    registry.register(Collection([StaleCollector(runs)]))
    runs.look()
    drive = locate(str(tmp_path)).drive.name
    assert f'infinity_device_stale_bytes{{device="{drive}"}} 0.0' in generate_latest(registry).decode()
    make_run(tmp_path)
    runs.look()
    text = generate_latest(registry).decode()
    assert f'infinity_device_stale_runs{{device="{drive}"}} 1.0' in text
    found = next(line for line in text.splitlines() if line.startswith("infinity_device_stale_bytes{"))
    assert float(found.split()[1]) == runs.found[0].nbytes


def test_the_daemon_tells_them(tmp_path: Path) -> None:
    """In its metrics and over its socket."""
    runtime, nvme = tmp_path / "run", tmp_path / "nvme"
    runtime.mkdir(mode=0o700)
    run = make_run(nvme, checkpointed=True)
    with daemon(runtime, "--device-path", str(nvme)) as process:
        until(lambda: talk(runtime, {"op": "status"})[0]["stale_runs"])
        (told,) = talk(runtime, {"op": "status"})[0]["stale_runs"]
        assert "infinity_device_stale_runs{" in get(process.port, "/metrics")
    assert (told["run_id"], told["folders"]) == (run.run_id, [str(run.roots[0])])
    assert (told["checkpointed"], told["complete"]) == (True, True)
    assert told["bytes"] >= MIB


def test_checkpoints_that_would_go_soon_are_a_mistake(tmp_path: Path) -> None:
    """Nobody means a minute."""
    with pytest.raises(ConfigError, match=r"remove_checkpointed_after_seconds = 60 .*86400"):
        load_daemon_config(None, {"stale.remove_checkpointed_after_seconds": 60})
    assert load_daemon_config(None, {"stale.remove_checkpointed_after_seconds": DAY}).stale.remove_after_seconds == 0
