"""Copies in flight between cache slots and a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from infinity.errors import StallError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.trace import Access
from infinity.schedule.transfers import Transfers

_CHECKS: Final = 20
"""Number of checks of the watchdog within the time limit."""


class Copies:
    """Tracks copies of pinned pages by a device, and reports when a copy has ended.

    Threads of the device wait for the events, without holding the lock. Therefore cache slots become free regardless of
    the activity of other threads. A watchdog thread, which the first `add` starts and `close` ends, reports a device
    that does not respond even if no thread waits for a page. After the first error, copies are tracked until `close`.
    All other state is read and changed under the lock of `Transfers`.

    Args:
        ended: function that is called with the lock held when the copy of an access has ended.
        device: device that copies.
        timeout: maximum time without progress of the device, in seconds.
    """

    def __init__(
        self, transfers: Transfers, ended: Callable[[Access], None], *, device: Device, timeout: float
    ) -> None:
        self._transfers, self._ended, self._device, self._timeout = transfers, ended, device, timeout
        self.pending = 0
        """Number of copies in flight."""
        self._watchdog: threading.Thread | None = None
        self._closed = threading.Event()  # set by `close`, after which the end of a copy is ignored

    def add(self, device_event: DeviceEvent, uses: Access) -> None:
        """Track a copy of the pages of an access. The copy ends when the device passes the event."""
        self.pending += 1
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, name="infinity-watchdog", daemon=True)
            self._watchdog.start()
        device_event.then(partial(self._end, uses))

    def _end(self, uses: Access, error: Exception | None) -> None:
        with self._transfers.lock:
            if self._closed.is_set():
                return
            if error is not None:  # raised by the device; the pages stay pinned because it may still use them
                self._transfers.fail(error)
            else:
                self.pending -= 1
                self._transfers.copied = time.perf_counter()
                self._ended(uses)
                self._transfers.lock.notify_all()

    def _watch(self) -> None:
        progress, quiet = -1, 0  # `quiet` is the number of checks since the last progress
        while not self._closed.wait(self._timeout / _CHECKS):
            with self._transfers.lock:
                quiet = quiet + 1 if self.pending and self._device.progress == progress else 0
                progress = self._device.progress
                if quiet >= _CHECKS:
                    self._transfers.fail(StallError(f"waited {self._timeout:.0f} s for the device to copy pages"))

    def close(self) -> None:
        """End all threads, and ignore copies that are still in flight. Must be called without the lock."""
        with self._transfers.lock:
            self._closed.set()
        if self._watchdog is not None:
            self._watchdog.join()
        self._device.end_threads()
