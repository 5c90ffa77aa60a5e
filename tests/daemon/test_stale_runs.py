"""Tests of stale runs: listing runs that no process holds, and removing only those that the settings allow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.io.block_devices import locate
from infinity.store.folder import FolderLock, RunFolder, no_starts
from infinity.store.marker import new_run_id
from infinity_daemon import stale
from infinity_daemon.daemon_config import StaleConfig
from infinity_daemon.stale import StaleRuns
from support.daemon_process import daemon, get, state, until

MIB = 1 << 20
DAY = 86_400
BOTH = StaleConfig(remove_after_seconds=DAY, remove_checkpointed_after_seconds=10 * DAY)


class Clock:
    """Clock of the daemon, which tests can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = 0.0
        wall, monotonic = time.time, time.monotonic  # the clocks keep running, because other threads wait on them
        monkeypatch.setattr(stale.time, "time", lambda: wall() + self.offset)
        monkeypatch.setattr(stale.time, "monotonic", lambda: monotonic() + self.offset)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_run(*paths: Path, checkpointed: bool = False, closed: bool = False) -> RunFolder:
    """Create an interrupted or a closed run with a data file of 1 MiB on each path."""
    for path in paths:
        path.mkdir(exist_ok=True, parents=True)
    run = RunFolder.of(paths, new_run_id())
    run.create()
    for number in range(len(paths)):
        run.data_file(number, 0).write_bytes(bytes(MIB))
    if not closed:
        run.reserved_file(0).write_bytes(b"")
    if checkpointed:
        (run.checkpoints / "step000000000001.rank00000-of-00008.json").write_text("{}")
    return run


@contextmanager
def hold(run: RunFolder) -> Iterator[None]:
    """Hold the lock of a run."""
    lock = FolderLock.acquire([root.parent for root in run.roots], run.run_id, 0)
    try:
        yield
    finally:
        lock.release()


def make_stale_runs(settings: StaleConfig, *paths: Path) -> StaleRuns:
    """Return `StaleRuns` for these folders."""
    runs = StaleRuns()
    runs.settings, runs.paths = settings, tuple(map(str, paths))
    return runs


def look(runs: StaleRuns) -> list[str]:
    """Look for stale runs and return their ids."""
    runs.look()
    return [run.run_id for run in runs.found]


def test_stale_runs_are_listed_with_their_size(tmp_path: Path) -> None:
    """Live runs and folders that are not runs are not listed."""
    plain, full, live = make_run(tmp_path), make_run(tmp_path, checkpointed=True), make_run(tmp_path)
    (tmp_path / "20260101-000000-abcdef").mkdir()
    (tmp_path / "project").mkdir()
    with hold(live):
        runs = make_stale_runs(StaleConfig(), Path(f"{tmp_path}/"))
        assert look(runs) == [plain.run_id, full.run_id]
    first, second = runs.found
    assert (first.checkpointed, second.checkpointed) == (False, True)
    assert MIB <= first.nbytes <= MIB + 64 * 1024
    assert first.changed == pytest.approx(time.time(), abs=600)
    drive = locate(str(tmp_path)).drive.name
    assert stale.by_drive(runs.drives, runs.found) == {drive: (2, first.nbytes + second.nbytes)}
    assert len(look(runs)) == 3


def test_a_finished_run_is_neither_stale_nor_removed(tmp_path: Path, clock: Clock) -> None:
    """A closed run without a checkpoint cannot be resumed, so it is stale."""
    finished = make_run(tmp_path, checkpointed=True, closed=True)
    useless = make_run(tmp_path, closed=True)
    runs = make_stale_runs(BOTH, tmp_path)
    assert look(runs) == [useless.run_id]
    clock.offset = 100 * DAY
    assert look(runs) == []
    assert os.listdir(tmp_path) == [finished.run_id]


def test_subfolders_are_searched(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not followed, and the number of levels and of entries is limited."""
    path, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    first = make_run(path / "alice" / "project" / "runs")
    both = make_run(path / "bob" / "a", path / "bob" / "b", checkpointed=True)
    make_run(path / "1" / "2" / "3" / "4")
    make_run(first.roots[0] / "inside")
    make_run(elsewhere)
    (path / "link").symlink_to(elsewhere)
    runs = make_stale_runs(BOTH, path)
    assert look(runs) == [first.run_id, both.run_id]
    assert runs.found[1].complete
    clock.offset = 100 * DAY
    assert look(runs) == []
    assert not any(root.exists() for root in (*first.roots, *both.roots))
    assert len(os.listdir(elsewhere)) == 1
    near, far = make_run(path), make_run(path / "alice")
    for number in range(10):
        (path / f"file{number}").write_text("")
    monkeypatch.setattr(stale, "_MOST_ENTRIES", 20)
    assert look(runs) == [near.run_id, far.run_id]
    monkeypatch.setattr(stale, "_MOST_ENTRIES", 15)
    assert look(runs) == [near.run_id]


def test_runs_with_and_without_checkpoints_have_separate_grace_periods(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each period starts at the last change of any file in the run."""
    caplog.set_level(logging.INFO)
    plain, full = make_run(tmp_path), make_run(tmp_path, checkpointed=True)
    runs = make_stale_runs(BOTH, tmp_path)
    for days, left in ((0.9, [plain, full]), (1.1, [full]), (9.9, [full]), (10.1, [])):
        clock.offset = days * DAY
        assert look(runs) == [run.run_id for run in left]
        assert sorted(os.listdir(tmp_path)) == [run.run_id for run in left]
    assert f"stale.removed run={plain.run_id}" in caplog.text
    assert caplog.text.count("stale.removed") == 2


def test_each_setting_removes_only_its_kind_of_run(tmp_path: Path, clock: Clock) -> None:
    """By default, no run is removed."""
    plain, full = make_run(tmp_path), make_run(tmp_path, checkpointed=True)
    runs = make_stale_runs(StaleConfig(), tmp_path)
    for settings, left in (
        (StaleConfig(), [plain, full]),
        (StaleConfig(remove_after_seconds=DAY), [full]),
        (StaleConfig(remove_after_seconds=DAY), [full]),
        (StaleConfig(remove_checkpointed_after_seconds=DAY), []),
    ):
        assert look(runs)
        clock.offset += 100 * DAY
        runs.settings = settings
        assert look(runs) == [run.run_id for run in left]


def test_changing_or_holding_a_run_restarts_its_grace_period(tmp_path: Path, clock: Clock) -> None:
    run = make_run(tmp_path)
    runs = make_stale_runs(BOTH, tmp_path)
    runs.look()
    clock.offset = 2 * DAY
    with hold(run):
        assert look(runs) == []
    assert run.roots[0].exists()
    assert look(runs) == [run.run_id]  # its grace period has just started
    clock.offset += 700
    now = time.time()
    os.utime(run.data_file(0, 0), (now, now - 10))
    assert look(runs) == [run.run_id]
    clock.offset += DAY
    assert look(runs) == []


def test_a_clock_jump_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon must also have observed for the full grace period that no process holds the run."""
    make_run(tmp_path)
    runs = make_stale_runs(BOTH, tmp_path)
    monkeypatch.setattr(stale.time, "time", lambda: 2e9)
    for _ in range(3):
        assert len(look(runs)) == 1


def test_a_run_on_several_paths_is_removed_only_completely(tmp_path: Path, clock: Clock) -> None:
    """If its checkpoint folder cannot be seen, the run may have checkpoints."""
    paths = [tmp_path / name for name in "abc"]
    run = make_run(*paths)
    some, others, both = (
        make_stale_runs(BOTH, paths[1]),
        make_stale_runs(BOTH, *paths[:2]),
        make_stale_runs(BOTH, *paths[::-1]),
    )
    for runs in (some, others, both):
        runs.look()
    assert [run.checkpointed for run in some.found] == [True]
    assert [run.checkpointed for run in others.found] == [False]
    clock.offset = 100 * DAY
    assert look(some) == look(others) == [run.run_id]
    assert all(root.exists() for root in run.roots)
    with hold(run):
        assert look(both) == []
    both.look()
    clock.offset += DAY
    assert look(both) == []
    assert [os.listdir(path) for path in paths] == [[], [], []]


def test_nothing_is_removed_while_starts_are_locked(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look removes the run."""
    monkeypatch.setattr("infinity.store.folder._REMOVE_SECONDS", 0.1)
    make_run(tmp_path)
    runs = make_stale_runs(BOTH, tmp_path)
    runs.look()
    clock.offset = 2 * DAY
    with no_starts([tmp_path]):
        assert len(look(runs)) == 1
    assert look(runs) == []


def test_a_run_that_starts_before_its_removal_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is checked again after starts are locked."""
    run = make_run(tmp_path)
    runs = make_stale_runs(BOTH, tmp_path)
    runs.look()
    clock.offset = 2 * DAY
    original = stale.no_starts
    locks = []

    def late(paths: list[Path]):  # type: ignore[no-untyped-def]
        if not locks:
            locks.append(FolderLock.acquire(paths, run.run_id, 0))
        return original(paths)

    monkeypatch.setattr(stale, "no_starts", late)
    assert look(runs) == [run.run_id]
    assert run.data_file(0, 0).exists()
    locks[0].release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_runs_of_other_users_are_never_removed(tmp_path: Path, clock: Clock) -> None:
    """Not even by root."""
    run = make_run(tmp_path)
    os.chown(run.roots[0], 65534, -1)
    runs = make_stale_runs(BOTH, tmp_path)
    runs.look()
    clock.offset = 100 * DAY
    assert look(runs) == [run.run_id]


def test_a_missing_folder_does_not_hide_others(tmp_path: Path) -> None:
    """The devices collector reports the missing folder."""
    run = make_run(tmp_path / "here")
    assert look(make_stale_runs(BOTH, tmp_path / "gone", tmp_path / "here")) == [run.run_id]


def test_the_daemon_reports_stale_runs(tmp_path: Path) -> None:
    """They appear in the metrics and in the state of the node."""
    runtime, nvme = tmp_path / "run", tmp_path / "nvme"
    runtime.mkdir(mode=0o700)
    run = make_run(nvme, checkpointed=True)
    with daemon(runtime, "--device-path", str(nvme)) as process:
        until(lambda: state(runtime)["stale_runs"])
        (reported,) = state(runtime)["stale_runs"]
        text, drive = get(process.port, "/metrics"), locate(str(nvme)).drive.name
        assert f'infinity_device_stale_runs{{device="{drive}"}} 1.0' in text
        assert f'infinity_device_stale_bytes{{device="{drive}"}} {reported["bytes"] / 1e6}e+06' in text
    assert (reported["id"], reported["folders"]) == (run.run_id, [str(run.roots[0])])
    assert (reported["checkpointed"], reported["complete"]) == (True, True)
    assert reported["bytes"] >= MIB
