"""Accesses to the store of the process group that cannot block a watching thread, and silence of other processes.

[Note: a cut link] TCP reports a cut link after about 16 minutes. Until then, an access to the store blocks, and the
store's timeouts do not apply. If the link is restored, TCP continues at its next retransmission, and the intervals
between retransmissions double each time. A new connection does not have this delay. Therefore `StoreAccess` runs each
access on a separate thread. While an access is pending, it starts others on new connections from time to time, and any
of them may succeed. An access whose connection was reset, for example by a firewall, is repeated on a new connection if
the store still accepts connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_ATTEMPTS: Final = 6
"""Maximum number of pending accesses, each with a thread and a connection."""
_LONGEST_GAP: Final = 5.0
"""Maximum time, in seconds, that counts between two looks. If it is longer, this process has probably been stopped."""
_LOOKS: Final = 3
"""Minimum number of looks before a process is given up."""


class Silence(Generic[K]):
    """Time since the last sign of life of each of several processes.

    Time during which this process itself was stopped (Ctrl-Z, a paused container or virtual machine) does not count,
    because it could not have received signs of life. A sign of life is an increasing number.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start measuring silence.

        Args:
            limit: time in seconds after which a process without a sign of life is given up.
            clock: function that returns the time in seconds.
        """
        self._limit, self._clock = limit, clock
        self._last, self._time = clock(), 0.0
        self._seen: dict[K, tuple[int, float]] = {}

    def look(self) -> None:
        """Let the time advance. The caller looks about once per second."""
        now = self._clock()
        gap, self._last = now - self._last, now
        self._time += min(gap, _LONGEST_GAP, self._limit / _LOOKS)

    def saw(self, key: K, sign: int) -> None:
        """Record a sign of life. The first call for `key` starts to watch it."""
        if key not in self._seen or sign > self._seen[key][0]:
            self._seen[key] = sign, self._time

    def forget(self, key: K) -> None:
        """Stop watching a process."""
        self._seen.pop(key, None)

    def given_up(self, key: K) -> float:
        """Return the time since the last sign of life, in seconds, if it exceeds the limit, and 0 otherwise."""
        seconds = self._time - self._seen[key][1] if key in self._seen else 0.0
        return seconds if seconds > self._limit else 0.0


class StoreAccess(Generic[T]):
    """Runs accesses to a store on separate threads; see [Note: a cut link]. Use it from a single thread."""

    def __init__(
        self, store: Any, patience: float, accepts: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare a connection.

        Args:
            store: store of the process group. Accesses use clones of it, so that calls do not wait for each other.
            patience: time in seconds after which an access without a response is repeated on a new connection.
            accepts: function that returns whether the store accepts connections. It is called when one was lost.
            clock: function that returns the time in seconds.
        """
        self._store, self._patience, self._accepts, self._clock = store, patience, accepts, clock
        self._accesses: SimpleQueue[Callable[[Any], T] | None] = SimpleQueue()
        self._results: SimpleQueue[T | Exception] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle, self._pending = 0, 0  # threads that wait for an access, or run one
        self._began = clock()
        # Threads wait for the next access, because Python starts no threads while it exits.
        self._start_thread(store.clone())

    def run(self, access: Callable[[Any], T], seconds: float) -> T | None:
        """Run `access` with the store, unless an earlier access is still pending, and wait for a result.

        Accesses may run at the same time.

        Args:
            access: function that is called with a clone of the store.
            seconds: longest time to wait.

        Returns:
            The newest result of this or an earlier call that has not been returned yet; None if there is none.

        Raises:
            RuntimeError: if the connection is lost, and the store does not accept others because the process that hosts
                it has exited.
        """
        with self._lock:
            late = self._clock() - self._began > self._patience and self._pending < _ATTEMPTS
            if start := (not self._pending or late):
                self._began = self._clock()
                if not self._idle:
                    self._start_thread(None)
                self._idle -= 1
                self._pending += 1
        if start:
            self._accesses.put(access)
        result: T | Exception | None = None
        with suppress(Empty):
            result = self._results.get(timeout=seconds)
            while True:  # accesses that were pending at the same time have several results
                result = self._results.get_nowait()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the thread that waits for an access. Threads with a pending access end with it."""
        self._accesses.put(None)

    def _start_thread(self, store: Any) -> None:
        self._idle += 1
        threading.Thread(target=self._serve, args=(store,), name="infinity-store", daemon=True).start()

    def _serve(self, store: Any) -> None:
        while (access := self._accesses.get()) is not None:
            store, result = self._access(access, store)
            with self._lock:
                self._pending -= 1
                end = isinstance(result, Exception) or self._idle > 0
                self._idle += not end
                if not (isinstance(result, Exception) and self._pending):  # another connection may succeed
                    self._results.put(result)
            if end:
                return

    def _access(self, access: Callable[[Any], T], store: Any) -> tuple[Any, T | Exception]:
        """Run an access on a connection, or on a new one if it is None. Return the connection and the result."""
        try:
            connection = store or self._store.clone()
            return connection, access(connection)
        except Exception as error:
            if store is None or not self._accepts():
                return None, error
        return self._access(access, None)
