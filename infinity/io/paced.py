"""An engine in front of another one, which hands requests on as fast as the files of a folder are allowed to be moved.

For drives that several jobs share: the node's daemon tells each of them how fast it may go (`infinity.run.pacing`). As
long as nothing is told, requests pass through at once.
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
"""How much of its rate a file that was idle may move at once."""
_LONGEST_SLEEP = 60.0  # seconds; a clock has a largest time to wait


@dataclass(eq=False, slots=True)
class _Request:
    """A request that waits for its turn; handed on once, by the pacing thread."""

    ticket: Ticket
    file: DataFile
    memory: memoryview
    pinned: PinnedView


@dataclass(eq=False, slots=True)
class _Bucket:
    """The token bucket of a folder: a request may go when there is a token, and takes one per byte, also those to come.

    So a request larger than the bucket waits for no more than its predecessors. All under the engine's condition.
    """

    rate: float
    """Tokens that come per second: bytes per second."""
    tokens: float = 0.0
    """Below 0 where requests have gone ahead of their time."""
    filled: float = field(default_factory=time.monotonic)
    """When tokens were last added, in seconds of `time.monotonic`."""
    waiting: deque[_Request] = field(default_factory=deque)
    """In the order in which they came."""

    def seconds_left(self, now: float) -> float:
        """Add what has come since the last time; return the seconds until the next request may go, 0 for now."""
        self.tokens = min(self.tokens + (now - self.filled) * self.rate, self.rate * _BURST_SECONDS)
        self.filled = now
        return max(0.0, -self.tokens / self.rate)


class PacedEngine:
    """Hands requests on to another engine; those of files in a folder that has a rate wait until they may go.

    Life cycle: *open*, without rates and without a thread; the first rate starts the pacing thread. A folder whose rate
    is taken back has what waits handed on at once. `close` takes back all rates, ends the thread, and closes the other
    engine, which completes what it was handed.

    What the other engine refuses when a request's turn has come is the error of its ticket.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        """Lock of what follows; notified when the pacing thread may have to do something else than sleep."""
        self._buckets: dict[str, _Bucket] = {}
        """By folder of the files. Replaced and not changed, so that `submit` looks without the lock."""
        self._released: deque[_Request] = deque()
        """What waited for a rate that was taken back."""
        self._thread: threading.Thread | None = None
        """Hands on what has waited; started with the first rate."""
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the engine that moves the bytes."""
        return self._engine.name

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open (or create) a file. Raises `StorageError`."""
        return self._engine.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        """Announce memory to the engine that moves the bytes."""
        self._engine.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Hand a transfer on, now or when it may go. Raises `ValueError` (misaligned, empty) or `InfinityError`."""
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
        pinned.release()  # the rate was taken back just now
        return self._engine.submit(op, file, offset, memory)

    def pace(self, rates: Mapping[str, float]) -> None:
        """Set the bytes per second of the files in a folder, above 0, all together and both ways; others have no limit.

        After `close`, nothing happens.
        """
        with self._changed:
            if self._closed or (not rates and not self._buckets):
                return
            buckets = {}
            for folder, rate in rates.items():
                bucket = buckets[folder] = self._buckets.get(folder) or _Bucket(rate)
                bucket.seconds_left(time.monotonic())  # what has come so far has come at the old rate
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
        """Hand on what waits, complete it, then close the other engine. Idempotent. Raises `StallError`."""
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
                # Here nothing of the request is referred to any more: its memory may be freed when it has ended.
                if moved is not None:
                    moved.on_done(partial(_end, ticket))

    def _due(self) -> deque[_Request] | None:
        """Wait until requests may go, and return them; None at the end."""
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
        """Return the ticket of a request, and that of the other engine, if it takes the request."""
        ticket = request.ticket
        try:
            return ticket, self._engine.submit(ticket.op, request.file, ticket.offset, request.memory)
        except Exception as error:  # this runs on a thread of its own: whoever waits must hear of it
            failed = error if isinstance(error, InfinityError) else InfinityError(repr(error))
            failed = failed.with_traceback(None)  # whose cache slots refer to the request's memory
        finally:
            request.pinned.release()
        ticket.complete(failed)
        return ticket, None


def _end(ticket: Ticket, moved: Ticket) -> None:
    ticket.retries = moved.retries
    ticket.started = ticket.submitted  # it waited for this drive's rate, and for nothing else
    ticket.complete(moved.error)
