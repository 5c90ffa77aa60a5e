"""Graceful stop on Ctrl-C, SIGTERM, hangup, and the warnings of schedulers (SIGUSR1, SIGUSR2): the current step is
finished before the run ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from infinity.interrupts import SAME_SECONDS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 0.2


def heard_by(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install a handler for the signals, except SIGHUP under nohup, and return the previous handlers."""
    heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def give_back(before: Mapping[signal.Signals, Any]) -> None:
    """Restore the previous signal handlers."""
    for number, handler in before.items():
        signal.signal(number, handler)


class StopRequest:
    """Defers a stop signal until the current step has finished.

    Before the first step a signal ends the run immediately, and so does a second signal. SIGHUP, which a closed
    terminal may send more than once, never ends the run immediately, and is ignored under nohup.
    """

    def __init__(self, notice: str = "stopping after this step; press Ctrl-C again to stop now") -> None:
        """Initialize the request.

        Args:
            notice: Message for the first deferred signal. Empty: no message.
        """
        self._notice = notice
        self.received = 0  # number of the first deferred signal, or 0
        self.patient = False  # set when the first step begins, so that the first signal is deferred
        self._since = 0.0  # time.monotonic() of the first signal
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = heard_by(self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        give_back(self._before)

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives. A deferred signal does not interrupt `time.sleep`."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.patient:
            raise SystemExit(128 + number)
        if self.received:
            if number == signal.SIGHUP or now - self._since < SAME_SECONDS:
                return
            raise SystemExit(128 + number)
        self.received, self._since = number, now
        with contextlib.suppress(OSError):  # stderr has been closed
            # Written directly because the console may be in the middle of a line.
            os.write(2, f"\n{self._notice}\n".encode() if self._notice else b"")
