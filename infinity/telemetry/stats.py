"""Stats file of one rank: the writing side.

A stats file is a memory-mapped file of doubles. Counting is one read and one write of memory without a lock or a system
call, and the counts survive the rank. **One writer per cell**: an increment is a read followed by a write, so two
threads that add to the *same* label set lose counts. Either let one thread own a label set, or hold the lock that
protects the counted object. For readers, see [Note: torn reads] in `telemetry/stats_file.py`.
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
from infinity.schema import nearest
from infinity.telemetry.metrics import BY_NAME, Kind, Metric
from infinity.telemetry.stats_cells import CLOSED_CELL, cells_of
from infinity.telemetry.stats_file import (
    SUFFIX,
    Snapshot,
    StatsFileError,
    StatsHeader,
    encode_head,
    find_stats_files,
    pid_namespace,
    process_start,
    read_stats_file,
    remove_stats_file,
    stats_file_name,
)
from infinity.untrusted_files import own_folder

KEEP_CLOSED_SECONDS: Final = 900.0
"""Time for which the file of an ended rank is kept if no daemon runs; scrape intervals are shorter than this."""


class Counter:
    """A cell that only increases."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: memoryview[float], index: int) -> None:
        self._cells, self._index = cells, index

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which must not be negative (not checked, because this runs for every request)."""
        self._cells[self._index] += amount


class Gauge:
    """A cell that can be set to any value."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: memoryview[float], index: int) -> None:
        self._cells, self._index = cells, index

    def set(self, value: float) -> None:
        """Set the value."""
        self._cells[self._index] = value


class Histogram:
    """Cells of a distribution: one per bucket, followed by the sum."""

    __slots__ = ("_bounds", "_cells", "_first", "_last")

    def __init__(self, cells: memoryview[float], first: int, bounds: tuple[float, ...]) -> None:
        self._cells, self._first, self._bounds = cells, first, bounds
        self._last = first + len(bounds) + 1

    def observe(self, value: float) -> None:
        """Count one observation in the unit of the metric."""
        self._cells[self._first + bisect_left(self._bounds, value)] += 1
        self._cells[self._last] += value


class Stats:
    """Stats file of a rank. Created by `Stats.create`.

    The file begins as a draft with all blocks allocated, mapped and locked, and gets its name once it is complete. It
    is then *open* and is counted in until it is *closed*, which stores the time in cell 0. The closed file stays, so
    that a scrape after the end of the rank sees the last values. The daemon removes it, or else the first rank that
    creates a file in the same folder `KEEP_CLOSED_SECONDS` later. If the process dies, the kernel releases the lock,
    and readers see that the rank is dead.

    Counters, gauges and histograms keep working after `close`, so threads that end late need not be notified. Their
    counts are then lost.
    """

    def __init__(self, header: StatsHeader, memory: mmap.mmap, offset: int, path: Path | None, file: int) -> None:
        self._header = header
        self._memory = memory  # the whole file; never unmapped, because threads that end late still count
        self._path = path  # None: anonymous memory
        self._file = file  # descriptor, locked while the file is open; -1: none
        self._places = cells_of(header.devices)  # layout of the cells
        self._cells: memoryview[float] = memoryview(memory)[offset:].cast("B").cast("d")
        """Values of the cells. One writer per cell, no lock; see above."""
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
        """Create the stats file of this rank with every label set at 0.

        Args:
            path: *Runtime folder*. The file is named ``<run_id>.rank<k>.stats``, is readable by its owner only, and
                replaces an earlier file of that name. The folder is created if it is missing, and other users must not
                be able to write to it. Files in it that were closed long ago are removed. With None, the file is
                anonymous memory that only this process sees.
            run_id: Id of the run.
            rank: Rank of this process.
            local_rank: Rank within the node.
            world_size: Number of ranks.
            devices: Values of the label ``device`` (``nvme0``, ``nvme1``, … in the order of the configured paths).
            info: Texts for ``version``, ``torch_version``, ``io_engine`` and ``paths`` (a JSON list).

        Raises:
            ConfigError: if an argument is malformed, or no file can be created in the folder. In the latter case, the
                message names the setting ``telemetry.runtime_dir``.
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

    @property
    def path(self) -> Path | None:
        """Path of the stats file, or None for anonymous memory."""
        return self._path

    @property
    def header(self) -> StatsHeader:
        """Identity of the rank that writes the file."""
        return self._header

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of a label set.

        Raises:
            ConfigError: if the metric, a label or a label value is unknown (the message suggests the nearest one), or
                the metric is not a counter.
        """
        return Counter(self._cells, self._index(_metric(name, "counter"), labels))

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge of a label set. Raises the same errors as `counter`."""
        return Gauge(self._cells, self._index(_metric(name, "gauge"), labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram of a label set. Raises the same errors as `counter`."""
        metric = _metric(name, "histogram")
        return Histogram(self._cells, self._index(metric, labels), metric.buckets)

    def snapshot(self) -> Snapshot:
        """Return the current values, for an exporter in this process."""
        values = tuple(self._cells)
        return Snapshot(header=self._header, values=values, status="ended" if values[CLOSED_CELL] else "live")

    def close(self, *, keep: bool = True) -> None:
        """Mark the file as closed. It stays for a while unless `keep` is false. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._cells[CLOSED_CELL] = time.time()
        if self._path is None:
            return
        about = os.fstat(self._file)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        if not keep:
            remove_stats_file(self._path, about)

    def _index(self, metric: Metric, labels: Mapping[str, str]) -> int:
        known = metric.label_names
        if set(labels) != set(known):
            raise ConfigError(f"metric {metric.name!r} has the labels ({', '.join(known)}), got ({', '.join(labels)})")
        for label in metric.labels:
            choices = self._header.devices if label.name == "device" else label.values
            if labels[label.name] not in choices:
                value = labels[label.name]
                raise ConfigError(
                    f"metric {metric.name!r}: {label.name} = {value!r} is not one of "
                    f"{', '.join(choices) or 'none'}{nearest(value, choices, 0.3)}"
                )
        return self._places.first[metric.name, tuple(labels[key] for key in known)]


def _metric(name: str, kind: Kind) -> Metric:
    metric = BY_NAME.get(name)
    if metric is None or metric.server != "rank":
        names = [known.name for known in BY_NAME.values() if known.server == "rank"]
        raise ConfigError(f"unknown metric {name!r}{nearest(name, names, 0.3)}")
    if metric.kind != kind:
        raise ConfigError(f"metric {name!r} is of kind {metric.kind}, not {kind}")
    return metric


def _new_file(folder: Path, name: str, head: bytes, size: int) -> tuple[int, mmap.mmap, Path]:
    """Create a file that is complete, mapped and locked before it gets its name. Return descriptor, memory and path."""
    if folder.suffix == SUFFIX:
        raise ConfigError(f"{folder} is the path of a stats file; pass the runtime folder instead")
    draft = folder / f".{name}.{os.getpid()}"
    file = -1
    try:
        own_folder(folder, parents=True)
        draft.unlink(missing_ok=True)
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # Allocate the blocks now: a store to a hole in the file ends the process with SIGBUS if the disk is full.
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
    """Remove the files of ranks that ended or died long ago. Without a daemon, no other process does this.

    Files of the current run are kept, because its starting or resuming ranks are replacing them.
    """
    for file in find_stats_files(folder):
        with contextlib.suppress(OSError, StatsFileError):
            about, page = file.stat(follow_symlinks=False), read_stats_file(file)
            stepped = page.value("step_last_completed_timestamp_seconds")
            last = page.values[CLOSED_CELL] if page.status == "ended" else max(about.st_mtime, stepped)
            if not page.alive and time.time() - last >= KEEP_CLOSED_SECONDS and page.header.run_id != run_id:
                remove_stats_file(file, about)
