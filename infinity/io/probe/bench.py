"""Measurements of folders, together or individually, on files that are created once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from infinity.io.probe.points import Measurement, Point
from infinity.io.probe.stream import Stream
from infinity.io.probe.targets import Target, check_targets, go_on, open_target
from infinity.units import format_size


class Bench:
    """Folders that are ready to be measured."""

    def __init__(self, targets: Sequence[Target], stop: threading.Event, written: dict[str, int]) -> None:
        self.targets = {target.path: target for target in targets}
        """Targets by path."""
        self.written = written
        """Number of bytes written to each path, including the initial contents of its file."""
        self._stop = stop

    def measure(
        self, point: Point, *, seconds: float, most_written: int | None = None, paths: Sequence[str] = ()
    ) -> dict[str, Measurement]:
        """Measure `paths` (by default all) at one point, while all of them are busy, and return the results by path.

        Args:
            point: point to measure. It must be within the limits of the points for which the bench was opened.
            seconds: duration of the measurement.
            most_written: maximum number of bytes to write to each path, at least the number of bytes in flight. The
                measurement ends when this number is reached.
            paths: paths of this bench.

        Raises:
            ProbeStoppedError: if the measurement was stopped.
            StorageError: if a transfer failed.
            StallError: if a drive did not respond.
        """
        go_on(self._stop)
        targets = [self.targets[path] for path in paths or self.targets]
        streams = [Stream(target, point, seconds, most_written, self._stop) for target in targets]
        for stream in streams:
            stream.start()
        found = {stream.target.path: stream.finish() for stream in streams}
        for stream in streams:
            self.written[stream.target.path] += stream.written
        go_on(self._stop)  # an incomplete measurement is not a result
        return found


@contextmanager
def open_bench(
    paths: Sequence[str | os.PathLike[str]],
    points: Sequence[Point],
    *,
    file_bytes: int,
    engine: str = "auto",
    stop: threading.Event | None = None,
    on_filled: Callable[[Target], None] = lambda target: None,
) -> Iterator[Bench]:
    """Create a file of `file_bytes` in each folder and write all of it. The files are removed in all cases.

    Args:
        paths: folders to measure.
        points: result of `points_of`: all points that will be measured.
        file_bytes: size of each file in bytes, at least twice the number of bytes in flight.
        engine: ``auto``, ``io_uring`` or ``threads``.
        stop: event that stops the measurement as soon as requests in flight have ended.
        on_filled: called after the file in each folder is written.

    Raises:
        ProbeStoppedError: if `stop` was set.
        ConfigError: if a folder does not exist or is not writable, or if a size is too small.
        BudgetError: if there is too little free space.
        StorageError: if a transfer failed.
        StallError: if a drive did not respond.
    """
    names, stop = [os.fspath(path) for path in paths], stop or threading.Event()
    check_targets(names, points, file_bytes, engine)
    with ExitStack() as stack:
        targets: list[Target] = []
        for name in names:
            targets.append(stack.enter_context(open_target(name, points, file_bytes, engine, stop)))
            on_filled(targets[-1])
        yield Bench(targets, stop, {target.path: target.file_bytes for target in targets})


def measure_paths(
    paths: Sequence[str | os.PathLike[str]],
    points: Sequence[Point],
    *,
    file_bytes: int,
    seconds: float,
    engine: str = "auto",
    stop: threading.Event | None = None,
    on_progress: Callable[[dict[str, Measurement]], None] = lambda latest: None,
) -> dict[str, tuple[Measurement, ...]]:
    """Measure all `paths` at once, so that shared limits become visible. Return one `Measurement` per path per point.

    Args:
        paths: folders to measure.
        points: result of `points_of`.
        file_bytes: size of each file in bytes, at least twice the number of bytes in flight. Each measurement writes at
            most as many bytes to each path, in addition to filling the file.
        seconds: maximum duration of one measurement.
        engine: ``auto``, ``io_uring`` or ``threads``.
        stop: event that stops the measurement as soon as requests in flight have ended.
        on_progress: called with an empty dict after each path is filled, and with the results by path after each point.

    Raises the same exceptions as `open_bench`.
    """
    with open_bench(
        paths, points, file_bytes=file_bytes, engine=engine, stop=stop, on_filled=lambda _: on_progress({})
    ) as bench:
        found: dict[str, list[Measurement]] = {name: [] for name in bench.targets}
        for point in points:
            latest = bench.measure(point, seconds=seconds, most_written=file_bytes)
            for name, measurement in latest.items():
                found[name].append(measurement)
            on_progress(latest)
    return {name: tuple(measurements) for name, measurements in found.items()}


def label_of(point: Point) -> str:
    """Return a label for a point."""
    return f"{point.load.value} {format_size(point.block_bytes)} x {point.depth}"
