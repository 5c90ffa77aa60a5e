"""Tests of `infinity.io.probe`: measurements, invalid requests, and cleanup."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from infinity.errors import BudgetError, ConfigError
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, Measurement, ProbeStoppedError, points_of
from infinity.io.probe.quick import QUICK_BYTES, quick_rates
from infinity.io.probe.targets import remove_left_over
from support.engines import open_descriptors

MIB = 1 << 20


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_several_paths_are_measured_together(tmp_path: Path, engine: str) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    points = points_of(list(Load), [64 << 10, MIB], [1, 4])
    seen: list[dict[str, Measurement]] = []
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
    assert [list(latest) for latest in seen] == [[]] * 2 + [folders] * len(points)
    assert threading.active_count() <= threads
    assert open_descriptors() <= files


def test_invalid_probe_requests_are_rejected(tmp_path: Path) -> None:
    point = points_of([Load.READ], [MIB], [4])
    with pytest.raises(ConfigError, match="missing' is not a folder"):
        measure_paths([tmp_path / "missing"], point, file_bytes=16 * MIB, seconds=1)
    with pytest.raises(ConfigError, match="size = 4 MiB"):
        measure_paths([tmp_path], point, file_bytes=4 * MIB, seconds=1)
    with pytest.raises(BudgetError, match=rf"{tmp_path}: .* free"):
        measure_paths([tmp_path], point, file_bytes=1 << 60, seconds=1)
    with pytest.raises(ConfigError, match=f"twice: {tmp_path}, {tmp_path}"):
        measure_paths([tmp_path, tmp_path], point, file_bytes=16 * MIB, seconds=1)
    with pytest.raises(ConfigError, match="engine = 'aio'"):
        measure_paths([tmp_path], point, file_bytes=16 * MIB, seconds=1, engine="aio")
    with pytest.raises(ConfigError, match="multiple of 4096"):
        points_of([Load.READ], [1000], [4])
    with pytest.raises(ConfigError, match="depth = 0"):
        points_of([Load.READ], [MIB], [0])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("load", [Load.WRITE, Load.BOTH])
def test_written_bytes_are_limited(tmp_path: Path, load: Load, engine: str) -> None:
    """The limit in bytes holds regardless of the duration."""
    points = points_of([load], [MIB], [4])
    found = measure_paths([tmp_path], points, file_bytes=8 * MIB, seconds=600, engine=engine)
    (measured,) = found[str(tmp_path)]
    written = measured.write_bytes_per_second * measured.seconds
    assert written == pytest.approx(8 * MIB, abs=1)  # exact, regardless of the number of threads that submit


@pytest.mark.parametrize("when", [1, 2])
def test_probe_can_be_stopped(tmp_path: Path, when: int) -> None:
    """It returns no partial result."""
    stop, files = threading.Event(), open_descriptors()

    seen: list[dict[str, Measurement]] = []

    def progressed(latest: dict[str, Measurement]) -> None:
        seen.append(latest)
        if len(seen) == when:
            threading.Timer(0.05, stop.set).start()

    points = points_of([Load.WRITE, Load.READ], [MIB], [4])
    with pytest.raises(ProbeStoppedError):
        measure_paths([tmp_path], points, file_bytes=16 * MIB, seconds=600, stop=stop, on_progress=progressed)
    assert os.listdir(tmp_path) == []
    assert open_descriptors() <= files
    with pytest.raises(ProbeStoppedError):
        measure_paths([tmp_path], points, file_bytes=16 * MIB, seconds=600, stop=stop)


def test_files_of_interrupted_probes_are_removed(tmp_path: Path) -> None:
    """Only files that no running probe can still use are removed."""
    for name in (".infinity-probe-old", ".infinity-probe-new", "other"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / ".infinity-probe-old", (0, 0))
    assert remove_left_over(tmp_path) == [tmp_path / ".infinity-probe-old"]
    assert sorted(os.listdir(tmp_path)) == [".infinity-probe-new", "other"]


def test_unwritable_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, effective_ids: False)
    with pytest.raises(ConfigError, match=f"{tmp_path}' is not writable"):
        measure_paths([tmp_path], points_of([Load.READ], [MIB], [4]), file_bytes=16 * MIB, seconds=1)


def test_quick_rates_measure_every_load(tmp_path: Path) -> None:
    """All folders are measured, and all files are removed."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    found = quick_rates(folders)
    assert list(found) == folders
    for rates in found.values():
        assert rates.keys() == {"read", "write", "mixed"}
        assert min(rates.values()) > QUICK_BYTES / 3600  # a measured value in bytes per second
    assert [os.listdir(folder) for folder in folders] == [[], []]
