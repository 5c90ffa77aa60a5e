"""Tests of the training-loop patterns: each is bitwise equal to training in memory, or raises a clear error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import loop_patterns
from support.loop_pattern import PATTERNS, problems
from support.ranks import RankPool
from support.tables import one_of


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Pool of two ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


def one_rank_rows() -> list[object]:
    """Return pairs of pattern and update schedule. `make test` runs the first schedule of every second quick row."""
    rows = [
        pytest.param(
            name,
            update_schedule,
            id=f"{name}-{update_schedule}",
            marks=[pytest.mark.wide] if pattern.row.slow or position else [],
        )
        for name, pattern in PATTERNS.items()
        if 1 in pattern.ranks
        for position, update_schedule in enumerate(pattern.update_schedules)
    ]
    return one_of(2, rows)


@pytest.mark.parametrize(("name", "update_schedule"), one_rank_rows())
def test_pattern_has_the_stated_outcome(name: str, update_schedule: str) -> None:
    assert problems(name, update_schedule) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if 2 in pattern.ranks])
def test_pattern_has_the_stated_outcome_on_two_ranks(name: str, pair: RankPool) -> None:
    """Only the first update schedule of each pattern is used."""
    assert pair.run(loop_patterns.problems_of, name, PATTERNS[name].update_schedules[0]) == [[], []]


def test_the_table_has_at_least_sixty_patterns() -> None:
    assert len(loop_patterns.ROWS) >= 60
