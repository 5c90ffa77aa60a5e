"""Reads and writes of pages that are in flight, what waits for them, and the first thing that went wrong.

[Note: the one lock] All that the pager knows (here and in `CacheSlots`, `Cache`, `Cursor`, reservations) is read and
changed
under one lock, `Transfers.lock`. Who takes it: the training thread, the thread of updates, those that copy to a device
and wait for its copies, the one that listens to other ranks, and the store's threads when a transfer ends. A thread may
take it again: a read may have ended before `read` of the store returns. Content is never copied under it, and no device
is waited for: see `Copies`.

[Note: late ranks] The time limit is for what this rank does: for transfers, and for updates, which wait for nothing
else. An update that needs a whole parameter also waits for other ranks, which may be late by as much as they like: one
that fails, hung drive or not, ends this rank by its own report. While one is in an exchange, a wait for an update, or
for a cache slot, which an update may hold, is out of time only where transfers are in flight of which none has ended
for as
long as the limit. Behind the exchange such a wait has the whole limit again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Protocol

from infinity import interrupts
from infinity.deadline import wait_a_while
from infinity.errors import StallError

_LAST_SECONDS = 5.0
"""How long `drain` waits after a failure, in seconds."""
_WAITS = {
    "read": "a page to be read",
    "write": "a page to be written",
    "host_cache": "a free cache slot of the host cache",
    "update": "the update of a page",
    "copy": "the device to copy a page",
}
_HELD_UP = frozenset({"update", "host_cache"})
"""What an update in an exchange holds up."""


class PageReaderWriter(Protocol):
    """What the pager needs of a store. Called under the lock, but for `expect_gradients`.

    A transfer ends with one call of `done`, from any thread: with what went wrong, or None. Until then its `memory`, as
    long as the page, belongs to the store: the pager changes none of it, and of a read looks at none of it.
    """

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Start to fetch and verify a page that there is a version of."""

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Start to store a page; the version that there was is replaced when that has ended well."""

    def discard(self, page: int) -> None:
        """Forget the stored version of a page, if there is one."""

    def has(self, page: int) -> bool:
        """Whether a version is stored."""

    def expect_gradients(self, stored: bool) -> None:
        """Have room for all gradients if each step stores them; not under the lock. Raises what keeps it from that."""

    def oldest_request(self) -> tuple[float, str] | None:
        """Return since when the oldest request is in flight (`time.perf_counter`) and what it is, if there is one."""


class PagerObserver(Protocol):
    """Who is told what the pager did (telemetry); always under the lock."""

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """The training thread waited.

        Args:
            cause: ``read``, ``write``, ``host_cache``, ``update`` or ``copy``.
            page: what it needed, or -1.
        """

    def fetched(self, result: str) -> None:
        """A page was needed; `result` is ``hit``, ``late`` or ``miss``."""

    def moving(self, seconds: float) -> None:
        """Pages have been on their way for so much longer; from any thread, one at a time."""

    def spared(self, nbytes: int) -> None:
        """A planned read was not needed: the page comes back while it is still being written."""

    def diverged(self, detail: str) -> None:
        """The step departed from the plan's trace."""

    def gave_up(self, op: str, error: Exception) -> None:
        """A transfer (`op` is ``read`` or ``write``) was waited for longer than the time limit; from any thread."""


class _Lock(Condition):
    """Holds Ctrl-C back: the lock would stay taken, or what it guards be half changed."""

    def __enter__(self) -> bool:
        interrupts.begin()
        try:
            return super().__enter__()
        except BaseException:
            interrupts.end()
            raise

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[arg-type]
        interrupts.end()


class Transfers:
    """Starts and counts transfers, and waits for whatever a completion can bring about.

    Every attribute is read and changed under `lock`, by any thread. Life cycle: it works until the first error, which
    `failed` is told once, from any thread. From then on `check` and `wait` raise that error, and what waits does so at
    once; transfers in flight still end, so that cache slots are not used again under them.

    Args:
        observer: is told of waits and of the time in which something is in flight.
        timeout: seconds after which a wait is an error.
        failed: is told of the first error, once, from any thread and under the lock; it must not wait.
    """

    def __init__(
        self,
        observer: PagerObserver,
        *,
        timeout: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self._observer, self._timeout, self._failed = observer, timeout, failed
        self._stores: list[PageReaderWriter] = []
        """Stores that pages have been moved of; asked for the oldest request where something takes too long."""
        self.lock: Condition = _Lock()
        """The one lock; notified whenever something ends that may be waited for."""
        self.reads = 0
        """Pages that are being read."""
        self.writes = 0
        """Pages that are being written."""
        self._moving_since = 0.0
        """When the time was last reported in which something is in flight, in seconds of `time.perf_counter`."""
        self._exchanging = False
        """Whether an update waits for other ranks. [Note: late ranks]"""
        self._exchanged = 0.0
        """When one did last, in seconds of `time.perf_counter`."""
        self.failure: Exception | None = None
        """The first error; never cleared. Looked at without the lock, too."""

    def read(
        self, store: PageReaderWriter, page: int, memory: memoryview, then: Callable[[Exception | None], None]
    ) -> None:
        """Start reading a page of a store; `then` is called under the lock at the end, with what went wrong."""
        self._begin(store)
        self.reads += 1

        def done(error: Exception | None) -> None:
            with self.lock:
                self._report_moving()
                self.reads -= 1
                self._end(error, then)

        store.read(page, memory, done)

    def write(
        self, store: PageReaderWriter, page: int, memory: memoryview, then: Callable[[Exception | None], None]
    ) -> None:
        """Start writing a page of a store; `then` is called under the lock at the end, with what went wrong."""
        self._begin(store)
        self.writes += 1

        def done(error: Exception | None) -> None:
            with self.lock:
                self._report_moving()
                self.writes -= 1
                self._end(error, then)

        store.write(page, memory, done)

    def _begin(self, store: PageReaderWriter) -> None:
        self._report_moving()
        if store not in self._stores:
            self._stores.append(store)

    def _end(self, error: Exception | None, then: Callable[[Exception | None], None]) -> None:
        if error is not None:
            self.fail(error)
        then(error)
        self.lock.notify_all()

    def _report_moving(self) -> None:
        """Report for how long pages have been on their way, before their number changes."""
        now = time.perf_counter()
        if self.reads or self.writes:
            self._observer.moving(now - self._moving_since)
        self._moving_since = now

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool], cause: str, page: int, *, threaded: bool = False) -> None:
        """Wait until `ready()`, which is asked under the lock after every notification.

        While an update waits for other ranks, what it holds up does not count. [Note: late ranks]

        Args:
            cause: what is waited for: ``read``, ``write``, ``host_cache``, ``update`` or ``copy``.
            page: what is needed, or -1.
            threaded: whether this is not the training thread, so that it is no stall.

        Raises:
            StallError: it took longer than the time limit.
            Exception: the first error, if there was one, before or meanwhile.
        """
        self.check()
        if ready():
            return
        started = time.perf_counter()
        finished = self._wait(lambda: ready() or self.failure is not None, held_up=cause in _HELD_UP)
        if not threaded:
            self._observer.stalled(cause, page, time.perf_counter() - started)
        self.check()
        if not finished:
            hung = self._exchanging and cause in _HELD_UP
            what = "any page to be read or written" if hung else _WAITS[cause]
            error = StallError(f"waited {self._timeout:.0f} s for {what}; {self._oldest_request()}")
            if self.reads or self.writes:
                self._observer.gave_up("read" if cause == "read" or not self.writes else "write", error)
            self.fail(error)
            self.check()

    def _oldest_request(self) -> str:
        requests = [request for store in self._stores if (request := store.oldest_request()) is not None]
        return min(requests)[1] if requests else "no request is in flight"

    def _wait(self, ended: Callable[[], bool], *, held_up: bool) -> bool:
        """Wait until `ended()`; return False if the time limit passes before."""
        since = time.perf_counter()
        while not ended():
            if held_up and self._exchanging:
                since = max(since, self._moving_since) if self.reads or self.writes else time.perf_counter()
            elif held_up:
                since = max(since, self._exchanged)
            left = since + self._timeout - time.perf_counter()
            if left <= 0:
                return False
            since += wait_a_while(self.lock, left)
            interrupts.check()
        return True

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Let an update wait for other ranks in the body; of the thread that runs updates. [Note: late ranks]"""
        with self.lock:
            self._exchanging = True
        try:
            yield
        finally:
            with self.lock:
                self._exchanging, self._exchanged = False, time.perf_counter()

    def fail(self, error: Exception) -> None:
        """Note the first error, and let everything that waits raise it."""
        if self.failure is None:
            self.failure = error
            self._failed(error)
        self.lock.notify_all()

    def drain(self, ended: Callable[[], bool]) -> None:
        """Wait until nothing is in flight and `ended()`, after a failure a moment only; raises nothing."""
        timeout = self._timeout if self.failure is None else min(self._timeout, _LAST_SECONDS)
        until = time.perf_counter() + timeout
        while (self.writes or self.reads or not ended()) and (left := until - time.perf_counter()) > 0:
            until += wait_a_while(self.lock, left)
            interrupts.check()

    def leave_to_parent(self, error: Exception) -> None:
        """In a child that was forked: take a new lock, and let every call raise `error`. Not under the lock."""
        # A thread of the parent may have held the lock when it forked; it is not here to give it back.
        self.lock = _Lock()
        self.failure = error
