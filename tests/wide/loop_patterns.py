"""Table of all training-loop patterns, tested by tests/wide/test_wide_loop_patterns.py."""

from __future__ import annotations

from support.loop_pattern import PATTERNS, problems
from wide import patterns_forward, patterns_gradients, patterns_steps, patterns_weights

MODULES = (patterns_gradients, patterns_steps, patterns_forward, patterns_weights)
ROWS = tuple(pattern.row for pattern in PATTERNS.values())


def problems_of(name: str, update_schedule: str) -> list[str]:
    """Call `problems`. Ranks import functions by name, and importing it from this module registers all patterns."""
    return problems(name, update_schedule)
