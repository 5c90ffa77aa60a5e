"""Writer of the stats file of a rank.

A stats file is a memory-mapped array of doubles, called cells. An increment reads and writes one cell without a lock or
a system call, and the values remain readable after the process has ended. **Each cell must have only one writer at a
time**, because an increment is not atomic: if two threads increment the same cell concurrently, counts are lost. Update
a cell either from a single thread or while holding a lock. For readers, see [Note: torn reads] in
`telemetry/stats_file.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from infinity.errors import ConfigError
from infinity.telemetry.metrics import BY_NAME
from infinity.telemetry.stats_cells import CLOSED_CELL, cells_of
from infinity.telemetry.stats_file import (
    Snapshot,
    StatsFileError,
    StatsHeader,
    Status,
    encode_head,
    find_stats_files,
    pid_namespace,
    process_start,
    read_stats_file,
    remove_stats_file,
    run_exists,
    stats_file_name,
)
from infinity.untrusted_files import own_folder

KEEP_CLOSED_SECONDS: Final = 900.0
"""Time for which the stats file of a finished rank is kept if no daemon is running; longer than a scrape interval."""


class _Cell:
    __slots__ = ("_cells", "_index")

    def __init__(self, cells: memoryview[float], index: int) -> None:
        self._cells, self._index = cells, index


class Counter(_Cell):
    """Value that only increases, stored in one cell."""

    __slots__ = ()

    def add(self, amount: float = 1) -> None:
        """Add `amount`. It must not be negative, which is not checked because this runs for every I/O request."""
        self._cells[self._index] += amount


class Gauge(_Cell):
    """Value that can be set to any number, stored in one cell."""

    __slots__ = ()

    def set(self, value: float) -> None:
        self._cells[self._index] = value


class Histogram:
    """Distribution of observed values, stored in one cell per bucket followed by a cell for the sum."""

    __slots__ = ("_bounds", "_cells", "_first", "_last")

    def __init__(self, cells: memoryview[float], first: int, bounds: tuple[float, ...]) -> None:
        self._cells, self._first, self._bounds = cells, first, bounds
        self._last = first + len(bounds) + 1

    def observe(self, value: float) -> None:
        """Add an observed value, in the unit of the metric."""
        self._cells[self._first + bisect_left(self._bounds, value)] += 1
        self._cells[self._last] += value


class Stats:
    """Stats file of a rank. Use `Stats.create` to create one.

    The file is created under a temporary name. It is renamed once all of its blocks are allocated, mapped and locked.
    The file is *open* until `close` stores the current time in cell 0. A closed file is kept for a while, so that a
    later scrape still sees the last values. It is removed by the daemon or, if no daemon is running, by the first rank
    that creates a file in the same folder after `KEEP_CLOSED_SECONDS`. If the process dies, the operating system
    releases the lock, which tells readers that the rank is dead.

    Counters, gauges and histograms can still be used after `close`, because other threads may outlive it, but their
    values are lost.
    """

    def __init__(self, header: StatsHeader, memory: mmap.mmap, offset: int, path: Path | None, file: int) -> None:
        self.header = header
        """Identity of the rank that writes the file."""
        self.path = path
        """Path of the stats file, or None for anonymous memory."""
        self._memory = memory  # the whole file; never unmapped, because other threads may write after `close`
        self._file = file  # descriptor, locked while the file is open; -1 for anonymous memory
        self._places = cells_of(header.devices)  # layout of the cells
        self._cells: memoryview[float] = memoryview(memory)[offset:].cast("B").cast("d")
        """Values of the cells. Each cell has one writer at a time (see the module docstring)."""
        self._closed = False  # set by `close`, on the thread that created the file

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        run_id: str,
        rank: int,
        local_rank: int,
        world_size: int,
        devices: Sequence[str],
        info: Mapping[str, str],
    ) -> Stats:
        """Create the stats file of this rank, with all cells set to 0.

        Args:
            path: *Runtime folder* in which the file is created as ``<run_id>.rank<k>.stats``, readable only by its
                owner. It replaces an earlier file with that name. The folder is created if necessary; other users must
                not have write permission to it. Stats files in the folder that were closed long ago are removed. If
                None, anonymous memory is used instead of a file, so only this process can read the values.
            run_id: Id of the run.
            rank: Rank of this process.
            local_rank: Rank within the node.
            world_size: Number of ranks.
            devices: Values of the ``device`` label: ``nvme0``, ``nvme1``, … in the order of the configured paths.
            info: Texts by name (see `StatsHeader`).

        Raises:
            ConfigError: if an argument is malformed, or if the file cannot be created. In the latter case, the message
                refers to the setting ``telemetry.runtime_dir``.
        """
        header = StatsHeader(
            run_id=run_id,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            pid=os.getpid(),
            process_started=process_start(os.getpid()),
            pid_namespace=pid_namespace(),
            started=time.time(),
            devices=tuple(devices),
            info=dict(info),
            fingerprint=cells_of(tuple(devices)).fingerprint,
        )
        head = encode_head(header)
        size = len(head) + 8 * cells_of(header.devices).length
        if path is None:
            return cls(header, mmap.mmap(-1, size), len(head), None, -1)
        file, memory, place = _new_file(Path(path), stats_file_name(run_id, rank), head, size)
        _remove_closed(Path(path), run_id)
        return cls(header, memory, len(head), place, file)

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of a metric for the given label values. Raises `KeyError` if one of them is unknown."""
        return Counter(self._cells, self._index(name, labels))

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge of a metric for the given label values. Raises `KeyError` if one of them is unknown."""
        return Gauge(self._cells, self._index(name, labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram of a metric for the given label values. Raises `KeyError` if one of them is unknown."""
        return Histogram(self._cells, self._index(name, labels), BY_NAME[name].buckets)

    def snapshot(self) -> Snapshot:
        """Return the current values, for an exporter in this process."""
        values = tuple(self._cells)
        status: Status = "ended" if values[CLOSED_CELL] else "live"
        return Snapshot(header=self.header, values=values, status=status, uid=os.geteuid())

    def close(self, *, keep: bool = True) -> None:
        """Mark the file as closed, and remove it if `keep` is ``False``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._cells[CLOSED_CELL] = time.time()
        if self.path is None:
            return
        about = os.fstat(self._file)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        if not keep:
            remove_stats_file(self.path, about)

    def _index(self, name: str, labels: Mapping[str, str]) -> int:
        return self._places.first[name, tuple(labels[key] for key in BY_NAME[name].label_names)]


def _new_file(folder: Path, name: str, head: bytes, size: int) -> tuple[int, mmap.mmap, Path]:
    """Create a stats file that is complete, mapped and locked before it is renamed to its final name.

    Returns:
        The file descriptor, the mapped memory and the path.
    """
    draft = folder / f".{name}.{os.getpid()}"
    file = -1
    try:
        own_folder(folder, parents=True)
        draft.unlink(missing_ok=True)
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # Allocate the blocks now. Otherwise, a write to the mapping would raise SIGBUS if the file system is full.
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, head, 0)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory = mmap.mmap(file, size)
        os.rename(draft, folder / name)
    except OSError as error:
        if file >= 0:
            os.close(file)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot create a stats file in {str(folder)!r} ({error.strerror}); set "
            "telemetry.runtime_dir to a folder that only your user can write to"
        ) from error
    return file, memory, folder / name


def _remove_closed(folder: Path, run_id: str) -> None:
    """Remove the stats files of ranks that finished or died long ago, in case no daemon does.

    Files of the current run are kept, because its ranks replace them when they start. Files of dead ranks are kept
    until their run is resumed or removed, because they record that the run has failed.
    """
    for file in find_stats_files(folder):
        with contextlib.suppress(OSError, StatsFileError):
            about, snapshot = file.stat(follow_symlinks=False), read_stats_file(file)
            stepped = snapshot.value("step_last_completed_timestamp_seconds")
            last = snapshot.values[CLOSED_CELL] if snapshot.status == "ended" else max(about.st_mtime, stepped)
            if snapshot.alive or time.time() - last < KEEP_CLOSED_SECONDS or snapshot.header.run_id == run_id:
                continue
            if snapshot.status == "ended" or not run_exists(snapshot.header, snapshot.uid):
                remove_stats_file(file, about)
