"""Sustained writes until the write cache of a drive is full, and detection of this point.

[Note: cliff] Many drives first write to a fast area (SLC) and become slower when it is full. To detect this cliff,
the median bandwidth of the last `WINDOW` seconds is compared with the median of the first `WINDOW` seconds. There is
a cliff if it is below `FALLEN` times that median. The cliff is located at the first second whose bandwidth is below
this limit and that starts a window whose median is also below it. For measurements shorter than four times `WINDOW`
seconds, a window is a quarter of the measurement. Measurements shorter than four seconds are not sufficient. Writing
ends `FLUSHED` seconds after the cliff, because the remaining bandwidth is then known.
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
"""Default maximum number of bytes written to each folder, unless it exceeds half of the free space."""
_LOOK_SECONDS: Final = 0.2  # interval of checks and progress reports


@dataclass(frozen=True, kw_only=True)
class Fall:
    """Drop in bandwidth. [Note: cliff]"""

    before: float
    """Bytes per second at the beginning of the measurement."""
    after: float
    """Bytes per second at the end of the measurement."""
    written: int
    """Number of bytes written before the drop."""
    second: int
    """Second in which the drop occurred, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """Result for one folder."""

    written: int
    """Total number of bytes written."""
    measurement: Measurement
    """Result for the entire duration."""
    slices: tuple[int, ...]
    """Number of bytes in each complete second, in order."""

    @property
    def long_enough(self) -> bool:
        """``True`` if the measurement was long enough to detect a cliff."""
        return len(self.slices) >= _QUARTERS

    @property
    def fall(self) -> Fall | None:
        """The cliff, or ``None`` if there is no cliff."""
        return fall_of(self.slices)


def fall_of(slices: Sequence[int]) -> Fall | None:
    """Return the cliff in a series of bytes per second, or ``None`` if there is no cliff. [Note: cliff]"""
    window = min(WINDOW, len(slices) // _QUARTERS)
    if window == 0:
        return None
    before, after = median(slices[:window]), median(slices[-window:])
    if after >= FALLEN * before:
        return None
    last = len(slices) - window  # start of the last window; its median is too low, so at least one of its seconds is

    def is_low(second: int) -> bool:
        begin = min(second, last)
        return max(slices[second], median(slices[begin : begin + window])) < FALLEN * before

    second = next(filter(is_low, range(len(slices))))
    return Fall(before=before, after=after, written=sum(slices[:second]), second=second)


def bytes_to_sustain(paths: Sequence[str | os.PathLike[str]], asked: int | None) -> int:
    """Return the maximum number of bytes to write to each folder: `asked`, or a default if it is ``None``.

    The default is limited to half of the free space.

    Raises:
        ConfigError: if a folder does not exist.
    """
    if asked is not None:
        return asked
    beside: dict[int, list[int]] = {}
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{os.fspath(path)!r} is not a folder. Create it or use a different one.")
        beside.setdefault(os.stat(path).st_dev, []).append(free_space(os.fspath(path)))
    return min(MOST_BYTES, *(min(free) // 2 // len(free) for free in beside.values()))  # paths may share a file system


def sustain(
    paths: Sequence[str | os.PathLike[str]],
    block_bytes: int,
    depth: int,
    *,
    most_bytes: int,
    most_seconds: float,
    engine: str = "auto",
    stop: threading.Event | None = None,
    on_progress: Callable[[dict[str, int], float], None] = lambda written, seconds: None,
) -> dict[str, Sustained]:
    """Write to all `paths` at once until each has passed its cliff, `most_bytes` are written, or the time is over.

    Each folder gets one unlinked file of `most_bytes` that is written once in order, so no files are left behind.

    Args:
        paths: folders to measure.
        block_bytes: number of bytes per request.
        depth: number of requests in flight.
        most_bytes: maximum number of bytes to write to each folder, at least twice the number of bytes in flight.
        most_seconds: maximum duration.
        engine: ``auto``, ``io_uring`` or ``threads``.
        stop: event that stops the measurement.
        on_progress: called several times per second with the number of bytes written to each path and the elapsed
            seconds.

    Raises the same exceptions as `measure_paths`.
    """
    names, stop = [os.fspath(path) for path in paths], stop or threading.Event()
    point = Point(load=Load.WRITE, block_bytes=block_bytes, depth=depth)
    check_targets(names, [point], most_bytes, engine)
    size = align_down(most_bytes, block_bytes)
    with ExitStack() as stack:
        targets = [stack.enter_context(open_target(name, [point], size, engine, stop, fill=False)) for name in names]
        enough = threading.Event()  # shared, because all paths must stay busy until the last one has finished
        streams = [Stream(target, point, most_seconds, size, enough) for target in targets]
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
        path: Sustained(written=stream.written, measurement=measured, slices=stream.slices())
        for path, (measured, stream) in found.items()
    }


def _is_done(stream: Stream) -> bool:
    return stream.ended(0)


def _has_flushed(slices: Sequence[int]) -> bool:
    fall = fall_of(slices)
    return fall is not None and len(slices) >= 2 * WINDOW and len(slices) - fall.second >= FLUSHED
