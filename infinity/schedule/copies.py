"""Copies in flight between cache slots and a device, and a thread that waits for them to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from infinity.errors import StallError
from infinity.memory.device import DeviceEvent, wait
from infinity.schedule.trace import Access
from infinity.schedule.transfers import Transfers


class Copies:
    """Tracks copies of pinned pages by a device, and reports when a copy has ended.

    A thread waits for one event after another without holding the lock. Therefore cache slots become free regardless of
    the activity of other threads, and a device that does not respond causes an error instead of a hang. Life cycle: the
    first `add` starts the thread, and `close` ends it. After the first error, the thread continues to track copies
    until `close`. All other state is read and changed under the lock of `Transfers`.

    Args:
        ended: function that is called with the lock held when the copy of an access has ended.
        timeout: maximum duration of a copy, in seconds.
        enter_thread: function that is called at the start of the thread.
    """

    def __init__(
        self,
        transfers: Transfers,
        ended: Callable[[Access], None],
        *,
        timeout: float,
        enter_thread: Callable[[], None],
    ) -> None:
        self._transfers, self._ended, self._timeout, self._enter_thread = transfers, ended, timeout, enter_thread
        self.pending = 0
        """Number of copies in flight."""
        # Copies in order. None ends the thread.
        self._queue: SimpleQueue[tuple[DeviceEvent, Access] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()  # set by `close`, after which the thread stops waiting for copies

    def add(self, device_event: DeviceEvent, uses: Access) -> None:
        """Track a copy of the pages of an access. The copy ends when the device passes the event."""
        self.pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-copies", daemon=True)
            self._thread.start()
        self._queue.put((device_event, uses))

    def _run(self) -> None:
        self._enter_thread()
        while item := self._queue.get():
            device_event, uses = item
            try:
                if not self._wait(device_event):
                    return  # the pages stay pinned because the device may still use them
            except Exception as error:  # raised by the device itself
                with self._transfers.lock:
                    self._transfers.fail(error)
                return
            with self._transfers.lock:
                self.pending -= 1
                self._ended(uses)
                self._transfers.lock.notify_all()

    def _wait(self, device_event: DeviceEvent) -> bool:
        """Wait for an event. Return ``False`` if `close` is called first.

        Exceeding the time limit counts as a failure of the run, but the wait continues, because the device may still
        use the pages.
        """
        if wait(device_event, self._timeout, self._closed.is_set):
            return True
        if not self._closed.is_set():
            with self._transfers.lock:
                self._transfers.fail(StallError(f"waited {self._timeout:.0f} s for the device to copy pages"))
        return wait(device_event, float("inf"), self._closed.is_set)

    def close(self) -> None:
        """End the thread. Must be called without the lock."""
        self._closed.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
