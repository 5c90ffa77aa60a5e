"""What a search tries next, given what it has seen: single changes of the best so far, and pairs of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from infinity_tools.tune.search_space import Candidate, Setting, Space

_PAIRS = 64
"""Draws of a pair that has not been tried yet, before there is taken to be none."""
_WORSE, _TRIED, _BEHIND, _HEADING = 1.03, 2.0, 3.0, -10.0
"""From which ratio a value counts as worse; what a value that was tried, or lies behind a worse one, comes later by, in
distances; and how much earlier the next value in a direction that has just helped comes."""


class Proposals:
    """Chooses candidates that have not been tried, in an order that what was seen decides."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        """Where to look; replaced when the search knows what automatic values come to."""
        self.tried: list[dict[str, Any]] = []
        """Every candidate that was measured."""
        self._random = random.Random(seed)
        self._history: dict[tuple[str, Any], list[float]] = {}  # ratios of single changes, by setting and value
        self._heading: tuple[str, int] | None = None  # setting and direction that have just helped

    def note(self, changes: Mapping[str, Any], ratio: float) -> None:
        """Keep what changes of the best so far came to; infinity: it is not possible."""
        if len(changes) == 1:
            self._history.setdefault(next(iter(changes.items())), []).append(ratio)

    def follow(self, changes: Mapping[str, Any], before: Candidate) -> None:
        """Go on in the direction of changes that have helped."""
        self._heading = None
        if len(changes) == 1:
            ((name, value),) = changes.items()
            setting = next(setting for setting in self.space.settings if setting.name == name)
            if setting.ordered:
                self._heading = name, _direction(setting, before[name], value)

    def following(self, best: Candidate) -> dict[str, Any] | None:
        """Return what to try next; None where nothing is left."""
        seen = {self.space.key(candidate) for candidate in self.tried}
        scored = [
            (self._score(setting, best[setting.name], value), order, {**best, setting.name: value})
            for order, setting in enumerate(self.space.settings)
            for value in setting.values
            if value != best[setting.name]
        ]
        for _, _, candidate in sorted(scored, key=lambda row: row[:2]):
            if self.space.key(candidate) not in seen:
                return candidate
        for _ in range(_PAIRS if len(self.space.settings) > 1 else 0):
            candidate = self._pair(best)
            if self.space.key(candidate) not in seen:
                return candidate
        return None

    def _score(self, setting: Setting, before: Any, value: Any) -> float:
        """Return how late a value comes: the farther, the oftener tried, the worse it or one before it was."""
        away = setting.distance(before, value)
        score = away + sum(
            _TRIED + 10 * min(1.0, max(0.0, ratio - 1)) for ratio in self._history.get((setting.name, value), ())
        )
        if not setting.ordered:
            return score
        here, there, up = setting.values.index(before), setting.values.index(value), _direction(setting, before, value)
        if any(
            min(self._history.get((setting.name, one), [0.0])) > _WORSE
            for one in setting.values[here + up : there : up]
        ):
            score += _BEHIND
        return score + _HEADING if self._heading == (setting.name, up) and away == 1 else score

    def _pair(self, best: Candidate) -> dict[str, Any]:
        """Return two changes at once, drawn from those that lost little."""
        changed = dict(best)
        for setting in self._random.sample(self.space.settings, 2):
            values = [value for value in setting.values if value != best[setting.name]]
            weights = [1 / (1 + 20 * self._loss(setting.name, value)) for value in values]
            changed[setting.name] = self._random.choices(values, weights)[0]
        return changed

    def _loss(self, name: str, value: Any) -> float:
        ratios = [min(ratio, 10.0) for ratio in self._history.get((name, value), ())]
        return max(0.0, min(ratios) - 1) if ratios else 0.0


def _direction(setting: Setting, before: Any, after: Any) -> int:
    return 1 if setting.values.index(after) > setting.values.index(before) else -1
