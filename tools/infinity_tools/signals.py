"""Ctrl-C and SIGTERM: the step that runs is finished, then the run ends in order."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Holds a signal back from the first step on; before it, and when it comes twice, it ends the run at once."""

    def __init__(self) -> None:
        self.received = 0
        self.patient = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.received or not self.patient:
            raise SystemExit(128 + number)
        self.received = number
        with contextlib.suppress(OSError):  # nobody reads it any more
            # Not through the console: it may be in the middle of a line.
            os.write(2, b"\nending after this step; once more ends it now\n")
