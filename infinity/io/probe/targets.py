"""Targets of measurements: validation of folders, and the file, memory and engine for each of them.

A file is unlinked as soon as it is open, so no file is left behind even after a crash.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.config import StorageConfig
from infinity.errors import BudgetError, ConfigError, StorageError
from infinity.hugepages import transfer_memory
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.probe.points import BLOCK_MULTIPLE, Point, ProbeStoppedError
from infinity.io.select import open_engine
from infinity.units import MIB, align_down, format_size

PATIENCE_SECONDS = 120.0
"""Maximum time, in seconds, that a drive may take for one request."""
_NOISE_BYTES = 8 * MIB
_FILL_BYTES = MIB
_SPARE_BYTES = 16 * MIB  # left free for file system metadata
_FILL_AHEAD = 8  # number of writes in flight while a file is filled
PREFIX = ".infinity-probe-"
"""Start of the names of test files, which have a name only until they are open."""
_OLD_SECONDS = 60.0
"""Age, in seconds, from which a file that still has a name counts as abandoned. A live measurement unlinks its file
at once.
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Folder to measure: its engine, its file of `file_bytes`, and memory for all requests in flight."""

    path: str
    engine: Engine
    file: DataFile
    memory: memoryview
    file_bytes: int


def check_targets(names: Sequence[str], points: Sequence[Point], file_bytes: int, engine: str) -> None:
    """Check that the folders can be measured, before any file is created.

    Raises:
        ConfigError: if a folder does not exist or is not writable, or if a size is too small.
        BudgetError: if there is too little free space.
    """
    if not names:
        raise ConfigError("no folder to probe; specify at least one")
    if len({os.path.realpath(name) for name in names}) != len(names):
        raise ConfigError(f"the same folder is listed twice: {', '.join(names)}")
    if engine not in ("auto", "io_uring", "threads"):
        raise ConfigError(f"engine = {engine!r} is not one of 'auto', 'io_uring', 'threads'")
    least = 2 * max(point.flight for point in points)
    if file_bytes < least:
        raise ConfigError(
            f"size = {format_size(file_bytes)} is too small: it must be at least twice the bytes in flight, which is "
            f"{format_size(least)}. Use a larger size, smaller blocks or a smaller depth."
        )
    needed: dict[int, int] = {}
    for name in names:
        if not os.path.isdir(name):
            raise ConfigError(f"{name!r} is not a folder. Create it or use a different one.")
        if not os.access(name, os.W_OK | os.X_OK, effective_ids=True):
            raise ConfigError(f"folder {name!r} is not writable by this user")
        # Several folders may share a file system.
        device = os.stat(name).st_dev
        needed[device] = needed.get(device, _SPARE_BYTES) + file_bytes
        free = free_space(name)
        if free < needed[device]:
            raise BudgetError(
                f"{name}: {format_size(free)} free, {format_size(needed[device])} needed for the probe. Use a smaller "
                "size or free some space."
            )


def free_space(folder: str) -> int:
    """Return the number of bytes on a folder's file system that are available to this user."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


@contextmanager
def open_target(
    path: str, points: Sequence[Point], file_bytes: int, engine: str, stop: threading.Event, *, fill: bool = True
) -> Iterator[Target]:
    """Create a file with reserved space in a folder. With `fill`, write all of it, so that reads reach the drive.

    Raises:
        ProbeStoppedError: if `stop` was set.
        ConfigError: if a file cannot be created in the folder.
        StorageError: if a transfer failed.
        StallError: if a drive did not respond.
    """
    block = max(point.block_bytes for point in points)
    file_bytes = align_down(file_bytes, BLOCK_MULTIPLE)
    flight = max(point.flight for point in points)
    settings = StorageConfig(
        engine=engine,  # type: ignore[arg-type]
        request_bytes=max(block, _FILL_BYTES),
        queue_depth=max(point.depth for point in points),
    )
    memory = transfer_memory(max(flight, _NOISE_BYTES))
    noise = os.urandom(_NOISE_BYTES)  # random, because drives may compress regular data
    for start in range(0, len(memory), _NOISE_BYTES):
        end = min(start + _NOISE_BYTES, len(memory))
        memory[start:end] = noise[: end - start]
    running = open_engine(settings)
    try:
        running.register(memory)
        file = _probe_file(running, path, file_bytes)
        if fill:
            _fill(running, file, memory, file_bytes, stop)
        yield Target(path=path, engine=running, file=file, memory=memory, file_bytes=file_bytes)
    finally:
        running.close()
        memory.release()


def remove_left_over(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove the files of measurements that were killed between creating and unlinking them. Return their paths.

    Raises:
        OSError: if the folder cannot be read.
    """
    removed = []
    for path in left_over(folder):
        with suppress(OSError):  # owned by another user, or already removed
            path.unlink()
            removed.append(path)
    return removed


def left_over(folder: str | os.PathLike[str]) -> list[Path]:
    """Return this user's files of measurements that were killed between creating and unlinking them.

    Raises:
        OSError: if the folder cannot be read.
    """
    found = []
    for path in Path(folder).iterdir():
        with suppress(OSError):  # already removed
            about = path.lstat()
            own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            if own and path.name.startswith(PREFIX) and time.time() - about.st_mtime >= _OLD_SECONDS:
                found.append(path)
    return found


def go_on(stop: threading.Event) -> None:
    """Raise `ProbeStoppedError` if `stop` is set."""
    if stop.is_set():
        raise ProbeStoppedError("the measurement was stopped")


def _probe_file(engine: Engine, folder: str, size: int) -> DataFile:
    try:
        handle, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        raise ConfigError(f"cannot create a file in {folder!r}: {error.strerror}. Use a different folder.") from error
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
        go_on(stop)
        if len(tickets) == _FILL_AHEAD:
            tickets.popleft().wait(PATIENCE_SECONDS)
        begin = number % (len(memory) // part) * part
        tickets.append(engine.submit(Op.WRITE, file, start, memory[begin : begin + min(part, size - start)]))
    for ticket in tickets:
        ticket.wait(PATIENCE_SECONDS)
    engine.sync(file)
