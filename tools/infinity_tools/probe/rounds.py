"""Comparison of two variants in alternating rounds (A, B, A, B), so that other load on the drive affects both
equally."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from infinity.io.probe.points import MARGIN

ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class AlternatingRounds:
    """Throughput of two variants in bytes per second, with one value per round for each variant."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the first variant divided by the median of the second; 0 if the latter is 0."""
        return median(self.first) / median(self.second) if median(self.second) else 0.0

    def is_first_faster(self) -> bool:
        """Return ``True`` if the median of the first variant is higher by more than `MARGIN`."""
        return median(self.first) > (1 + MARGIN) * median(self.second)

    def document(self, first: str, second: str) -> dict[str, Any]:
        """Return an object that can be serialized as JSON. `first` and `second` are the names of the variants."""
        return {
            first: [round(one) for one in self.first],
            second: [round(one) for one in self.second],
            "ratio": self.ratio,
        }


def alternate(first: Callable[[], float], second: Callable[[], float]) -> AlternatingRounds:
    """Call both functions alternately, `ROUNDS` times each, and return the results."""
    found = [(first(), second()) for _ in range(ROUNDS)]
    return AlternatingRounds(first=tuple(one for one, _ in found), second=tuple(one for _, one in found))
