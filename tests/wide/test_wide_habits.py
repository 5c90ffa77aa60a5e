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
    """Return (habit, placement); the first placement of every second quick row is tried by ``make test``."""
    rows = [
        pytest.param(
            name,
            placement,
            id=f"{name}-{placement}",
            marks=[pytest.mark.wide] if habit.row.slow or position else [],
        )
        for name, habit in HABITS.items()
        if 1 in habit.ranks
        for position, placement in enumerate(habit.placements)
    ]
    return one_of(2, rows)


@pytest.mark.parametrize(("name", "placement"), one_rank())
def test_a_habit_is_as_its_row_says(name: str, placement: str) -> None:
    """On one rank."""
    assert problems(name, placement) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name, habit in HABITS.items() if 2 in habit.ranks])
def test_a_habit_is_as_its_row_says_on_two_ranks(name: str, pair: RankPool) -> None:
    """With the first placement that it is tried with."""
    assert pair.run(habits.problems_of, name, HABITS[name].placements[0]) == [[], []]


def test_the_table_is_long() -> None:
    """Sixty habits were promised."""
    assert len(habits.ROWS) >= 60
