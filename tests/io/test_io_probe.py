"""`infinity.io.probe`: what is measured, what is refused, and that nothing is left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from infinity.errors import BudgetError, ConfigError
from infinity.io.probe.bench import measure_paths, open_bench
from infinity.io.probe.points import Load, ProbeStoppedError, Progress, points_of
from infinity.io.probe.quick import QUICK_BYTES, quick_mixed, quick_rates
from infinity.io.probe.targets import remove_left_over
from support.engines import open_descriptors

MIB = 1 << 20


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_several_paths_at_once(tmp_path: Path, engine: str) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    points = points_of(list(Load), [64 << 10, MIB], [1, 4])
    seen: list[Progress] = []
    threads, files = threading.active_count(), open_descriptors()
    found = measure_paths(folders, points, file_bytes=16 * MIB, seconds=0.2, engine=engine, on_progress=seen.append)
    assert list(found) == folders
    for folder in folders:
        assert [bandwidth.point for bandwidth in found[folder]] == list(points)
        assert os.listdir(folder) == []
    for bandwidth in found[folders[0]]:
        load = bandwidth.point.load
        assert (bandwidth.read_bytes_per_second > 0) == (load is not Load.WRITE)
        assert (bandwidth.write_bytes_per_second > 0) == (load is not Load.READ)
        assert bandwidth.seconds >= 0.2
    assert [progress.done for progress in seen] == list(range(1, 2 + len(points) + 1))
    assert seen[-1].total == seen[-1].done
    assert threading.active_count() <= threads
    assert open_descriptors() <= files


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    point = points_of([Load.READ], [MIB], [4])
    with pytest.raises(ConfigError, match="not a folder"):
        measure_paths([tmp_path / "missing"], point, file_bytes=16 * MIB)
    with pytest.raises(ConfigError, match="too small"):
        measure_paths([tmp_path], point, file_bytes=4 * MIB)
    with pytest.raises(BudgetError, match="free"):
        measure_paths([tmp_path], point, file_bytes=1 << 60)
    with pytest.raises(ConfigError, match="twice"):
        measure_paths([tmp_path, tmp_path], point, file_bytes=16 * MIB)
    with pytest.raises(ConfigError, match="engine"):
        measure_paths([tmp_path], point, file_bytes=16 * MIB, engine="aio")
    with pytest.raises(ConfigError, match="multiple of 4096"):
        points_of([Load.READ], [1000], [4])
    with pytest.raises(ConfigError, match="depth = 0"):
        points_of([Load.READ], [MIB], [0])
    assert os.listdir(tmp_path) == []


def test_the_same_files_through_one_other_engine(tmp_path: Path) -> None:
    """As a run has one for all its paths: what its threads are at most, they are for all."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    points = points_of([Load.BOTH], [64 << 10], [4])
    with open_bench(folders, points, file_bytes=MIB) as bench, bench.through("threads", points[0]) as other:
        assert {target.engine.name for target in other.targets.values()} == {"threads"}
        assert len({id(target.engine) for target in other.targets.values()}) == 1
        assert list(other.measure(points[0], seconds=0.1)) == folders
    assert [os.listdir(folder) for folder in folders] == [[], []]


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("load", [Load.WRITE, Load.BOTH])
def test_what_is_written_is_bounded(tmp_path: Path, load: Load, engine: str) -> None:
    """In bytes, however long it may take."""
    points = points_of([load], [MIB], [4])
    found = measure_paths([tmp_path], points, file_bytes=16 * MIB, seconds=600, most_written=8 * MIB, engine=engine)
    (measured,) = found[str(tmp_path)]
    written = measured.write_bytes_per_second * measured.seconds
    assert written == pytest.approx(8 * MIB, abs=1)  # no request more, however many threads submit
    with pytest.raises(ConfigError, match=rf"most_written = {MIB} "):
        measure_paths([tmp_path], points, file_bytes=16 * MIB, most_written=MIB)


@pytest.mark.parametrize("when", [1, 2])
def test_it_ends_when_it_is_told_to(tmp_path: Path, when: int) -> None:
    """What it has found by then is nothing."""
    stop, files = threading.Event(), open_descriptors()

    def progressed(progress: Progress) -> None:
        if progress.done == when:
            threading.Timer(0.05, stop.set).start()

    points = points_of([Load.READ, Load.WRITE], [MIB], [4])
    with pytest.raises(ProbeStoppedError):
        measure_paths(
            [tmp_path],
            points,
            file_bytes=16 * MIB,
            seconds=0.3 if when == 2 else 600,
            stop=stop,
            on_progress=progressed,
        )
    assert os.listdir(tmp_path) == []
    assert open_descriptors() <= files
    with pytest.raises(ProbeStoppedError):
        measure_paths([tmp_path], points, file_bytes=16 * MIB, stop=stop)


def test_what_was_left_behind_can_be_removed(tmp_path: Path) -> None:
    """By its name, and only when nobody can be about to remove it."""
    for name in (".infinity-probe-old", ".infinity-probe-new", "other"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / ".infinity-probe-old", (0, 0))
    assert remove_left_over(tmp_path) == [tmp_path / ".infinity-probe-old"]
    assert sorted(os.listdir(tmp_path)) == [".infinity-probe-new", "other"]


def test_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, effective_ids: False)
    with pytest.raises(ConfigError, match="not writable"):
        measure_paths([tmp_path], points_of([Load.READ], [MIB], [4]), file_bytes=16 * MIB)


def test_quick_rates_are_of_every_load(tmp_path: Path) -> None:
    """Of all folders, and nothing is left; one load alone has its own function."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    found = quick_rates(folders)
    assert list(found) == folders
    for rates in found.values():
        assert min(rates.read, rates.write, rates.mixed) > QUICK_BYTES / 3600  # one that was measured, in bytes
    assert set(quick_mixed(folders[:1])) == set(folders[:1])
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_quick_rates_can_be_stopped(tmp_path: Path) -> None:
    """By whoever has no time for them."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(ProbeStoppedError):
        quick_rates([tmp_path], stop=stop)
    with pytest.raises(ConfigError, match="not a folder"):
        quick_rates([tmp_path / "missing"])
