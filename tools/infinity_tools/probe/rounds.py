"""Two ways measured in turn, A, B, A, B: the only way to compare them on a drive that others use, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from infinity.io.probe.points import MARGIN

ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Bytes per second of two ways, one of each for each round."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The first relative to the second, medians; 0 where the second moved nothing."""
        return median(self.first) / median(self.second) if median(self.second) else 0.0

    def is_first_faster(self) -> bool:
        """Whether by more than `MARGIN`."""
        return median(self.first) > (1 + MARGIN) * median(self.second)

    def document(self, first: str, second: str) -> dict[str, Any]:
        """Return it for JSON; the ways have names."""
        return {
            first: [round(one) for one in self.first],
            second: [round(one) for one in self.second],
            "ratio": self.ratio,
        }


def in_turn(first: Callable[[], float], second: Callable[[], float]) -> Turns:
    """Measure both `ROUNDS` times."""
    found = [(first(), second()) for _ in range(ROUNDS)]
    return Turns(first=tuple(one for one, _ in found), second=tuple(one for _, one in found))
