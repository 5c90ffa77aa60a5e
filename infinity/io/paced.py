"""Engine that limits the rate at which another engine receives requests for the files in a folder.

It is used on drives that several runs share: the node daemon assigns a rate to each run (`infinity.run.pacing`).
Without a rate, requests are forwarded immediately.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from infinity.errors import InfinityError
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.files import PinnedView, join_threads, pin_request

_BURST_SECONDS = 0.1
"""Amount of data that may be transferred at once after an idle period, as seconds at the current rate."""
_LONGEST_SLEEP = 60.0  # seconds; waits must have a finite timeout


@dataclass(eq=False, slots=True)
class _Request:
    """Request that waits to be forwarded. The pacing thread submits it exactly once."""

    ticket: Ticket
    file: DataFile
    memory: memoryview
    pinned: PinnedView


@dataclass(eq=False, slots=True)
class _Bucket:
    """Token bucket of a folder. A request may start unless the number of tokens is negative, and takes one per byte.

    The number of tokens may become negative, so a request larger than the bucket waits only for earlier requests. All
    attributes are guarded by the engine's condition.
    """

    rate: float
    """Number of tokens added per second, which is the rate in bytes per second."""
    tokens: float = 0.0
    """Number of tokens. Negative after a request larger than the available number."""
    filled: float = field(default_factory=time.monotonic)
    """Time at which tokens were last added, from `time.monotonic`."""
    waiting: deque[_Request] = field(default_factory=deque)
    """Waiting requests in order of arrival."""

    def seconds_left(self, now: float) -> float:
        """Add the tokens accrued since the last call. Return the seconds until the next request may start, or 0."""
        self.tokens = min(self.tokens + (now - self.filled) * self.rate, self.rate * _BURST_SECONDS)
        self.filled = now
        return max(0.0, -self.tokens / self.rate)


class PacedEngine:
    """Forwards requests to another engine. Requests for a folder with a rate may have to wait.

    Life cycle: initially there are no rates and no thread. The first rate starts the pacing thread. When the rate of
    a folder is removed, its waiting requests are forwarded at once. `close` removes all rates, ends the thread, and
    closes the other engine, which completes its requests.

    If the other engine rejects a request that has waited, the ticket of the request reports the error.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        """Guards the attributes below. Notified when there may be work for the pacing thread."""
        self._buckets: dict[str, _Bucket] = {}
        """Token bucket for each folder. The dict is replaced, never modified, so `submit` can read it without the
        lock.
        """
        self._released: deque[_Request] = deque()
        """Requests that were waiting when the rate of their folder was removed."""
        self._thread: threading.Thread | None = None
        """Thread that forwards waiting requests. Started with the first rate."""
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the engine that transfers the data."""
        return self._engine.name

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open or create a file. Raises `StorageError`."""
        return self._engine.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        """Register memory with the engine that transfers the data."""
        self._engine.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Forward a transfer, immediately or later. Raises `ValueError` (misaligned or empty) or `InfinityError`."""
        if not self._buckets or (folder := os.path.dirname(file.path)) not in self._buckets:
            return self._engine.submit(op, file, offset, memory)
        pinned = pin_request(op, file, offset, memory)
        ticket = Ticket(op, file.path, offset, pinned.length)
        with self._changed:
            bucket = self._buckets.get(folder)
            if bucket is not None:
                bucket.waiting.append(_Request(ticket, file, memory, pinned))
                self._changed.notify()
                return ticket
        pinned.release()  # the rate has just been removed
        return self._engine.submit(op, file, offset, memory)

    def pace(self, rates: Mapping[str, float]) -> None:
        """Set the rates of folders. Folders that are not listed have no limit. Does nothing after `close`.

        Args:
            rates: bytes per second for each folder, greater than 0. The rate covers all files in the folder, and
                reads and writes together.
        """
        with self._changed:
            if self._closed or (not rates and not self._buckets):
                return
            buckets = {}
            for folder, rate in rates.items():
                bucket = buckets[folder] = self._buckets.get(folder) or _Bucket(rate)
                bucket.seconds_left(time.monotonic())  # tokens up to now accrue at the old rate
                bucket.rate = rate
            for folder in self._buckets.keys() - rates.keys():
                self._released.extend(self._buckets[folder].waiting)
            self._buckets = buckets
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infinity-io-pace", daemon=True)
                self._thread.start()
            self._changed.notify()

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable. Raises `StorageError`."""
        self._engine.sync(file)

    def forget(self, file: DataFile) -> None:
        """Close a file that has no requests in flight."""
        self._engine.forget(file)

    def close(self) -> None:
        """Forward and complete waiting requests, then close the other engine. Idempotent. Raises `StallError`."""
        self.pace({})
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            join_threads([self._thread])
        self._engine.close()

    def _run(self) -> None:
        while (due := self._due()) is not None:
            while due:
                ticket, moved = self._hand_on(due.popleft())
                # Keep no reference to the request here, so that its memory can be freed when the transfer has ended.
                if moved is not None:
                    moved.on_done(partial(_end, ticket))

    def _due(self) -> deque[_Request] | None:
        """Wait until requests may start, and return them. Return ``None`` after `close`, when no request waits."""
        with self._changed:
            while True:
                due, self._released = self._released, deque()
                sleep: float | None = None
                for bucket in self._buckets.values():
                    while bucket.waiting:
                        left = bucket.seconds_left(time.monotonic())
                        if left > 0:
                            sleep = left if sleep is None else min(sleep, left)
                            break
                        request = bucket.waiting.popleft()
                        bucket.tokens -= request.ticket.length
                        due.append(request)
                        del request
                if due:
                    return due
                if self._closed:
                    return None
                self._changed.wait(None if sleep is None else min(sleep, _LONGEST_SLEEP))

    def _hand_on(self, request: _Request) -> tuple[Ticket, Ticket | None]:
        ticket = request.ticket
        try:
            return ticket, self._engine.submit(ticket.op, request.file, ticket.offset, request.memory)
        # on the pacing thread: the ticket must report the error, because its waiter would otherwise block forever
        except Exception as error:
            failed = error if isinstance(error, InfinityError) else InfinityError(repr(error))
            failed = failed.with_traceback(None)  # its frames refer to the request's memory
        finally:
            request.pinned.release()
        ticket.complete(failed)
        return ticket, None


def _end(ticket: Ticket, moved: Ticket) -> None:
    ticket.retries = moved.retries
    ticket.complete(moved.error)
