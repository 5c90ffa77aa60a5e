"""Rate limit for threads that read or write in the background."""

from __future__ import annotations

import threading
import time


class Pace:
    """Rate limiter that holds all threads together to `rate` bytes per second. A rate of 0 means no limit."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self._next = 0.0  # time.monotonic() at which the next transfer may start; guarded by the lock
        self.stopped = threading.Event()
        """Once it is set, `wait` returns immediately."""

    def wait(self, nbytes: int) -> None:
        """Block until `nbytes` more bytes may be transferred."""
        if delay := self.delay(nbytes):
            self.stopped.wait(delay)

    def delay(self, nbytes: int) -> float:
        """Return the time in seconds after which the caller may transfer `nbytes` more bytes."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._next, now)
            self._next = start + nbytes / self._rate
        return start - now
