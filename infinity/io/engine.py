"""Interface of I/O engines.

An engine transfers bytes between memory and a range of a file. Every request has its own ticket, and a caller that
needs the bytes waits for this ticket. A ticket completes exactly once: either without an error, after every byte has
been transferred, or with a `StorageError` that contains the operation, path, offset, length and errno. The engine
continues partial transfers. A transfer that makes no progress is an error.

If `DataFile.direct` is ``True``, file offset, length and memory address must be multiples of `DataFile.alignment`.
Otherwise the engine raises `ValueError`; it never copies data to satisfy the alignment.
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
"""Time, in seconds, that `Engine.close` waits for requests in flight."""


class Op(Enum):
    """Direction of a transfer."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class DataFile:
    """File that is open in an engine."""

    path: str
    fd: int
    """File descriptor. It stays open as long as the file is in the engine's file table."""
    direct: bool
    """``True`` if transfers bypass the page cache (O_DIRECT)."""
    alignment: int
    """Required alignment, in bytes, for offset, length and memory address of direct transfers; 1 if the file is not
    direct.
    """


@dataclass(eq=False)
class Ticket:
    """State of one request.

    Life cycle: a ticket is in flight until the engine calls `complete`, exactly once, from any thread. Afterwards it
    does not change. Callbacks run on the completing thread, in the order in which they were added. A callback that is
    added after completion runs immediately on the adding thread.
    """

    op: Op
    path: str
    offset: int
    """Offset in the file, in bytes."""
    length: int
    """Length in bytes."""
    submitted: float = field(default_factory=time.perf_counter)
    """Time of submission, from `time.perf_counter`."""
    completed: float = 0.0
    """Time of completion, from `time.perf_counter`. Set by `complete`."""
    retries: int = 0
    """Number of parts that were resubmitted after a partial or interrupted transfer. The threads of an engine update
    it without a lock, so an increment may be lost. It is used only for reports.
    """
    error: InfinityError | None = None
    """Error of the transfer. `complete` sets it before `_done`, so every thread that sees the completion also sees
    the error.
    """
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set by `complete`, under `_lock`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Ensures that a callback that is added during completion is called exactly once."""
    _callbacks: list[Callable[[Ticket], None]] = field(default_factory=list, repr=False)
    """Callbacks to call on completion. Guarded by `_lock`."""

    @property
    def done(self) -> bool:
        """``True`` if the transfer has ended, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the transfer has ended.

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
        """End the transfer. Only engines call this method."""
        with self._lock:
            # The error is set before the event: a thread that sees the completion must also see the error.
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
        """Open a file, with O_DIRECT if its file system supports it. With `create`, create it with mode 0600.

        Raises:
            StorageError: if the file cannot be opened.
        """

    def register(self, memory: memoryview) -> None:
        """Register memory that later transfers use, so that it is pinned only once.

        If the operating system does not allow this, transfers are slower.

        Raises:
            InfinityError: if the engine is closed.
        """

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer of ``len(memory)`` bytes and return immediately. Never blocks on the device.

        Raises:
            ValueError: if the request is empty or misaligned, if the offset is negative, if the memory is not
                contiguous, or if the memory for a read is read-only.
            StorageError: if the file is not open in this engine.
            InfinityError: if the engine is closed.
        """

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable (`fdatasync`).

        Raises:
            StorageError: if the device fails.
        """

    def forget(self, file: DataFile) -> None:
        """Close a file that has no requests in flight."""

    def close(self) -> None:
        """Wait for requests in flight, then release threads, rings and descriptors. Idempotent.

        Raises:
            StallError: if requests are still in flight after `CLOSE_SECONDS`. The resources that they use are not
                released.
        """
