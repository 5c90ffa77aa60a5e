"""Bandwidth of folders, measured through an engine on real files with O_DIRECT."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from infinity.config import StorageConfig
from infinity.errors import BudgetError, ConfigError, InfinityError, StallError, StorageError
from infinity.hugepages import transfer_memory
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.select import open_engine
from infinity.units import KIB, MIB, align_down, format_size

BLOCK_MULTIPLE = 4 * KIB
"""Request sizes are multiples of this many bytes."""

_NOISE_BYTES = 8 * MIB
_FILL_BYTES = MIB
_SPARE_BYTES = 16 * MIB  # left free for the file system's own records
_PATIENCE_SECONDS = 120.0
_FILL_AHEAD = 8  # writes in flight while a file is filled
_PREFIX = ".infinity-probe-"
_OLD_SECONDS = 60.0
"""A file that has its name for so long was left behind: whoever measures takes it away at once."""


class ProbeStoppedError(InfinityError):
    """A measurement was told to stop."""


class Load(Enum):
    """What the requests of a measurement do."""

    READ = "read"
    WRITE = "write"
    BOTH = "both"
    """Every second request writes."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination to measure: bytes per request, requests in flight."""

    load: Load
    block_bytes: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one path did at one point while all paths were busy; bytes per second."""

    point: Point
    read_bytes_per_second: float
    write_bytes_per_second: float
    seconds: float
    """Length of the measurement."""

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a probe has come; `latest` is empty while the files are being written."""

    done: int
    total: int
    label: str
    latest: dict[str, Measurement]


def points_of(loads: Sequence[Load], blocks: Sequence[int], depths: Sequence[int]) -> tuple[Point, ...]:
    """Return every combination, loads outermost.

    Raises:
        ConfigError: nothing to measure, or a size or depth that cannot be.
    """
    for block in blocks:
        if block < BLOCK_MULTIPLE or block % BLOCK_MULTIPLE:
            raise ConfigError(f"block = {block} bytes must be a multiple of {BLOCK_MULTIPLE}")
    for depth in depths:
        if not 1 <= depth <= 4096:
            raise ConfigError(f"depth = {depth} must be from 1 to 4096 requests in flight")
    points = tuple(
        Point(load=load, block_bytes=block, depth=depth) for load in loads for block in blocks for depth in depths
    )
    if not points:
        raise ConfigError("nothing to measure: give at least one load, block and depth")
    return points


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

    Each folder gets a file of `file_bytes`, reserved and written in full first (so that reads reach the
    drive) and unlinked while it is open, so that nothing is left whatever happens.

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
    names = [os.fspath(path) for path in paths]
    _check(names, points, file_bytes, seconds, engine)
    least = max(point.block_bytes * point.depth for point in points)
    if most_written is not None and most_written < least:
        raise ConfigError(f"most_written = {most_written} bytes must be those in flight at least, {least}")
    stop = stop or threading.Event()
    total = len(names) + len(points)
    found: dict[str, list[Measurement]] = {name: [] for name in names}
    with ExitStack() as stack:
        targets: list[_Target] = []
        for name in names:
            targets.append(stack.enter_context(_target(name, points, file_bytes, engine, stop)))
            label = f"{name}: wrote {format_size(targets[-1].file_bytes)}"
            on_progress(Progress(done=len(targets), total=total, label=label, latest={}))
        for number, point in enumerate(points):
            _go_on(stop)
            streams = [_Stream(target, point, seconds, most_written, stop) for target in targets]
            for stream in streams:
                stream.start()
            latest = {stream.target.path: stream.finish() for stream in streams}
            _go_on(stop)  # what was cut short is no measurement
            for name, measurement in latest.items():
                found[name].append(measurement)
            label = f"{point.load.value} {format_size(point.block_bytes)} x {point.depth}"
            on_progress(Progress(done=len(names) + number + 1, total=total, label=label, latest=latest))
    return {name: tuple(measurements) for name, measurements in found.items()}


def remove_left_over(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove and return files of measurements that were killed in the moment between making and unlinking them.

    Raises:
        OSError: the folder cannot be read.
    """
    removed = []
    for path in Path(folder).iterdir():
        with suppress(OSError):  # of another user, or gone
            if path.name.startswith(_PREFIX) and time.time() - path.lstat().st_mtime >= _OLD_SECONDS:
                path.unlink()
                removed.append(path)
    return removed


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise ProbeStoppedError("the measurement was stopped")


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A folder that is measured: its engine, its file of `file_bytes`, and memory for all requests in flight."""

    path: str
    engine: Engine
    file: DataFile
    memory: memoryview
    file_bytes: int


def _check(names: Sequence[str], points: Sequence[Point], file_bytes: int, seconds: float, engine: str) -> None:
    if not names:
        raise ConfigError("name at least one folder to probe")
    if len({os.path.realpath(name) for name in names}) != len(names):
        raise ConfigError(f"the same folder is named twice: {', '.join(names)}")
    if engine not in ("auto", "io_uring", "threads"):
        raise ConfigError(f"engine = {engine!r} is not one of 'auto', 'io_uring', 'threads'")
    if seconds <= 0:
        raise ConfigError(f"seconds = {seconds} must be positive")
    least = 2 * max(point.block_bytes * point.depth for point in points)
    if file_bytes < least:
        raise ConfigError(
            f"size = {format_size(file_bytes)} is too small: twice the bytes in flight are "
            f"{format_size(least)}; give a larger size, or smaller blocks or depths"
        )
    needed: dict[int, int] = {}
    for name in names:
        if not os.path.isdir(name):
            raise ConfigError(f"{name!r} is not a folder; create it or name another one")
        if not os.access(name, os.W_OK | os.X_OK):
            raise ConfigError(f"folder {name!r} is not writable for this user")
        # Several folders may lie on one file system.
        device = os.stat(name).st_dev
        needed[device] = needed.get(device, _SPARE_BYTES) + file_bytes
        space = os.statvfs(name)
        free = space.f_bavail * space.f_frsize
        if free < needed[device]:
            raise BudgetError(
                f"{name}: {format_size(free)} free, {format_size(needed[device])} needed to probe; "
                "give a smaller size or free some space"
            )


@contextmanager
def _target(
    path: str, points: Sequence[Point], file_bytes: int, engine: str, stop: threading.Event
) -> Iterator[_Target]:
    block = max(point.block_bytes for point in points)
    file_bytes = align_down(file_bytes, BLOCK_MULTIPLE)
    flight = max(point.block_bytes * point.depth for point in points)
    settings = StorageConfig(
        engine=engine,  # type: ignore[arg-type]
        request_bytes=max(block, _FILL_BYTES),
        queue_depth=max(point.depth for point in points),
    )
    memory = transfer_memory(max(flight, _NOISE_BYTES))
    noise = os.urandom(_NOISE_BYTES)  # drives may compress anything simpler
    for start in range(0, len(memory), _NOISE_BYTES):
        end = min(start + _NOISE_BYTES, len(memory))
        memory[start:end] = noise[: end - start]
    running, _ = open_engine(settings)
    try:
        running.register(memory)
        file = _probe_file(running, path, file_bytes)
        _fill(running, file, memory, file_bytes, stop)
        yield _Target(path=path, engine=running, file=file, memory=memory, file_bytes=file_bytes)
    finally:
        running.close()
        memory.release()


def _probe_file(engine: Engine, folder: str, size: int) -> DataFile:
    try:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise ConfigError(f"folder {folder!r} takes no file: {error.strerror}; name another one") from error
    os.close(handle)
    try:
        file = engine.open(name)
    finally:
        Path(name).unlink()
    try:
        os.posix_fallocate(file.fd, 0, size)
    except OSError as error:
        raise StorageError("reserve", name, 0, size, error.errno) from error
    return file


def _fill(engine: Engine, file: DataFile, memory: memoryview, size: int, stop: threading.Event) -> None:
    tickets: deque[Ticket] = deque()
    part = max(_FILL_BYTES, align_down(len(memory) // _FILL_AHEAD, BLOCK_MULTIPLE))
    for number, start in enumerate(range(0, size, part)):
        _go_on(stop)
        if len(tickets) == _FILL_AHEAD:
            tickets.popleft().wait(_PATIENCE_SECONDS)
        begin = number % (len(memory) // part) * part
        tickets.append(engine.submit(Op.WRITE, file, start, memory[begin : begin + min(part, size - start)]))
    for ticket in tickets:
        ticket.wait(_PATIENCE_SECONDS)
    engine.sync(file)


class _Stream:
    """Keeps `depth` requests in flight on one target until the time is over.

    Life cycle: `start` submits the first requests; each completion submits the next one, in the engine's own thread,
    until `seconds` have passed, `most_written` is reached, `stop` is set or one has failed; `finish` waits for the
    last. Reads and writes walk through the file in order; with both, each has a half of the file to itself.
    """

    def __init__(
        self, target: _Target, point: Point, seconds: float, most_written: int | None, stop: threading.Event
    ) -> None:
        self.target = target
        self._point, self._seconds = point, seconds
        self._most_written, self._stop = most_written, stop  # bytes, None: no limit; ends it early
        self._lock = threading.Lock()
        """Guards what follows; the engine's threads change it."""
        self._moved = {Op.READ: 0, Op.WRITE: 0}
        """Bytes that were moved."""
        self._next = {Op.READ: 0, Op.WRITE: 0}
        """Number of the next request, which says where in the file it is."""
        self._inflight = 0
        """Slots whose last request has not ended."""
        self._error: InfinityError | None = None
        """The first error. `_on_done` looks at it without the lock, and so may submit one request too many."""
        self._last = 0.0
        """When the last request completed, in seconds of `time.perf_counter`."""
        self._idle = threading.Event()
        """Set when nothing is in flight any more; from then on nothing changes, so `finish` needs no lock."""
        self._began = self._deadline = 0.0
        """When it began, and when no request is submitted any more, in seconds of `time.perf_counter`; set by `start`,
        before there is a request whose completion looks at them."""

    def start(self) -> None:
        """Submit the first requests and return."""
        self._began = time.perf_counter()
        self._deadline = self._began + self._seconds
        slots = range(self._point.depth)
        self._inflight = len(slots)
        for slot in slots:
            self._submit(slot, Op.WRITE if self._writes(slot) else Op.READ)

    def finish(self) -> Measurement:
        """Wait for the end and return the result. Raises `StorageError` or `StallError`."""
        if not self._idle.wait(self._seconds + _PATIENCE_SECONDS):
            raise StallError(f"{self.target.path}: requests of a probe have not completed")
        if self._error is not None:
            raise self._error
        seconds = self._last - self._began
        return Measurement(
            point=self._point,
            read_bytes_per_second=self._moved[Op.READ] / seconds,
            write_bytes_per_second=self._moved[Op.WRITE] / seconds,
            seconds=seconds,
        )

    def _writes(self, slot: int) -> bool:
        return self._point.load is Load.WRITE or (self._point.load is Load.BOTH and slot % 2 == 1)

    def _submit(self, slot: int, op: Op) -> None:
        block = self._point.block_bytes
        with self._lock:
            offset = self._place(op)
        memory = self.target.memory[slot * block : (slot + 1) * block]
        try:
            ticket = self.target.engine.submit(op, self.target.file, offset, memory)
        except InfinityError as error:
            self._end(error)
            return
        ticket.on_done(lambda done: self._on_done(slot, done))

    def _place(self, op: Op) -> int:
        block, both = self._point.block_bytes, self._point.load is Load.BOTH
        half = align_down(self.target.file_bytes // 2, BLOCK_MULTIPLE)
        room = half if both else self.target.file_bytes
        number = self._next[op]
        self._next[op] = number + 1
        return number % (room // block) * block + (half if both and op is Op.WRITE else 0)

    def _on_done(self, slot: int, ticket: Ticket) -> None:
        with self._lock:
            self._last = max(self._last, ticket.completed)
            if ticket.error is None:
                self._moved[ticket.op] += ticket.length
        if ticket.error is not None or ticket.completed >= self._deadline or self._error is not None:
            self._end(ticket.error)
            return
        # With one request in flight, both directions take turns.
        turn = self._point.load is Load.BOTH
        other = Op.READ if ticket.op is Op.WRITE else Op.WRITE
        following = other if turn else ticket.op
        if self._stop.is_set() or (following is Op.WRITE and self._has_written()):
            self._end(None)
        else:
            self._submit(slot, following)

    def _has_written(self) -> bool:
        """Whether another write would be beyond `most_written`; several threads at once may still submit one each."""
        if self._most_written is None:
            return False
        return (self._next[Op.WRITE] + 1) * self._point.block_bytes > self._most_written

    def _end(self, error: InfinityError | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()
