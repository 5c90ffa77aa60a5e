"""Measuring folders at points, all at once or some of them, on files that are made once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from infinity.errors import ConfigError
from infinity.io.probe.points import Measurement, Point, Progress
from infinity.io.probe.stream import Stream
from infinity.io.probe.targets import Target, check_targets, go_on, open_target, through
from infinity.units import format_size


class Bench:
    """Folders that are ready to be measured."""

    def __init__(self, targets: Sequence[Target], stop: threading.Event, written: dict[str, int]) -> None:
        self.targets = {target.path: target for target in targets}
        """By path."""
        self.written = written
        """Bytes that were written to each path, its file's first ones included."""
        self._stop = stop

    def measure(
        self, point: Point, *, seconds: float, most_written: int | None = None, paths: Sequence[str] = ()
    ) -> dict[str, Measurement]:
        """Return what `paths` (default: all) do at one point while all of them are busy.

        Args:
            point: not above the points that the bench was opened for.
            seconds: length of the measurement.
            most_written: bytes to each path, at least those in flight; it ends early where they are reached.
            paths: of the bench's.

        Raises:
            ProbeStoppedError: it was stopped.
            StorageError: a transfer failed.
            StallError: a drive did not answer.
        """
        go_on(self._stop)
        targets = [self.targets[path] for path in paths or self.targets]
        streams = [Stream(target, point, seconds, most_written, self._stop) for target in targets]
        for stream in streams:
            stream.start()
        found = {stream.target.path: stream.finish() for stream in streams}
        for stream in streams:
            self.written[stream.target.path] += stream.written
        go_on(self._stop)  # what was cut short is no measurement
        return found

    @contextmanager
    def through(self, engine: str, point: Point) -> Iterator[Bench]:
        """Have the same files in another engine, one for all of them, as a run has it.

        Raises `ConfigError` if the kernel refuses it, `StorageError`.
        """
        with through(list(self.targets.values()), engine, point) as targets:
            yield Bench(targets, self._stop, self.written)


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
    """Have a file in each folder, of `file_bytes`, reserved and written in full; gone when it ends, however it ends.

    Args:
        paths: folders.
        points: from `points_of`, all that will be measured.
        file_bytes: size of each file in bytes, at least twice the bytes in flight.
        engine: ``auto``, ``io_uring`` or ``threads``.
        stop: ends what is under way when it is set, as soon as what is in flight has ended.
        on_filled: called after each folder's file is written.

    Raises:
        ProbeStoppedError: `stop` was set.
        ConfigError: a folder that does not exist or cannot be written, or a size too small.
        BudgetError: not enough free space.
        StorageError: a transfer failed.
        StallError: a drive did not answer.
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
    seconds: float = 1.0,
    engine: str = "auto",
    most_written: int | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, tuple[Measurement, ...]]:
    """Measure all `paths` at once, so that what they share shows, and return one `Measurement` per point.

    Args:
        paths: folders.
        points: from `points_of`.
        file_bytes: size of each file in bytes, at least twice the bytes in flight.
        seconds: length of one measurement.
        engine: ``auto``, ``io_uring`` or ``threads``.
        most_written: bytes that one measurement may write to each path, at least those in flight; it ends early where
            they are reached. None: no limit. Filling the file is not counted.
        stop: ends the measurement when it is set, as soon as what is in flight has ended.
        on_progress: called after each path is filled and after each point.

    Raises:
        ProbeStoppedError: `stop` was set.
        ConfigError: a folder that does not exist or cannot be written, or a size or time too small.
        BudgetError: not enough free space.
        StorageError: a transfer failed.
        StallError: a drive did not answer.
    """
    least = max(point.flight for point in points)
    if most_written is not None and most_written < least:
        raise ConfigError(f"most_written = {most_written} bytes must be those in flight at least, {least}")
    if seconds <= 0:
        raise ConfigError(f"seconds = {seconds} must be positive")
    total, done = len(paths) + len(points), 0

    def progressed(label: str, latest: dict[str, Measurement]) -> None:
        nonlocal done
        done += 1
        on_progress(Progress(done=done, total=total, label=label, latest=latest))

    def filled(target: Target) -> None:
        progressed(f"{target.path}: wrote {format_size(target.file_bytes)}", {})

    with open_bench(paths, points, file_bytes=file_bytes, engine=engine, stop=stop, on_filled=filled) as bench:
        found: dict[str, list[Measurement]] = {name: [] for name in bench.targets}
        for point in points:
            latest = bench.measure(point, seconds=seconds, most_written=most_written)
            for name, measurement in latest.items():
                found[name].append(measurement)
            progressed(label_of(point), latest)
    return {name: tuple(measurements) for name, measurements in found.items()}


def label_of(point: Point) -> str:
    """Return a point in words."""
    return f"{point.load.value} {format_size(point.block_bytes)} x {point.depth}"
