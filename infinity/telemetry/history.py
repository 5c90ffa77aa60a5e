"""Time series of any length in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

MOST_POINTS: Final = 400

Row = tuple[float | None, ...]
"""One value per column; None if it is unknown."""


class History:
    """Time series that is downsampled as it grows, so that a bounded number of rows covers the whole run.

    Each stored row is the mean of several added rows. When the number of stored rows reaches `most`, each pair of
    neighboring rows is averaged into one, and each later row averages twice as many added rows as before. Added rows
    that do not yet fill a stored row are averaged into a final row, so that the latest value is always included.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        """Initialize without rows. `most` must be even."""
        self._most = most
        self._rows: list[Row] = []  # fewer than `_most`
        self._each = 1  # number of added rows per row in `_rows`
        self._pending: list[Row] = []  # fewer than `_each`

    def add(self, row: Row) -> None:
        self._pending.append(row)
        if len(self._pending) < self._each:
            return
        self._rows.append(_mean(self._pending))
        self._pending = []
        if len(self._rows) >= self._most:
            self._rows = [_mean(pair) for pair in zip(self._rows[::2], self._rows[1::2], strict=True)]
            self._each *= 2

    def rows(self) -> list[Row]:
        """Return the rows, oldest first."""
        return [*self._rows, *([_mean(self._pending)] if self._pending else [])]


def _mean(rows: Sequence[Row]) -> Row:
    return tuple(_mean_of([value for value in column if value is not None]) for column in zip(*rows, strict=True))


def _mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of the finite values. If there are none, return the last value, so that a NaN loss is visible."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        return sum(finite) / len(finite)
    return values[-1] if values else None
