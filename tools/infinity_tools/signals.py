"""Ctrl-C, SIGTERM and a terminal that is closed: the step that runs is finished, then the run ends in order."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from infinity.interrupts import SAME_SECONDS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.2


def heard_by(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let a handler have the signals, but for a terminal's end under nohup; return what had them before."""
    heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def give_back(before: Mapping[signal.Signals, Any]) -> None:
    """Let those have the signals that had them before."""
    for number, handler in before.items():
        signal.signal(number, handler)


class StopRequest:
    """Holds a signal back from the first step on; before it, and when it comes twice, it ends the run at once.

    A terminal that is closed tells so more than once and never ends the run at once; under nohup it is not heard.
    """

    def __init__(self, notice: str = "ending after this step; once more ends it now") -> None:
        """Hold nothing back yet; `notice` is what the first signal that is held back is answered with, if anything."""
        self._notice = notice
        self.received = 0  # number of the signal; 0 if none has come
        self.patient = False  # whether the first signal is held back: the first step has begun
        self._since = 0.0  # when the first signal came, of `time.monotonic`
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = heard_by(self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        give_back(self._before)

    def sleep(self, seconds: float) -> None:
        """Wait, until a signal asks for the end: one that is held back interrupts no `time.sleep`."""
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
        with contextlib.suppress(OSError):  # nobody reads it any more
            # Not through the console: it may be in the middle of a line.
            os.write(2, f"\n{self._notice}\n".encode() if self._notice else b"")
