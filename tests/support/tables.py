"""Tables of tests: `make test` runs as many rows as show every kind, `make test-wide` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.train import Paging, Recipe

WIDE = pytest.mark.wide


def alternate(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return parameters for every row with every column, all but a part of them marked `wide`.

    What is left meets every row and every column at least once: of 6 rows and 3 columns row 0 goes with column 0,
    1 with 1, 2 with 2, 3 with 0 and so on.
    """
    listed, others = list(rows), list(columns)
    period = min(len(listed), len(others))
    return [
        pytest.param(row, column, marks=[] if i % period == j % period else WIDE)
        for i, row in enumerate(listed)
        for j, column in enumerate(others)
    ]


def variants(recipes: dict[str, Recipe], pagings: dict[str, Paging], *, wide: bool = False) -> list[Any]:
    """Return (recipe, paging) for every recipe with every paging, readably named; `alternate`, or all `wide`."""
    return [
        pytest.param(
            recipes[recipe],
            pagings[paging],
            id=f"{recipe}-{paging}",
            marks=WIDE if wide else marks,
        )
        for (recipe, paging), marks in (
            (parameters.values, parameters.marks) for parameters in alternate(recipes, pagings)
        )
    ]


def one_of(number: int, rows: Iterable[Any]) -> list[Any]:
    """Return all rows as parameters: of so many that are not `wide` yet, one after the other, all but the first are."""
    listed: list[Any] = []
    kept = 0
    for row in rows:
        parameter = row if isinstance(row, type(pytest.param())) else pytest.param(row)
        if WIDE.mark not in [getattr(mark, "mark", mark) for mark in parameter.marks]:
            if kept % number:
                parameter = pytest.param(*parameter.values, id=parameter.id, marks=[*parameter.marks, WIDE])
            kept += 1
        listed.append(parameter)
    return listed


def all_but(names: Iterable[str], *wide: str) -> list[Any]:
    """Return all names as parameters, some of them marked `wide`.

    Raises:
        ValueError: one of `wide` is not among the names.
    """
    listed = list(names)
    if missing := set(wide) - set(listed):
        raise ValueError(f"no such rows: {sorted(missing)}")
    return [pytest.param(name, marks=WIDE if name in wide else []) for name in listed]
