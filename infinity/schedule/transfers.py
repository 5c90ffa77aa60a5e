"""Transfers of pages (reads and writes) that are in flight, waits for them, and the first error.

[Note: the one lock] A single lock, `Transfers.lock`, protects the entire state of the pager: the state in this module,
in `CacheSlots`, in `Cache`, in `Cursor` and in reservations. The following threads acquire the lock: the training
thread, the update thread, the thread that copies to a device, the threads that wait for such copies, the thread that
listens to other ranks, and the threads of the store when a transfer ends. The lock is reentrant, because a read may end
before the store's `read` method returns. No thread copies page content or waits for a device while it holds the lock.
See `Cache.release`.

[Note: late ranks] The time limit applies to operations of this rank: to transfers, and to updates, which usually do not
depend on other ranks. The exception is an update that needs a full parameter. During the exchange of this parameter, it
waits for other ranks, which may be arbitrarily late. (A rank that fails, for example because its drive hangs, reports
the failure and thereby ends this rank.) During an exchange, a wait for an update, or for a cache slot that an update
may hold, times out only if transfers are in flight and none of them has ended within the time limit. When the exchange
ends, the time limit of such a wait starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Protocol

from infinity import interrupts
from infinity.content.layout import Page
from infinity.deadline import wait_a_while
from infinity.errors import StallError
from infinity.telemetry.ledger import Ledger

_LAST_SECONDS = 5.0
"""Maximum number of seconds for which `drain` waits after a failure."""
_WAITS = {
    "read": "a page to be read",
    "write": "a page to be written",
    "host_cache": "a free cache slot of the host cache",
    "update": "the update of a page",
    "copy": "the device to copy a page",
}
_HELD_UP = frozenset({"update", "host_cache"})
"""Causes of waits that are prolonged while an update exchanges data with other ranks."""
_AFTER_COPIES = _HELD_UP | {"copy"}
"""Causes of waits whose time limit starts again when the device has copied a page. The device may first have to finish
a long computation.
"""


class PageReaderWriter(Protocol):
    """Interface of the store that the pager uses. `PageStore` implements it.

    Every method except `expect_gradients` and `add` is called with the lock held. When a transfer ends, the store calls
    `done` once, from any thread, with an error or ``None``.
    """

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None: ...

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None: ...

    def discard(self, page: int) -> None: ...

    def has(self, page: int) -> bool: ...

    def add(self, pages: Sequence[Page], path_of: Callable[[Page], int]) -> None: ...

    def expect_gradients(self, stored: bool) -> None: ...

    def oldest_request(self) -> tuple[float, str] | None: ...


class _Lock(Condition):
    """Lock that defers Ctrl-C while it is held. An interrupt could leave it locked, or the protected state
    inconsistent.
    """

    def __enter__(self) -> bool:
        interrupts.begin()
        try:
            return self.acquire()
        except BaseException:
            interrupts.end()
            raise

    def __exit__(self, *exception: object) -> None:
        self.release()
        interrupts.end()


class Transfers:
    """Starts and counts transfers, and waits for conditions that the end of a transfer can fulfill.

    Every attribute is read and changed under `lock`, by any thread. Life cycle: the object operates normally until the
    first error, which it passes to `failed` once, from any thread. From then on, `check` and `wait` raise this error,
    and current waits raise it immediately. Transfers in flight still run to their end, so that their cache slots are
    not reused too early.

    Args:
        observer: receiver of telemetry. It is called with the lock held.
        timeout: maximum duration of a wait, in seconds.
        failed: function that is called once, with the first error, from any thread and with the lock held. It must not
            wait.
    """

    def __init__(
        self,
        observer: Ledger,
        *,
        timeout: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self.observer, self.timeout, self._failed = observer, timeout, failed
        """Receiver of telemetry, maximum duration of a wait in seconds, and function to call with the first error."""
        self._stores: list[PageReaderWriter] = []
        """Stores that have been used so far. A timeout error describes the oldest request of all of these stores."""
        self.lock: Condition = _Lock()
        """The lock of the pager. It is notified whenever an operation has ended for which a thread may be waiting."""
        self.reads = 0
        """Number of pages that are being read."""
        self.writes = 0
        """Number of pages that are being written."""
        self._moving_since = 0.0
        """Time of the last report to `Ledger.moving`, as returned by `time.perf_counter`."""
        self._exchanging = False
        """``True`` while an update waits for other ranks. [Note: late ranks]"""
        self._exchanged = 0.0
        """Time at which the last exchange ended, as returned by `time.perf_counter`."""
        self.copied = 0.0
        """Time at which a device last finished copying a page, as returned by `time.perf_counter`."""
        self.failure: Exception | None = None
        """The first error, or ``None``. It is never cleared, and may be read without the lock."""

    def read(
        self, store: PageReaderWriter, page: int, memory: memoryview, then: Callable[[Exception | None], None]
    ) -> None:
        """Start reading a page. At the end, `then` is called with an error or ``None``, with the lock held.

        Until then, the store owns `memory`: no other thread may use it.
        """
        self._begin(store)
        self.reads += 1
        store.read(page, memory, partial(self._end, then, 1, 0))

    def write(
        self, store: PageReaderWriter, page: int, memory: memoryview, then: Callable[[Exception | None], None]
    ) -> None:
        """Start writing a page. At the end, `then` is called with an error or ``None``, with the lock held.

        Until then, the content of `memory` must not change.
        """
        self._begin(store)
        self.writes += 1
        store.write(page, memory, partial(self._end, then, 0, 1))

    def _begin(self, store: PageReaderWriter) -> None:
        self._report_moving()
        if store not in self._stores:
            self._stores.append(store)

    def _end(self, then: Callable[[Exception | None], None], reads: int, writes: int, error: Exception | None) -> None:
        with self.lock:
            self._report_moving()
            self.reads -= reads
            self.writes -= writes
            if error is not None:
                self.fail(error)
            then(error)
            self.lock.notify_all()

    def _report_moving(self) -> None:
        """Report the time during which transfers were in flight. Must be called before `reads` or `writes` changes."""
        now = time.perf_counter()
        if self.reads or self.writes:
            self.observer.moving(now - self._moving_since)
        self._moving_since = now

    def check(self) -> None:
        """Raise the first error if an operation has failed."""
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool], cause: str, page: int, *, threaded: bool = False) -> None:
        """Wait until `ready()` returns ``True``. `ready` is called with the lock held, after every notification.

        While an update exchanges data with other ranks, a different time limit applies to waits that depend on the
        update. [Note: late ranks]

        Args:
            cause: kind of the wait: ``read``, ``write``, ``host_cache``, ``update`` or ``copy``.
            page: page that the thread needs, or -1.
            threaded: whether the calling thread is not the training thread. If so, the wait does not count as a stall.

        Raises:
            StallError: if the wait exceeds the time limit.
            Exception: the first error, if an operation fails before or during the wait.
        """
        self.check()
        if ready():
            return
        started = time.perf_counter()
        finished = self._wait(lambda: ready() or self.failure is not None, cause)
        if not threaded:
            self.observer.stalled(cause, page, time.perf_counter() - started)
        self.check()
        if not finished:
            hung = self._exchanging and cause in _HELD_UP
            what = "any page to be read or written" if hung else _WAITS[cause]
            error = StallError(f"waited {self.timeout:.0f} s for {what}; {self._oldest_request()}")
            if self.reads or self.writes:
                self.observer.gave_up("read" if cause == "read" or not self.writes else "write", error)
            self.fail(error)
            self.check()

    def _oldest_request(self) -> str:
        requests = [request for store in self._stores if (request := store.oldest_request()) is not None]
        return min(requests)[1] if requests else "no request is in flight"

    def _wait(self, ended: Callable[[], bool], cause: str) -> bool:
        """Wait until `ended()` returns ``True``. Return ``False`` if the time limit is exceeded first."""
        since, held_up = time.perf_counter(), cause in _HELD_UP
        while not ended():
            # During an exchange, time counts only while transfers are in flight, and the limit restarts whenever a
            # transfer ends. Therefore a late rank does not cause an error, but a drive that hangs does.
            if held_up and self._exchanging:
                since = max(since, self._moving_since) if self.reads or self.writes else time.perf_counter()
            elif held_up:
                since = max(since, self._exchanged)
            if cause in _AFTER_COPIES:
                since = max(since, self.copied)
            left = since + self.timeout - time.perf_counter()
            if left <= 0:
                return False
            # Exclude the time during which the process was suspended (Ctrl-Z).
            since += wait_a_while(self.lock, left)
            interrupts.check()
        return True

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Return a context manager for the part of an update that waits for other ranks, which has no time limit.

        It must be entered on the thread that runs updates. [Note: late ranks]
        """
        with self.lock:
            self._exchanging = True
        try:
            yield
        finally:
            with self.lock:
                self._exchanging, self._exchanged = False, time.perf_counter()

    def fail(self, error: Exception) -> None:
        """Record an error. If it is the first one, all current and later waits raise it."""
        # Keep the first error, because later errors usually result from it and would hide the cause.
        if self.failure is None:
            self.failure = error
            self._failed(error)
        self.lock.notify_all()

    def drain(self, ended: Callable[[], bool]) -> None:
        """Wait until no transfer is in flight and `ended()` returns ``True``. After a failure, wait only for a short
        time.

        The method does not raise, even if the time limit is exceeded.
        """
        timeout = self.timeout if self.failure is None else min(self.timeout, _LAST_SECONDS)
        until = time.perf_counter() + timeout
        while (self.writes or self.reads or not ended()) and (left := until - time.perf_counter()) > 0:
            until += wait_a_while(self.lock, left)
            interrupts.check()

    def leave_to_parent(self, error: Exception) -> None:
        """Create a new lock in a forked child process, and make every call raise `error`. Must be called without the
        lock.
        """
        # A thread of the parent process may have held the lock at the fork. That thread does not exist in the child
        # process, so the old lock would never be released.
        self.lock = _Lock()
        self.failure = error
