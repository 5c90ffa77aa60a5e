"""The table of training loops; every row is a function of `habits_*`, run by `test_wide_habits`."""

from __future__ import annotations

from support import habits_forwards, habits_gradients, habits_steps, habits_weights
from support.habit import HABITS, problems
from support.rows import Row

MODULES = (habits_gradients, habits_steps, habits_forwards, habits_weights)
ROWS: tuple[Row, ...] = tuple(habit.row for habit in HABITS.values())


def problems_of(name: str, update_schedule: str) -> list[str]:
    """Return what `problems` does; from here, so that a process that is only told this function's name has all rows."""
    return problems(name, update_schedule)
