"""Device copies that complete only when a test allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest.mock import patch

from infinity.memory.device import Device


@contextmanager
def late_copies() -> Iterator[Event]:
    """Yield an event. CPU device events recorded inside of the block are passed once it is set."""
    passed = Event()

    class DeviceEvent:
        def passed(self) -> bool:
            return passed.is_set()

        def before(self, stream: Any) -> None:
            pass

    with patch.object(Device, "record_event", lambda *_: DeviceEvent()):
        yield passed
