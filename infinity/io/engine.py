"""Interface of I/O engines.

An engine transfers bytes between memory and (file, offset). Every request has its own ticket, and a caller that needs
the bytes waits for that ticket. A ticket completes exactly once: either without an error, after every byte has been
transferred, or with a `StorageError` that names the operation, path, offset, length and errno. The engine continues
short transfers. A transfer that makes no progress is an error.

If `DataFile.direct` is true, file offset, length and address must be multiples of `DataFile.alignment`. The engine
checks this and raises `ValueError`; it never copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from infinity.errors import InfinityError, StallError

CLOSE_SECONDS = 10.0
"""Seconds that closing an engine waits for requests in flight."""


class Op(Enum):
    """Direction of a transfer."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class DataFile:
    """Open file of an engine."""

    path: str
    fd: int
    """Descriptor. It stays open as long as the file is in the engine's table of files."""
    direct: bool
    """``True`` if transfers bypass the page cache (O_DIRECT)."""
    alignment: int
    """Alignment of offset, length and address of direct transfers in bytes; 1 if the file is not direct."""


@dataclass(eq=False)
class Ticket:
    """State of one request.

    Life cycle: a ticket is in flight until the engine calls `complete`, exactly once, from any thread. Afterwards it
    does not change. Callbacks run in the completing thread in the order in which they were added. A callback that is
    added after completion runs immediately in the adding thread.
    """

    op: Op
    path: str
    offset: int
    """Offset in the file in bytes."""
    length: int
    """Length in bytes."""
    submitted: float = field(default_factory=time.perf_counter)
    """Time of submission, in seconds of `time.perf_counter`."""
    started: float = 0.0
    """Time at which the first bytes were requested from the drive, on the same clock. Until then the request waits for
    other requests, and the value is 0. Set by the engine."""
    completed: float = 0.0
    """Time of completion, on the same clock. Set by `complete`."""
    retries: int = 0
    """Number of parts that were resubmitted after a short or interrupted transfer. Threads of an engine update it
    without a lock, so an increment may be lost. The value is only reported."""
    error: InfinityError | None = None
    """Error of the transfer. Set by `complete` before `_done`, so it is visible to every thread that sees the end."""
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set by `complete`, under `_lock`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Ensures that a callback that is added during completion is called exactly once."""
    _callbacks: list[Callable[[Ticket], None]] = field(default_factory=list, repr=False)
    """Callbacks for `complete`. Guarded by `_lock`."""

    @property
    def done(self) -> bool:
        """``True`` if the transfer has ended, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer has ended.

        Raises:
            StorageError: if the transfer failed.
            StallError: if it has not ended after `timeout` seconds.
        """
        if not self._done.wait(timeout):
            raise StallError(
                f"{self.op.value} of {self.length} bytes at offset {self.offset} of {self.path} has not "
                f"completed after {time.perf_counter() - self.submitted:.1f} s"
            )
        if self.error is not None:
            raise self.error

    def on_done(self, callback: Callable[[Ticket], None]) -> None:
        """Call `callback(ticket)` when the transfer has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def complete(self, error: InfinityError | None = None) -> None:
        """End the transfer. Called only by engines."""
        with self._lock:
            # The error is set before the event: a thread that sees the end must also see the error.
            self.error, self.completed = error, time.perf_counter()
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Engine(Protocol):
    """I/O engine. All methods are thread-safe."""

    @property
    def name(self) -> str:
        """Name in settings, metrics and logs: ``io_uring`` or ``threads``."""

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open a file with O_DIRECT if its file system supports it. With `create`, create it with mode 0600.

        Raises:
            StorageError: if the file cannot be opened.
        """

    def register(self, memory: memoryview) -> None:
        """Register memory that later transfers use, so that it is pinned once. A failure only reduces speed.

        Raises:
            InfinityError: if the engine is closed.
        """

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer of ``len(memory)`` bytes and return immediately. Never blocks on the device.

        Raises:
            ValueError: if the request is empty, negative or misaligned, if the memory is not contiguous, or if a read
                has read-only memory as its target.
            StorageError: if the file is not open in this engine.
            InfinityError: if the engine is closed.
        """

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable (`fdatasync`).

        Raises:
            StorageError: if the device fails.
        """

    def forget(self, file: DataFile) -> None:
        """Close a file that has no request in flight."""

    def close(self) -> None:
        """Wait for requests in flight, then release threads, rings and descriptors. Idempotent.

        Raises:
            StallError: if requests are still in flight after `CLOSE_SECONDS`. They keep the resources that they need.
        """
