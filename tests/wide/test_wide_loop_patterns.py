"""Tests of the training-loop patterns: each is bitwise equal to training in memory, or raises a clear error."""

from __future__ import annotations

import itertools

import pytest

from support.loop_pattern import PATTERNS, UPDATE_SCHEDULES, problems
from support.ranks import RankPool
from support.tables import WIDE
from wide import loop_patterns


def one_rank_rows() -> list[object]:
    """Return pairs of pattern and update schedule. `make test` runs every sixth quick row with one schedule."""
    names = [name for name, pattern in PATTERNS.items() if 1 in pattern.ranks]
    quick = [name for name in names if not PATTERNS[name].slow][::6]
    tested = dict(zip(quick, itertools.cycle(UPDATE_SCHEDULES), strict=False))
    return [
        pytest.param(name, schedule, id=f"{name}-{schedule}", marks=[] if tested.get(name) == schedule else WIDE)
        for name in names
        for schedule in UPDATE_SCHEDULES
    ]


@pytest.mark.parametrize(("name", "update_schedule"), one_rank_rows())
def test_pattern_has_the_stated_outcome(name: str, update_schedule: str) -> None:
    assert problems(name, update_schedule) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if 2 in pattern.ranks])
def test_pattern_has_the_stated_outcome_on_two_ranks(name: str, pair: RankPool) -> None:
    """Only one update schedule of each pattern is used."""
    schedule = "auto" if PATTERNS[name].row.words or "auto" not in PATTERNS[name].errors else "in_forward"
    assert pair.run(loop_patterns.problems_of, name, schedule) == [[], []]
