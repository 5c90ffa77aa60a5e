"""Every row of the table of habits: the same bits as in memory, or an error that says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import habits
from support.habit import HABITS, problems
from support.ranks import RankPool
from support.tables import one_of


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


def one_rank() -> list[object]:
    """Return (habit, update schedule);

    the first update schedule of every second quick row is tried by ``make test``.
    """
    rows = [
        pytest.param(
            name,
            update_schedule,
            id=f"{name}-{update_schedule}",
            marks=[pytest.mark.wide] if habit.row.slow or position else [],
        )
        for name, habit in HABITS.items()
        if 1 in habit.ranks
        for position, update_schedule in enumerate(habit.update_schedules)
    ]
    return one_of(2, rows)


@pytest.mark.parametrize(("name", "update_schedule"), one_rank())
def test_a_habit_is_as_its_row_says(name: str, update_schedule: str) -> None:
    """On one rank."""
    assert problems(name, update_schedule) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name, habit in HABITS.items() if 2 in habit.ranks])
def test_a_habit_is_as_its_row_says_on_two_ranks(name: str, pair: RankPool) -> None:
    """With the first update schedule that it is tried with."""
    assert pair.run(habits.problems_of, name, HABITS[name].update_schedules[0]) == [[], []]


def test_the_table_is_long() -> None:
    """Sixty habits were promised."""
    assert len(habits.ROWS) >= 60
