"""Device copies that complete only when a test allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any
from unittest.mock import patch

from infinity.memory.device import Device


class ManualEvent(Event):
    """Device event that is passed once a test sets it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._functions: list[Callable[[None], None]] = []  # to be called by `set`; guarded by `_lock`

    def set(self) -> None:
        with self._lock:
            super().set()
            functions, self._functions = self._functions, []
        for function in functions:
            function(None)

    def passed(self) -> bool:
        return self.is_set()

    def before(self, stream: Any) -> None:
        """Do nothing, because no stream waits for this event."""

    def then(self, function: Callable[[None], None]) -> None:
        with self._lock:
            if not self.is_set():
                self._functions.append(function)
                return
        function(None)


@contextmanager
def late_copies() -> Iterator[ManualEvent]:
    """Yield an event. CPU device events recorded inside of the block are passed once it is set."""
    event = ManualEvent()
    with patch.object(Device, "record_event", lambda *_: event):
        yield event
