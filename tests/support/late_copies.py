"""Copies of a device that do not end before the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest.mock import patch

from infinity.memory.device import CpuDevice


@contextmanager
def late_copies() -> Iterator[Event]:
    """Let marks of the CPU that are made inside of the block be passed when the event that it gets is set."""
    passed = Event()

    class DeviceEvent:
        def passed(self) -> bool:
            return passed.is_set()

        def before(self, stream: Any) -> None:
            """Nothing waits."""

    with patch.object(CpuDevice, "record_event", lambda *_: DeviceEvent()):
        yield passed
