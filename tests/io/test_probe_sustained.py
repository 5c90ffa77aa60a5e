"""Sustained writes: how a cliff is told, and when they end."""

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


@pytest.mark.parametrize(
    ("slices", "fall"),
    [
        ([], None),
        ([100, 1, 1], None),  # too short
        ([100] * 60, None),
        ([100, 90, 10] * 20, None),  # uneven, but no less at the end
        ([100] * 30 + [10] * 2 + [100] * 30, None),  # a pause, no cliff
        ([100] * 30 + [71] * 30, None),
        ([100] * 30 + [69] * 30, Fall(before=100, after=69, written=3000, second=30)),
        ([100] * 20 + [10] * 2 + [100] * 20 + [20] * 20, Fall(before=100, after=20, written=4020, second=42)),
        ([100, 100, 20, 20, 20], Fall(before=100, after=20, written=200, second=2)),
        ([100] * 56 + [30] * 4, Fall(before=100, after=30, written=5600, second=56)),
        ([0] * 20, None),
    ],
)
def test_a_cliff_is_told_by_the_rule(slices: list[int], fall: Fall | None) -> None:
    """Medians of the first and the last seconds; where it is, too."""
    assert fall_of(slices) == fall


def test_speeds_are_per_second() -> None:
    """Whatever the length of what is counted."""
    fall = fall_of([100] * 10 + [10] * 10, slice_seconds=0.1)
    assert fall is not None
    assert (fall.before, fall.after, fall.written) == (pytest.approx(1000), pytest.approx(100), 1000)


def test_all_is_written_once_where_there_is_no_cliff(tmp_path: Path) -> None:
    """To each folder, and nothing is left."""
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


def test_it_ends_when_the_time_is_over(tmp_path: Path) -> None:
    """Before all is written."""
    (one,) = sustain([tmp_path], 4096, 1, most_bytes=256 * MIB, most_seconds=0.05).values()
    assert 0 < one.written < 256 * MIB
    assert not one.long_enough
    assert one.fall is None


class _Falling(WrappedEngine):
    """Writes that take a millisecond each, from the 8000th on ten, by a clock that only they advance."""

    kind = "falling"

    def __init__(self, settings: StorageConfig) -> None:
        super().__init__(ThreadEngine(settings.queue_depth, settings.request_bytes))
        self._written = 0
        self._seconds = 1.0
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def perf_counter(self) -> float:
        """Return the time."""
        return self._seconds

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Write, one request after the other."""
        ticket = Ticket(op, file.path, offset, len(memory), submitted=self._seconds)
        self._waiting.put(ticket)
        return ticket

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join()
        super().close()

    def _write(self) -> None:
        while ticket := self._waiting.get():
            self._seconds += 0.001 if self._written < 8000 else 0.01
            self._written += 1
            ticket.complete()


def test_it_ends_behind_a_cliff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that is slow from its 8000th write on is found, and not worn out further."""

    def falling(settings: StorageConfig) -> tuple[Engine, str]:
        engine = _Falling(settings)
        monkeypatch.setattr(stream, "time", engine)
        monkeypatch.setattr(io_engine, "time", engine)
        return engine, "for the test"

    monkeypatch.setattr(targets, "open_engine", falling)
    monkeypatch.setattr(sustained, "_LOOK_SECONDS", 0.02)
    told: list[dict[str, int]] = []
    (one,) = sustain(
        [tmp_path], 4096, 4, most_bytes=256 * MIB, most_seconds=600,
        on_progress=lambda written, _: told.append(written),
    ).values()  # fmt: skip
    assert one.written < 256 * MIB
    assert one.fall is not None
    assert (one.fall.before, one.fall.after) == (4096 * 1000, 4096 * 100)
    assert 7900 * 4096 <= one.fall.written <= 8004 * 4096
    assert told[-1][str(tmp_path)] > 0
    assert os.listdir(tmp_path) == []


def test_it_can_be_stopped_and_refuses(tmp_path: Path) -> None:
    """What cannot be, before a file is made."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(ProbeStoppedError):
        sustain([tmp_path], 4096, 1, most_bytes=64 * MIB, most_seconds=600, stop=stop)
    with pytest.raises(ConfigError, match="too small"):
        sustain([tmp_path], MIB, 4, most_bytes=MIB, most_seconds=1)
    with pytest.raises(BudgetError, match="free"):
        sustain([tmp_path], MIB, 4, most_bytes=1 << 60, most_seconds=1)
    assert os.listdir(tmp_path) == []


def test_half_of_the_free_space_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by the folders that are on one file system, unless a size is asked for."""
    (tmp_path / "b").mkdir()
    paths = [tmp_path, tmp_path / "b"]
    monkeypatch.setattr(sustained, "free_space", lambda path: 100 * MIB)
    assert bytes_to_sustain(paths[:1], None) == 50 * MIB
    assert bytes_to_sustain(paths, None) == 25 * MIB
    assert bytes_to_sustain(paths, 7) == 7
    monkeypatch.setattr(sustained, "free_space", lambda path: 1 << 60)
    assert bytes_to_sustain(paths, None) == MOST_BYTES
    with pytest.raises(ConfigError, match="not a folder"):
        bytes_to_sustain([tmp_path / "missing"], None)
