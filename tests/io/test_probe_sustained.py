"""Tests of sustained writes: detection of bandwidth drops, and the end of the measurement."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

import pytest

from infinity.config import StorageConfig
from infinity.errors import BudgetError, ConfigError
from infinity.io import Engine, ThreadEngine
from infinity.io import engine as io_engine
from infinity.io.engine import DataFile, Op, Ticket
from infinity.io.probe import stream, sustained, targets
from infinity.io.probe.points import ProbeStoppedError
from infinity.io.probe.sustained import MOST_BYTES, Fall, bytes_to_sustain, fall_of, sustain
from support.engines import open_descriptors
from support.wrapped_engine import WrappedEngine

MIB = 1 << 20


def test_bandwidth_drop_is_detected_by_the_medians() -> None:
    """The medians of the first and the last seconds are compared, and the position of the drop is found."""
    for slices, fall in [
        ([], None),
        ([100, 1, 1], None),  # too few slices
        ([100] * 60, None),
        ([100, 90, 10] * 20, None),  # uneven, but not slower at the end
        ([100] * 30 + [10] * 2 + [100] * 30, None),  # a pause, not a drop
        ([100] * 30 + [71] * 30, None),
        ([100] * 30 + [69] * 30, Fall(before=100, after=69, written=3000, second=30)),
        ([100] * 20 + [10] * 2 + [100] * 20 + [20] * 20, Fall(before=100, after=20, written=4020, second=42)),
        ([100, 100, 20, 20, 20], Fall(before=100, after=20, written=200, second=2)),
        ([100] * 56 + [30] * 4, Fall(before=100, after=30, written=5600, second=56)),
        ([0] * 20, None),
    ]:
        assert fall_of(slices) == fall, slices


def test_without_a_drop_all_bytes_are_written_once(tmp_path: Path) -> None:
    """Each folder receives all bytes, and all files are removed."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        os.mkdir(folder)
    files = open_descriptors()
    found = sustain(folders, 64 << 10, 4, most_bytes=8 * MIB + 100, most_seconds=600)
    assert list(found) == folders
    for one in found.values():
        assert one.written == 8 * MIB
        assert sum(one.slices) <= one.written
        assert one.measurement.latency.longest > 0
    assert [os.listdir(folder) for folder in folders] == [[], []]
    assert open_descriptors() <= files


def test_sustain_ends_after_its_time_limit(tmp_path: Path) -> None:
    (one,) = sustain([tmp_path], 4096, 1, most_bytes=256 * MIB, most_seconds=0.05).values()
    assert 0 < one.written < 256 * MIB
    assert not one.long_enough
    assert one.fall is None


class _SlowingEngine(WrappedEngine):
    """Engine whose writes take 1 ms, and 10 ms from the 8000th on, by a clock that only writes advance."""

    kind = "slowing"

    def __init__(self, settings: StorageConfig) -> None:
        super().__init__(ThreadEngine(settings.queue_depth, settings.request_bytes))
        self._written = 0
        self._seconds = 1.0
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def perf_counter(self) -> float:
        """Return the simulated time."""
        return self._seconds

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Queue a write; writes run one at a time."""
        ticket = Ticket(op, file.path, offset, len(memory), submitted=self._seconds)
        self._waiting.put(ticket)
        return ticket

    def close(self) -> None:
        """Stop the thread."""
        self._waiting.put(None)
        self._thread.join()
        super().close()

    def _write(self) -> None:
        while ticket := self._waiting.get():
            self._seconds += 0.001 if self._written < 8000 else 0.01
            self._written += 1
            ticket.complete()


def test_sustain_ends_after_a_bandwidth_drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive is not written further, to limit its wear."""

    def open_slowing_engine(settings: StorageConfig) -> Engine:
        engine = _SlowingEngine(settings)
        monkeypatch.setattr(stream, "time", engine)
        monkeypatch.setattr(io_engine, "time", engine)
        return engine

    monkeypatch.setattr(targets, "open_engine", open_slowing_engine)
    monkeypatch.setattr(sustained, "_LOOK_SECONDS", 0.02)
    reported: list[dict[str, int]] = []
    (one,) = sustain(
        [tmp_path], 4096, 4, most_bytes=256 * MIB, most_seconds=600,
        on_progress=lambda written, _: reported.append(written),
    ).values()  # fmt: skip
    assert one.written < 256 * MIB
    assert one.fall is not None
    assert (one.fall.before, one.fall.after) == (4096 * 1000, 4096 * 100)
    assert 7900 * 4096 <= one.fall.written <= 8004 * 4096
    assert reported[-1][str(tmp_path)] > 0
    assert os.listdir(tmp_path) == []


def test_sustain_can_be_stopped_and_rejects_invalid_sizes(tmp_path: Path) -> None:
    """Invalid sizes are rejected before a file is created."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(ProbeStoppedError):
        sustain([tmp_path], 4096, 1, most_bytes=64 * MIB, most_seconds=600, stop=stop)
    with pytest.raises(ConfigError, match="too small"):
        sustain([tmp_path], MIB, 4, most_bytes=MIB, most_seconds=1)
    with pytest.raises(BudgetError, match=rf"{tmp_path}: .* free"):
        sustain([tmp_path], MIB, 4, most_bytes=1 << 60, most_seconds=1)
    assert os.listdir(tmp_path) == []


def test_sustain_uses_at_most_half_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders on one file system share that half, unless a size is given."""
    (tmp_path / "b").mkdir()
    paths = [tmp_path, tmp_path / "b"]
    monkeypatch.setattr(sustained, "free_space", lambda path: 100 * MIB)
    assert bytes_to_sustain(paths[:1], None) == 50 * MIB
    assert bytes_to_sustain(paths, None) == 25 * MIB
    assert bytes_to_sustain(paths, 7) == 7
    monkeypatch.setattr(sustained, "free_space", lambda path: 1 << 60)
    assert bytes_to_sustain(paths, None) == MOST_BYTES
    with pytest.raises(ConfigError, match="missing' is not a folder"):
        bytes_to_sustain([tmp_path / "missing"], None)
