"""Curves of any length in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

MOST_POINTS: Final = 400

Row = tuple[float | None, ...]
"""One value for each column; None where it is not known."""


class History:
    """Rows of numbers, thinned so that all of their time is kept: each is the mean of as many as were added in turn.

    When there are `most` rows, neighbours become one, and from then on each takes twice as many. The rows that do not
    yet make a full one are the last row, so that what was added last is always there.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        """Have no rows yet; `most` is even."""
        self._most = most
        self._rows: list[Row] = []  # fewer than `_most`
        self._each = 1  # rows added that one of `_rows` stands for
        self._pending: list[Row] = []  # fewer than `_each`

    def add(self, row: Row) -> None:
        """Add a row."""
        self._pending.append(row)
        if len(self._pending) < self._each:
            return
        self._rows.append(_mean(self._pending))
        self._pending = []
        if len(self._rows) >= self._most:
            self._rows = [_mean(pair) for pair in zip(self._rows[::2], self._rows[1::2], strict=True)]
            self._each *= 2

    def rows(self) -> list[Row]:
        """Return the rows, the oldest first."""
        return [*self._rows, *([_mean(self._pending)] if self._pending else [])]


def _mean(rows: Sequence[Row]) -> Row:
    return tuple(_mean_of([value for value in column if value is not None]) for column in zip(*rows, strict=True))


def _mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of the finite ones; of others, the last: that a loss is not a number is to be seen."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        return sum(finite) / len(finite)
    return values[-1] if values else None
