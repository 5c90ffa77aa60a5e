"""Waiting with a time limit, by a process that may be stopped meanwhile."""

from __future__ import annotations

import time
from threading import Condition
from typing import Final

_LONGEST: Final = 1.0
"""Seconds that are waited at once."""


def wait_a_while(condition: Condition, seconds: float) -> float:
    """Wait on a condition for at most `seconds`, and a second; return the seconds that do not count as waiting.

    The clock goes on while a process is stopped (Ctrl-Z, a job that is suspended, a container that is paused), and what
    it waits for cannot be told to it then: such a time is no reason to give up.
    """
    wanted, began = min(seconds, _LONGEST), time.perf_counter()
    condition.wait(wanted)
    return max(0.0, time.perf_counter() - began - wanted)
