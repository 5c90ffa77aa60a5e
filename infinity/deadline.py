"""Waiting with a time limit, in a process that may be stopped meanwhile."""

from __future__ import annotations

import time
from threading import Condition
from typing import Final

_LONGEST: Final = 1.0
"""Maximum duration of a single wait, in seconds."""


def wait_a_while(condition: Condition, seconds: float) -> float:
    """Wait on a condition for at most `seconds` and at most one second.

    The clock keeps running while a process is stopped (Ctrl-Z, a suspended job, a paused container), and notifications
    cannot arrive during that time. Such time must not count towards a time limit.

    Returns:
        Excess of the elapsed time over the requested time, in seconds, which does not count as waiting.
    """
    wanted, began = min(seconds, _LONGEST), time.perf_counter()
    condition.wait(wanted)
    return max(0.0, time.perf_counter() - began - wanted)
