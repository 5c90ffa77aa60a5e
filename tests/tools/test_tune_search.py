"""The search of `infinity tune` on landscapes whose best is known: noisy, drifting, with settings that interact."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from infinity.units import KIB, MIB
from infinity_tools.tune.outcome import Bounds, Outcome
from infinity_tools.tune.search import Result, Role, Search
from infinity_tools.tune.space import Candidate, Setting, Space

TRIAL = 3.0
"""Seconds of a trial of a step of one second, about."""


class Landscape:
    """Seconds of a step by settings: the further from the best of each, the slower; and what a real machine adds."""

    def __init__(self, space: Space, seed: int, *, noise: float = 0.02, drift: float = 0.0, flat: bool = False) -> None:
        self.space, self.noise, self.drift = space, noise, drift
        self.random = random.Random(seed)
        self.now, self.asked = 0.0, []
        self.weights = {setting.name: 0.0 if flat else self.random.uniform(0.02, 0.25) for setting in space.settings}
        self.peaks = {setting.name: self.random.choice(setting.values) for setting in space.settings}
        self.broken: dict[str, Any] = {}

    def seconds(self, candidate: Candidate) -> float:
        """The truth."""
        cost = 1.0
        for setting in self.space.settings:
            away = setting.distance(self.peaks[setting.name], candidate[setting.name])
            if candidate[setting.name] != self.peaks[setting.name]:
                cost *= 1 + self.weights[setting.name] * away
        first, second = self.space.settings[:2]
        both = candidate[first.name] != self.peaks[first.name] and candidate[second.name] != self.peaks[second.name]
        return cost * (1.1 if both and any(self.weights.values()) else 1.0)

    def __call__(self, candidate: Candidate, role: Role, bounds: Bounds) -> Outcome:
        """A trial: offload and warm steps, then three that count."""
        self.asked.append((role, dict(candidate)))
        if any(candidate[name] == value for name, value in self.broken.items()):
            self.now += 0.5 * TRIAL
            return Outcome(kind="failed", reason="the host arena is too small", wall=0.5 * TRIAL)
        slow = math.exp(self.random.gauss(0, self.noise)) * (1 + self.drift * math.sin(self.now / 40))
        seconds = self.seconds(candidate) * slow
        wall = TRIAL * (0.4 + 0.6 * seconds)
        self.now += wall
        return Outcome(kind="measured", seconds=seconds, samples=(seconds,), wall=wall)

    def best(self) -> float:
        """The least seconds of all candidates."""
        return min(map(self.seconds, self.space.all()))

    def search(self, seconds: float, **options: Any) -> Result:
        """Search for so long."""
        return Search(self, lambda effective: self.space, lambda: self.now, seconds=seconds, **options).run()


def grid(start: int = 0) -> Space:
    """162 candidates; the defaults are the middle of each, `start` is where a search begins."""
    settings = [
        Setting(name="memory.page_bytes", values=(256 * KIB, MIB, 4 * MIB), ordered=True),
        Setting(name="storage.request_bytes", values=(64 * KIB, 512 * KIB, 2 * MIB), ordered=True),
        Setting(name="storage.queue_depth", values=(1, 8, 32), ordered=True),
        Setting(name="update.placement", values=("after_backward", "in_forward", "in_backward"), ordered=False),
        Setting(name="storage.engine", values=("threads", "io_uring", "auto"), ordered=False),
    ]
    defaults = {setting.name: setting.values[1] for setting in settings}
    return Space(settings, {setting.name: setting.values[start] for setting in settings}, defaults)


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_it_finds_nearly_the_best_in_a_tenth_of_the_time(noise: float, start: int) -> None:
    """Of a sweep through all candidates. Landscapes are drawn; the median of them is held, and most of them."""
    reached = []
    for seed in range(40):
        land = Landscape(grid(start), seed, noise=noise, drift=0.1)
        sweep = sum(TRIAL * (0.4 + 0.6 * land.seconds(one)) for one in land.space.all())
        found = land.search(sweep / 10, repeats=1, seed=seed)
        assert land.now <= 1.1 * sweep / 10
        reached.append(land.best() / land.seconds(found.best))
    reached.sort()
    print(noise, start, [round(x, 2) for x in reached])
    assert reached[20] >= 0.95
