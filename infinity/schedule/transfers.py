"""Reads and writes of pages that are in flight, the waits for them, and the first error.

[Note: the one lock] The whole state of the pager (here and in `CacheSlots`, `Cache`, `Cursor` and reservations) is read
and changed under one lock, `Transfers.lock`. The following threads take it: the training thread, the update thread, the
threads that copy to a device and wait for its copies, the thread that listens to other ranks, and the threads of the
store when a transfer ends. The lock is reentrant, because a read may end before `read` of the store returns. No thread
copies content or waits for a device under the lock: see `Copies`.

[Note: late ranks] The time limit applies to operations of this rank: to transfers, and to updates, which depend on no
other rank. The exception is an update that needs a full parameter. It also waits for other ranks, which may be late by
any amount of time: a rank that fails, whether or not its drive hangs, ends this rank by its own report. During such an
exchange, a wait for an update, or for a cache slot that an update may hold, times out only if transfers are in flight
and none of them has ended within the time limit. After the exchange, such a wait has the whole time limit again.
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
"""Seconds that `drain` waits after a failure."""
_WAITS = {
    "read": "a page to be read",
    "write": "a page to be written",
    "host_cache": "a free cache slot of the host cache",
    "update": "the update of a page",
    "copy": "the device to copy a page",
}
_HELD_UP = frozenset({"update", "host_cache"})
"""Causes of waits that an update in an exchange delays."""


class PageReaderWriter(Protocol):
    """Store, as the pager uses it. Every method except `expect_gradients` is called under the lock.

    A transfer ends with one call of `done`, from any thread, with an error or ``None``. Until then, its `memory`, which
    is as long as the page, belongs to the store: the pager does not change it and, during a read, does not look at it.
    """

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Start to read and verify a page that has a stored version."""

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Start to store a page. The previous version is replaced when the write has succeeded."""

    def discard(self, page: int) -> None:
        """Drop the stored version of a page, if there is one."""

    def has(self, page: int) -> bool:
        """Return ``True`` if a version of the page is stored."""

    def expect_gradients(self, stored: bool) -> None:
        """Reserve space for all gradients if each step stores them. Not under the lock. Raises if there is no space."""

    def oldest_request(self) -> tuple[float, str] | None:
        """Return the start time (`time.perf_counter`) and a description of the oldest request in flight, if there is
        one.
        """


class PagerObserver(Protocol):
    """Receiver of the pager's telemetry. Always called under the lock."""

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Record that the training thread has waited.

        Args:
            cause: ``read``, ``write``, ``host_cache``, ``update`` or ``copy``.
            page: page that it needed, or -1.
            seconds: duration of the wait.
        """

    def fetched(self, result: str) -> None:
        """Record that a page was needed. `result` is ``hit``, ``late`` or ``miss``."""

    def moving(self, seconds: float) -> None:
        """Add to the time during which transfers were in flight. Called from any thread, one at a time."""

    def spared(self, nbytes: int) -> None:
        """Record a planned read that was not needed, because a write of the page was still in flight."""

    def diverged(self, detail: str) -> None:
        """Record that the step departed from the trace of the plan."""

    def gave_up(self, op: str, error: Exception) -> None:
        """Record a wait for a transfer (`op` is ``read`` or ``write``) that exceeded the time limit. Called from any
        thread.
        """


class _Lock(Condition):
    """Lock that defers Ctrl-C while it is held. An interrupt could leave it locked, or its state half changed."""

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
    """Starts and counts transfers, and waits for conditions that a completion can fulfill.

    Every attribute is read and changed under `lock`, by any thread. Life cycle: the object works until the first error,
    which `failed` receives once, from any thread. From then on, `check` and `wait` raise this error, and current waits
    raise it at once. Transfers in flight still end, so that their cache slots are not reused too early.

    Args:
        observer: receiver of waits, and of the time during which transfers are in flight.
        timeout: time limit of a wait, in seconds.
        failed: called once with the first error, from any thread and under the lock. It must not wait.
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
        """Stores with transfers so far. A timeout error names the oldest request of all of them."""
        self.lock: Condition = _Lock()
        """The one lock. Notified whenever something has ended that a thread may be waiting for."""
        self.reads = 0
        """Number of pages that are being read."""
        self.writes = 0
        """Number of pages that are being written."""
        self._moving_since = 0.0
        """Time of the last report to `PagerObserver.moving`, in seconds of `time.perf_counter`."""
        self._exchanging = False
        """``True`` while an update waits for other ranks. [Note: late ranks]"""
        self._exchanged = 0.0
        """End of the last exchange, in seconds of `time.perf_counter`."""
        self.failure: Exception | None = None
        """The first error; never cleared. Also read without the lock."""

    def read(
        self, store: PageReaderWriter, page: int, memory: memoryview, then: Callable[[Exception | None], None]
    ) -> None:
        """Start to read a page from a store. `then` is called under the lock at the end, with an error or ``None``."""
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
        """Start to write a page to a store. `then` is called under the lock at the end, with an error or ``None``."""
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
        """Report the time during which transfers were in flight. Must be called before their number changes."""
        now = time.perf_counter()
        if self.reads or self.writes:
            self._observer.moving(now - self._moving_since)
        self._moving_since = now

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool], cause: str, page: int, *, threaded: bool = False) -> None:
        """Wait until `ready()` returns ``True``. It is called under the lock after every notification.

        While an update waits for other ranks, waits that it delays do not time out. [Note: late ranks]

        Args:
            ready: condition to wait for.
            cause: kind of the condition: ``read``, ``write``, ``host_cache``, ``update`` or ``copy``.
            page: page that is needed, or -1.
            threaded: whether this is not the training thread, so that the wait does not count as a stall.

        Raises:
            StallError: if the wait exceeds the time limit.
            Exception: the first error, if an operation fails before or during the wait.
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
        """Wait until `ended()` returns ``True``. Return ``False`` if the time limit passes first."""
        since = time.perf_counter()
        while not ended():
            # During an exchange the limit runs only while transfers are in flight, and restarts whenever one of them
            # ends. So a rank that is late is no error, but a drive that hangs is.
            if held_up and self._exchanging:
                since = max(since, self._moving_since) if self.reads or self.writes else time.perf_counter()
            elif held_up:
                since = max(since, self._exchanged)
            left = since + self._timeout - time.perf_counter()
            if left <= 0:
                return False
            # The time during which the process was stopped (Ctrl-Z) does not count as the drive's.
            since += wait_a_while(self.lock, left)
            interrupts.check()
        return True

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Return a context in which an update waits for other ranks. For the thread that runs updates. [Note: late
        ranks]
        """
        with self.lock:
            self._exchanging = True
        try:
            yield
        finally:
            with self.lock:
                self._exchanging, self._exchanged = False, time.perf_counter()

    def fail(self, error: Exception) -> None:
        """Record the first error, and make everything that waits raise it."""
        # Keep the first error: later ones usually follow from it and would hide the cause.
        if self.failure is None:
            self.failure = error
            self._failed(error)
        self.lock.notify_all()

    def drain(self, ended: Callable[[], bool]) -> None:
        """Wait until no transfer is in flight and `ended()` returns ``True``. After a failure, wait only for a short
        time.

        Does not raise.
        """
        timeout = self._timeout if self.failure is None else min(self._timeout, _LAST_SECONDS)
        until = time.perf_counter() + timeout
        while (self.writes or self.reads or not ended()) and (left := until - time.perf_counter()) > 0:
            until += wait_a_while(self.lock, left)
            interrupts.check()

    def leave_to_parent(self, error: Exception) -> None:
        """Take a new lock in a forked child process, and make every call raise `error`. Not under the lock."""
        # A thread of the parent may have held the lock at the fork. It does not exist in the child to release the lock.
        self.lock = _Lock()
        self.failure = error
