"""Proposals for the next trial: single changes of the best candidate, and pairs of changes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from infinity_tools.tune.search_space import Candidate, Setting, Space

_PAIRS = 64
"""Number of draws for an untried pair before the search gives up."""
_WORSE, _TRIED, _BEHIND, _HEADING = 1.03, 2.0, 3.0, -10.0
"""Ratio from which a value counts as worse, followed by additions to a value's score, in units of distance: for each
trial of the value, for a worse value in between, and for the direction that has just helped."""


class Proposals:
    """Proposes untried candidates, in an order that depends on the outcomes so far."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space = space
        """Search space; replaced when the values of automatic settings become known."""
        self.tried: list[dict[str, Any]] = []
        """All candidates of past trials."""
        self._random = random.Random(seed)
        self._history: dict[tuple[str, Any], list[float]] = {}  # ratios of single changes, by setting and value
        self._heading: tuple[str, int] | None = None  # setting and direction that have just helped

    def note(self, changes: Mapping[str, Any], ratio: float) -> None:
        """Record the step time with these changes, relative to the best candidate. Infinity: they are not possible."""
        if len(changes) == 1:
            self._history.setdefault(next(iter(changes.items())), []).append(ratio)

    def follow(self, changes: Mapping[str, Any], before: Candidate) -> None:
        """Continue in the direction of changes that have helped."""
        self._heading = None
        if len(changes) == 1:
            ((name, value),) = changes.items()
            setting = next(setting for setting in self.space.settings if setting.name == name)
            if setting.ordered:
                self._heading = name, _direction(setting, before[name], value)

    def following(self, best: Candidate) -> dict[str, Any] | None:
        """Return the next candidate to try, or None if all have been tried."""
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
        """Return a value's score. Values that are farther away, were tried more often, or did worse come later."""
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
        """Return the best candidate with two random changes. Changes that cost little are more likely."""
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
