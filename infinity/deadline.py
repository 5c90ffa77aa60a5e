"""Time limits that ignore periods in which the process is stopped."""

from __future__ import annotations

import time
from threading import Condition
from typing import Final

_LONGEST: Final = 1.0
"""Maximum duration of a single wait, in seconds."""


def wait_a_while(condition: Condition, seconds: float) -> float:
    """Wait on a condition for at most `seconds` and at most one second.

    The clock continues while a process is stopped (Ctrl-Z, a suspended job, a paused container), but notifications
    cannot arrive during that time. Therefore this time must not count towards a time limit.

    Returns:
        Elapsed time in excess of the requested time, in seconds. The caller adds it to its deadline.
    """
    wanted, began = min(seconds, _LONGEST), time.perf_counter()
    condition.wait(wanted)
    return max(0.0, time.perf_counter() - began - wanted)
