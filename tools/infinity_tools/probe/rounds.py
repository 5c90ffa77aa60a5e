"""Measurements of two variants in alternation (A, B, A, B), so that other load on the drive affects both equally."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from infinity.io.probe.points import MARGIN

ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class AlternatingRounds:
    """Throughput of two variants, in bytes per second, with one value of each per round."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the first variant divided by the median of the second, or 0 if the second transferred no data."""
        return median(self.first) / median(self.second) if median(self.second) else 0.0

    def is_first_faster(self) -> bool:
        """Return ``True`` if the first variant is faster by more than `MARGIN`."""
        return median(self.first) > (1 + MARGIN) * median(self.second)

    def document(self, first: str, second: str) -> dict[str, Any]:
        """Return a JSON document, with the given names of the variants."""
        return {
            first: [round(one) for one in self.first],
            second: [round(one) for one in self.second],
            "ratio": self.ratio,
        }


def alternate(first: Callable[[], float], second: Callable[[], float]) -> AlternatingRounds:
    """Measure both variants `ROUNDS` times."""
    found = [(first(), second()) for _ in range(ROUNDS)]
    return AlternatingRounds(first=tuple(one for one, _ in found), second=tuple(one for _, one in found))
