"""Engine that limits the rate at which another engine receives requests for the files of a folder.

It serves drives that several jobs share: the daemon of the node assigns a rate to each job (`infinity.run.pacing`).
Without a rate, requests pass through immediately.
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
"""Amount that an idle file may transfer at once, in seconds of its rate."""
_LONGEST_SLEEP = 60.0  # seconds; waits have a maximum timeout


@dataclass(eq=False, slots=True)
class _Request:
    """Request that waits for its turn. The pacing thread submits it exactly once."""

    ticket: Ticket
    file: DataFile
    memory: memoryview
    pinned: PinnedView


@dataclass(eq=False, slots=True)
class _Bucket:
    """Token bucket of a folder. A request may start while there is a token, and takes one token per byte.

    The number of tokens may become negative, so a request larger than the bucket waits only for its predecessors. All
    attributes are guarded by the engine's condition.
    """

    rate: float
    """Tokens added per second, i.e. bytes per second."""
    tokens: float = 0.0
    """Number of tokens. Negative after a request that exceeded them."""
    filled: float = field(default_factory=time.monotonic)
    """Time at which tokens were last added, in seconds of `time.monotonic`."""
    waiting: deque[_Request] = field(default_factory=deque)
    """Requests in order of arrival."""

    def seconds_left(self, now: float) -> float:
        """Add the tokens since the last call. Return the seconds until the next request may start, or 0."""
        self.tokens = min(self.tokens + (now - self.filled) * self.rate, self.rate * _BURST_SECONDS)
        self.filled = now
        return max(0.0, -self.tokens / self.rate)


class PacedEngine:
    """Forwards requests to another engine. Requests for a folder with a rate wait for their turn.

    Life cycle: initially *open*, without rates and without a thread. The first rate starts the pacing thread. When the
    rate of a folder is removed, its waiting requests are forwarded at once. `close` removes all rates, ends the
    thread, and closes the other engine, which completes its requests.

    If the other engine rejects a request after its wait, the error is reported by the ticket of the request.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        """Guards the following attributes. Notified when the pacing thread may have work."""
        self._buckets: dict[str, _Bucket] = {}
        """Token bucket by folder. The dict is replaced, never modified, so `submit` can read it without the lock."""
        self._released: deque[_Request] = deque()
        """Requests that waited for a rate that has been removed."""
        self._thread: threading.Thread | None = None
        """Thread that forwards waiting requests. Started with the first rate."""
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the engine that transfers the bytes."""
        return self._engine.name

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open or create a file. Raises `StorageError`."""
        return self._engine.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        """Register memory with the engine that transfers the bytes."""
        self._engine.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Forward a transfer, now or after its wait. Raises `ValueError` (misaligned, empty) or `InfinityError`."""
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
        """Set the rates of folders; all other folders have no limit. Does nothing after `close`.

        Args:
            rates: Bytes per second by folder, greater than 0, for all files and both directions together.
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
        """Close a file that has no request in flight."""
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
                # No reference to the request is left here, so that its memory can be freed when the transfer has ended.
                if moved is not None:
                    moved.on_done(partial(_end, ticket))

    def _due(self) -> deque[_Request] | None:
        """Wait until requests may start and return them. Return ``None`` at the end."""
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
        """Return the ticket of a request, and the ticket of the other engine if it accepts the request."""
        ticket = request.ticket
        try:
            return ticket, self._engine.submit(ticket.op, request.file, ticket.offset, request.memory)
        except Exception as error:  # on the pacing thread: the ticket must report it, or its waiter would block forever
            failed = error if isinstance(error, InfinityError) else InfinityError(repr(error))
            failed = failed.with_traceback(None)  # because its frames refer to the request's memory
        finally:
            request.pinned.release()
        ticket.complete(failed)
        return ticket, None


def _end(ticket: Ticket, moved: Ticket) -> None:
    ticket.retries = moved.retries
    ticket.started = ticket.submitted  # the wait for the rate counts as time of the drive
    ticket.complete(moved.error)
