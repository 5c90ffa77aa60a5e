"""Writing on and on, until a drive's write cache is full, and how that is told.

[Note: cliff] Many drives take writes into a fast part (SLC) first, and become slower when it is full. The rule: of the
bandwidth in each second, the median of the last `WINDOW` seconds is compared with that of the first `WINDOW`; below
`FALLEN` of it, the drive has fallen off. Where: at the first second that is itself below, and with it the median of the
`WINDOW` seconds from there. With less than four times `WINDOW` seconds the windows are a quarter of what there is;
less than four seconds tell nothing. Writing ends `FLUSHED` seconds after the cliff: what is left is seen by then.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Final

from infinity.errors import ConfigError
from infinity.io.probe.points import Load, Measurement, Point
from infinity.io.probe.stream import Stream
from infinity.io.probe.targets import check_targets, free_space, go_on, open_target
from infinity.units import GIB, align_down

WINDOW: Final = 5
FALLEN: Final = 0.7
FLUSHED: Final = 10
_QUARTERS: Final = 4
MOST_BYTES: Final = 64 * GIB
"""Written to each folder unless something else is asked for, if that is not more than half of the free space."""
_LOOK_SECONDS: Final = 0.2  # how often it is looked, and progress is told


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A cliff. [Note: cliff]"""

    before: float
    """Bytes per second at the beginning."""
    after: float
    """Bytes per second at the end."""
    written: int
    """Bytes that were written until it fell."""
    second: int
    """Which second it was, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """What one folder took."""

    written: int
    """Bytes in all."""
    measurement: Measurement
    """Over the whole time."""
    slice_seconds: float
    slices: tuple[int, ...]
    """Bytes in each whole stretch of `slice_seconds`, the first one first."""

    @property
    def long_enough(self) -> bool:
        """Whether there was time enough to tell a cliff."""
        return len(self.slices) >= _QUARTERS

    @property
    def fall(self) -> Fall | None:
        """The cliff, None if there is none."""
        return fall_of(self.slices, self.slice_seconds)


def fall_of(slices: Sequence[int], slice_seconds: float = 1.0) -> Fall | None:
    """Return the cliff in the bytes of each second, None if there is none. [Note: cliff]"""
    window = min(WINDOW, len(slices) // _QUARTERS)
    if window == 0:
        return None
    before, after = median(slices[:window]), median(slices[-window:])
    if after >= FALLEN * before:
        return None
    last = len(slices) - window  # where the last window begins, whose median is below: so one of its seconds is

    def is_low(second: int) -> bool:
        begin = min(second, last)
        return max(slices[second], median(slices[begin : begin + window])) < FALLEN * before

    second = next(filter(is_low, range(len(slices))))
    return Fall(before=before / slice_seconds, after=after / slice_seconds, written=sum(slices[:second]), second=second)


def bytes_to_sustain(paths: Sequence[str | os.PathLike[str]], asked: int | None) -> int:
    """Return how much is written to each folder at most: what was asked for, else what half of the free space bears.

    Raises:
        ConfigError: a folder that does not exist.
    """
    if asked is not None:
        return asked
    beside: dict[int, list[int]] = {}
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{os.fspath(path)!r} is not a folder; create it or name another one")
        beside.setdefault(os.stat(path).st_dev, []).append(free_space(os.fspath(path)))
    return min(MOST_BYTES, *(min(free) // 2 // len(free) for free in beside.values()))  # they may share a file system


def sustain(
    paths: Sequence[str | os.PathLike[str]],
    block_bytes: int,
    depth: int,
    *,
    most_bytes: int,
    most_seconds: float,
    engine: str = "auto",
    stop: threading.Event | None = None,
    slice_seconds: float = 1.0,
    on_progress: Callable[[dict[str, int], float], None] = lambda written, seconds: None,
) -> dict[str, Sustained]:
    """Write to all `paths` at once until each has fallen off its cliff, `most_bytes` are written or the time is over.

    Each folder gets one file of `most_bytes`, written once in order, without a name: nothing is left.

    Args:
        paths: folders.
        block_bytes: per request.
        depth: requests in flight.
        most_bytes: to each folder, at least twice the bytes in flight.
        most_seconds: length at most.
        engine: ``auto``, ``io_uring`` or ``threads``.
        stop: ends it when it is set.
        slice_seconds: stretch of time of which the bandwidth is noted.
        on_progress: called several times a second with the bytes written to each path, and the seconds since the start.

    Raises: as `measure_paths`.
    """
    names, stop = [os.fspath(path) for path in paths], stop or threading.Event()
    point = Point(load=Load.WRITE, block_bytes=block_bytes, depth=depth)
    check_targets(names, [point], most_bytes, engine)
    size = align_down(most_bytes, block_bytes)
    with ExitStack() as stack:
        targets = [stack.enter_context(open_target(name, [point], size, engine, stop, fill=False)) for name in names]
        enough = threading.Event()  # for all at once: while one writes, the others are busy
        streams = [Stream(target, point, most_seconds, size, enough, slice_seconds) for target in targets]
        began = time.perf_counter()
        for stream in streams:
            stream.start()
        while not all(map(_is_done, streams)) and time.perf_counter() - began <= most_seconds:
            if stop.wait(_LOOK_SECONDS) or all(_is_done(one) or _has_flushed(one.slices()) for one in streams):
                enough.set()
                break
            on_progress({one.target.path: one.written for one in streams}, time.perf_counter() - began)
        found = {stream.target.path: (stream.finish(), stream) for stream in streams}
    go_on(stop)
    return {
        path: Sustained(
            written=stream.written, measurement=measured, slice_seconds=slice_seconds, slices=stream.slices()
        )
        for path, (measured, stream) in found.items()
    }


def _is_done(stream: Stream) -> bool:
    return stream.ended(0)


def _has_flushed(slices: Sequence[int]) -> bool:
    fall = fall_of(slices)
    return fall is not None and len(slices) >= 2 * WINDOW and len(slices) - fall.second >= FLUSHED
