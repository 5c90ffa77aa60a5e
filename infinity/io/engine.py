"""The whole contract of an I/O engine.

An engine moves bytes between memory and (file, offset). Every request has a ticket of its own; whoever
needs the bytes waits for *that* ticket. A ticket completes exactly once: with nothing (every byte moved)
or with a `StorageError` that names operation, path, offset, length and errno. Short transfers are continued
by the engine; a transfer that makes no progress is an error.

Alignment: file offset, length and address must be multiples of `DataFile.alignment` when
`DataFile.direct` is true; the engine checks and raises `ValueError`, it never copies.
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
"""How long closing an engine waits for requests in flight, in seconds."""


class Op(Enum):
    """Direction of a transfer."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class DataFile:
    """An open file that an engine can transfer from and to."""

    path: str
    fd: int
    """Its descriptor, open while the engine's table of files has it."""
    direct: bool
    """Whether transfers go past the page cache (O_DIRECT)."""
    alignment: int
    """Bytes of which offset, length and address of a direct transfer are multiples; 1 where it is not direct."""


@dataclass(eq=False)
class Ticket:
    """One request: what it moves, and how it ended.

    Life cycle: in flight until the engine calls `complete`, exactly once, from any thread; then done, and nothing
    changes any more. Callbacks run in the completing thread, in the order in which they were added; one added after
    completion runs at once in the adding thread.
    """

    op: Op
    path: str
    offset: int
    """In the file, in bytes."""
    length: int
    """Bytes."""
    submitted: float = field(default_factory=time.perf_counter)
    """When it was made, in seconds of `time.perf_counter`."""
    started: float = 0.0
    """When its first bytes were asked of the drive, on the same clock; before that it waits for other requests. 0 until
    then; set by the engine."""
    completed: float = 0.0
    """When it was done, on the same clock; set by `complete`."""
    retries: int = 0
    """Parts that were submitted again after a short or interrupted transfer. Several threads of an engine may add
    without a lock, so one may be lost: it is only reported."""
    error: InfinityError | None = None
    """Why it failed; set by `complete`, before `_done`, so it is there for whoever sees that the transfer has ended."""
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set by `complete`, under `_lock`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Makes sure that a callback that is added while the transfer ends is called, and once."""
    _callbacks: list[Callable[[Ticket], None]] = field(default_factory=list, repr=False)
    """To be called by `complete`; under `_lock`."""

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer has ended.

        Raises:
            StorageError: the transfer failed.
            StallError: `timeout` seconds passed.
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
        """End the transfer (engines only)."""
        with self._lock:
            self.error, self.completed = error, time.perf_counter()
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Engine(Protocol):
    """What an engine does. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """Name in settings, metrics and logs: ``io_uring`` or ``threads``."""

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open a file, or create it with mode 0600, with O_DIRECT where the file system has it.

        Raises:
            StorageError: the file cannot be opened.
        """

    def register(self, memory: memoryview) -> None:
        """Announce the memory that later transfers use (pinned once); that it cannot be pinned only costs speed.

        Raises:
            InfinityError: the engine is closed.
        """

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start moving ``len(memory)`` bytes and return at once. Never blocks on the device.

        Raises:
            ValueError: an empty, negative or misaligned request, memory that is not contiguous, or a read into
                read-only memory.
            StorageError: the file is not open in this engine.
            InfinityError: the engine is closed.
        """

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable (`fdatasync`).

        Raises:
            StorageError: the device refused.
        """

    def forget(self, file: DataFile) -> None:
        """Close a file that has no request in flight."""

    def close(self) -> None:
        """Wait for what is in flight, then release threads, rings and descriptors. Idempotent.

        Raises:
            StallError: requests were still in flight after `CLOSE_SECONDS`; they keep all that they need.
        """
