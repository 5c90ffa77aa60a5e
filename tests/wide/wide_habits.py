"""The table of training loops; every row is a function of `wide_habits_*`, run by `test_wide_habits`."""

from __future__ import annotations

import wide_habits_forwards
import wide_habits_gradients
import wide_habits_steps
import wide_habits_weights
from wide_habit import HABITS, problems
from wide_rows import Row

MODULES = (wide_habits_gradients, wide_habits_steps, wide_habits_forwards, wide_habits_weights)
ROWS: tuple[Row, ...] = tuple(habit.row for habit in HABITS.values())


def problems_of(name: str, placement: str) -> list[str]:
    """Return what `problems` does; from here, so that a process that is only told this function's name has all rows."""
    return problems(name, placement)
