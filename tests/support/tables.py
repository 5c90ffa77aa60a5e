"""Parametrization of tests: `make test` runs a selection of the rows, and `make test-wide` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.train import Paging, Recipe

WIDE = pytest.mark.wide


def alternate(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return parameters for all combinations of rows and columns, most of them marked `wide`.

    The others contain every row and every column at least once. For example, with 6 rows and 3 columns, row 0 is
    combined with column 0, row 1 with column 1, row 2 with column 2, row 3 with column 0, and so on.
    """
    listed, others = list(rows), list(columns)
    period = min(len(listed), len(others))
    return [
        pytest.param(row, column, marks=[] if i % period == j % period else WIDE)
        for i, row in enumerate(listed)
        for j, column in enumerate(others)
    ]


def variants(recipes: dict[str, Recipe], pagings: dict[str, Paging], *, wide: bool = False) -> list[Any]:
    """Return `alternate(recipes, pagings)` with readable ids. If `wide`, all combinations are marked `wide`."""
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


def with_kinds(recipes: dict[str, Recipe], pagings: dict[str, Paging], kinds: Iterable[str]) -> list[Any]:
    """Return `variants(recipes, pagings)` with a third parameter: one of `kinds`, so that all pairs occur."""
    names, listed = list(kinds), []
    for number, row in enumerate(variants(recipes, pagings)):
        recipe, paging = divmod(number, len(pagings))
        kind = names[(recipe + paging + paging // 2) % len(names)]
        listed.append(pytest.param(*row.values, kind, id=f"{row.id}-{kind}", marks=row.marks))
    return listed


def one_of(number: int, rows: Iterable[Any]) -> list[Any]:
    """Return the rows as parameters, and mark all except every `number`-th row that is not yet `wide`."""
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


def only(rows: Iterable[Any], *ids: str) -> list[Any]:
    """Return the rows, and mark all except those with the given ids.

    Raises:
        ValueError: if a row does not exist.
    """
    listed = list(rows)
    if missing := set(ids) - {row.id for row in listed}:
        raise ValueError(f"these rows do not exist: {sorted(missing)}")
    return [pytest.param(*row.values, id=row.id, marks=[] if row.id in ids else WIDE) for row in listed]


def all_but(names: Iterable[str], *wide: str) -> list[Any]:
    """Return all names as parameters, and mark those in `wide`.

    Raises:
        ValueError: if a name in `wide` does not exist.
    """
    listed = list(names)
    if missing := set(wide) - set(listed):
        raise ValueError(f"these rows do not exist: {sorted(missing)}")
    return [pytest.param(name, marks=WIDE if name in wide else []) for name in listed]
