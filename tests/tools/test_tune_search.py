"""Tests of the search in `infinity tune` on synthetic landscapes with noise, drift and interactions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import pytest

from infinity.units import GIB, KIB, MIB
from infinity_tools.tune.outcome import Bounds, Outcome, Result, Role
from infinity_tools.tune.search import Search, SearchFailed
from infinity_tools.tune.search_space import Candidate, Limits, Setting, Space, make_space

TRIAL = 3.0
"""Approximate duration of a trial with steps of one second, in seconds."""


DEFAULTS = {
    "update.schedule": "auto", "memory.page_bytes": 0, "storage.request_bytes": 2 * MIB, "storage.queue_depth": 32,
    "update.cores": -1, "storage.engine": "auto", "state.format": "fp32", "memory.host_bytes": 2 * GIB,
}  # fmt: skip
"""Default values of the tuned settings."""


def candidates(space: Space) -> list[dict[str, Any]]:
    """Return all candidates of a space."""
    rows = product(*(setting.values for setting in space.settings))
    return [dict(zip((setting.name for setting in space.settings), row, strict=True)) for row in rows]


class Landscape:
    """Synthetic step times: each setting has a best value, and noise and drift are added."""

    def __init__(self, space: Space, seed: int, *, noise: float = 0.02, drift: float = 0.0, flat: bool = False) -> None:
        self.space, self.noise, self.drift = space, noise, drift
        self.random = random.Random(seed)
        self.now, self.asked = 0.0, []
        self.weights = {setting.name: 0.0 if flat else self.random.uniform(0.02, 0.25) for setting in space.settings}
        self.peaks = {setting.name: self.random.choice(setting.values) for setting in space.settings}
        self.broken: dict[str, Any] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Return the step time without noise or drift."""
        cost = 1.0
        for setting in self.space.settings:
            away = setting.distance(self.peaks[setting.name], candidate[setting.name])
            if candidate[setting.name] != self.peaks[setting.name]:
                cost *= 1 + self.weights[setting.name] * away
        first, second = self.space.settings[:2]
        both = candidate[first.name] != self.peaks[first.name] and candidate[second.name] != self.peaks[second.name]
        return cost * (1.1 if both and any(self.weights.values()) else 1.0)

    def __call__(self, candidate: Candidate, role: Role, bounds: Bounds) -> Outcome:
        """Return the outcome of a simulated trial."""
        self.asked.append((role, dict(candidate)))
        if any(candidate[name] == value for name, value in self.broken.items()):
            self.now += 0.5 * TRIAL
            return Outcome(kind="failed", reason="the host cache is too small", wall=0.5 * TRIAL)
        slow = math.exp(self.random.gauss(0, self.noise)) * (1 + self.drift * math.sin(self.now / 40))
        seconds = self.seconds(candidate) * slow
        wall = TRIAL * (0.4 + 0.6 * seconds)
        self.now += wall
        return Outcome(kind="measured", seconds=seconds, wall=wall)

    def best(self) -> float:
        """Return the shortest step time of all candidates."""
        return self.seconds(self.peaks)

    def search(self, seconds: float, **options: Any) -> Result:
        """Run a search for this many seconds."""
        return Search(self, lambda effective: self.space, lambda: self.now, seconds=seconds, **options).run()


def grid(start: int = 0) -> Space:
    """Return 162 candidates whose defaults are the middle values; `start` selects the initial values."""
    settings = [
        Setting(name="memory.page_bytes", values=(256 * KIB, MIB, 4 * MIB), ordered=True),
        Setting(name="storage.request_bytes", values=(64 * KIB, 512 * KIB, 2 * MIB), ordered=True),
        Setting(name="storage.queue_depth", values=(1, 8, 32), ordered=True),
        Setting(name="update.schedule", values=("after_backward", "in_forward", "in_backward"), ordered=False),
        Setting(name="storage.engine", values=("threads", "io_uring", "auto"), ordered=False),
    ]
    defaults = {setting.name: setting.values[1] for setting in settings}
    return Space(settings, {setting.name: setting.values[start] for setting in settings}, defaults)


def test_search_finds_near_optimum_in_tenth_of_sweep_time(subtests: pytest.Subtests) -> None:
    """On a machine that drifts by 10 %, this must succeed in at least `most` of 40 landscapes."""
    for noise, start, most in [(0.0, 1, 34), (0.02, 0, 30), (0.02, 1, 30), (0.02, 2, 30), (0.05, 1, 18)]:
        with subtests.test(noise=noise, start=start):
            reached = 0
            for seed in range(40):
                land = Landscape(grid(start), seed, noise=noise, drift=0.1)
                sweep = sum(TRIAL * (0.4 + 0.6 * land.seconds(one)) for one in candidates(land.space))
                found = land.search(sweep / 10, repeats=1)
                assert land.now <= 1.1 * sweep / 10
                reached += land.best() / land.seconds(found.best) >= 0.95
            assert reached >= most


def test_search_finds_near_optimum_of_real_space() -> None:
    """The search takes half an hour of simulated time."""
    limits = Limits(host_bytes=2 * GIB, cores=8, formats="any")
    start = dict(make_space(DEFAULTS, limits, {}).start)
    reached = []
    for seed in range(10):
        land = Landscape(make_space(start, limits, {}), seed, noise=0.02)
        found = land.search(600 * TRIAL)
        reached.append(land.best() / land.seconds(found.best))
    assert sorted(reached)[2] >= 0.95, reached


def test_false_gains_are_rare() -> None:
    """At most 10 of 100 flat landscapes report a gain."""
    wrong = [seed for seed in range(100) if Landscape(grid(1), seed, noise=0.03, flat=True).search(180).is_faster]
    assert len(wrong) <= 10, wrong


def test_failed_candidate_does_not_stop_search() -> None:
    land = Landscape(grid(1), 3)
    land.broken = {"memory.page_bytes": 4 * MIB}
    search = Search(land, lambda effective: land.space, lambda: land.now, seconds=60 * TRIAL)
    found = search.run()
    kinds = {trial.outcome.kind for trial in search.trials}
    assert kinds == {"measured", "failed"}
    assert found.best["memory.page_bytes"] != 4 * MIB
    assert {trial.relative for trial in search.trials if trial.outcome.kind == "failed"} == {None}


def test_failed_start_stops_search() -> None:
    land = Landscape(grid(1), 0)
    land.broken = {"memory.page_bytes": land.space.start["memory.page_bytes"]}
    with pytest.raises(SearchFailed, match="host cache is too small"):
        land.search(60 * TRIAL)


def test_best_candidate_is_remeasured_regularly() -> None:
    """Ratios compare trials that are close in time, and the final comparison alternates start and winner."""
    land = Landscape(grid(1), 1, noise=0.01)
    found = land.search(80 * TRIAL, repeats=5)
    roles = [role for role, _ in land.asked]
    best = [number for number, role in enumerate(roles) if role in ("start", "again", "compare")]
    assert all(after - before <= 10 for before, after in pairwise(best)), (
        "5 trials, and 5 more if one of them became the best"
    )
    rounds = [candidate for role, candidate in land.asked if role == "compare"]
    assert rounds == [found.start, found.best] * 5
    assert len(found.gains) == 5
    assert found.gain == pytest.approx(land.seconds(found.start) / land.seconds(found.best), rel=0.03)


def test_short_search_measures_only_the_start() -> None:
    land = Landscape(grid(1), 0)
    found = land.search(TRIAL / 2)
    assert len(land.asked) == 1
    assert not found.is_faster
    assert found.tried == 1


def test_search_ends_after_all_candidates() -> None:
    settings = [Setting(name="storage.queue_depth", values=(8, 16, 32), ordered=True)]
    space = Space(settings, {"storage.queue_depth": 32}, {"storage.queue_depth": 32})
    seen: list[Candidate] = []

    def measure(candidate: Candidate, role: Role, bounds: Bounds) -> Outcome:
        seen.append(dict(candidate))
        return Outcome(kind="measured", seconds=1.0, wall=1.0)

    found = Search(measure, lambda effective: space, lambda: float(len(seen)), seconds=1000).run()
    assert found.tried == 3
    assert len(seen) < 10


def test_candidates_with_slow_predictions_are_skipped() -> None:
    """The bounds come from the best trial so far."""
    asked: list[Bounds] = []
    space = grid(1)

    def measure(candidate: Candidate, role: Role, bounds: Bounds) -> Outcome:
        asked.append(bounds)
        if role == "change" and candidate["update.schedule"] == "after_backward":
            return Outcome(kind="skipped", predicted=2.0, wall=1.0)
        return Outcome(kind="measured", seconds=1.0, predicted=0.9, bandwidth=3e9, computation=0.5, wall=3.0)

    search = Search(measure, lambda effective: space, lambda: 3.0 * len(asked), seconds=90)
    found = search.run()
    assert (asked[0].skip_above, asked[0].slow_above) == (0.0, 0.0), "the start is always measured"
    assert (asked[2].bandwidth, asked[2].computation) == (3e9, 0.5)
    assert (asked[2].skip_above, asked[2].slow_above) == (pytest.approx(1.08), pytest.approx(1.5))
    skipped = [trial for trial in search.trials if trial.outcome.kind == "skipped"]
    assert skipped
    assert all(trial.ratio == pytest.approx(2.0 / 0.9) for trial in skipped)
    assert not found.is_faster


def space_of(effective: Mapping[str, Any] | None = None, **limits: Any) -> Space:
    """Return the real search space, starting at the defaults."""
    limits = {"host_bytes": 2 * GIB, "cores": 2, **limits}
    return make_space({**DEFAULTS, "memory.host_bytes": limits["host_bytes"]}, Limits(**limits), effective or {})


def values(space: Space, name: str) -> tuple[Any, ...]:
    """Return the values of a setting, or an empty tuple if it is not tuned."""
    return next((setting.values for setting in space.settings if setting.name == name), ())


def test_host_memory_is_never_exceeded() -> None:
    """Pages are small enough for eight cache slots."""
    for host in (1 * MIB, 64 * MIB, GIB):
        space = space_of(host_bytes=host)
        assert max((*values(space, "memory.host_bytes"), host)) == host
        assert all(page <= host // 8 for page in values(space, "memory.page_bytes"))


def test_state_formats_require_permission() -> None:
    allowed = {"same": (), "split": ("fp32", "split"), "any": ("fp32", "split", "bf16-moments", "8bit")}
    assert {name: values(space_of(formats=name), "state.format") for name in allowed} == allowed


def test_rounding_format_changes_only_with_permission() -> None:
    """Changing back to fp32 would change the training as well."""
    start = {**DEFAULTS, "state.format": "8bit"}
    for allowed in ("same", "split"):
        space = make_space(start, Limits(host_bytes=2 * GIB, cores=2, formats=allowed), {})
        assert not values(space, "state.format")
        assert space.defaults["state.format"] == "8bit"


def test_clipping_excludes_updates_in_backward() -> None:
    """These updates would run before the gradient norm is known."""
    assert "in_backward" in values(space_of(), "update.schedule")
    assert "in_backward" not in values(space_of(clipping=True), "update.schedule")


def test_equivalent_candidates_are_tried_once() -> None:
    """Automatic values equal their effective values, and requests are limited to the page size."""
    found = {
        "update.schedule": "in_backward", "memory.page_bytes": MIB, "update.cores": 1, "storage.engine": "io_uring",
    }  # fmt: skip
    space = space_of(found)
    assert values(space, "update.schedule") == ("auto", "in_forward", "after_backward")
    assert values(space, "storage.engine") == ("auto", "threads")
    assert values(space, "update.cores") == (-1, 0, 2)
    pages = values(space, "memory.page_bytes")
    assert MIB not in pages
    assert pages[:4] == (256 * KIB, 512 * KIB, 0, 2 * MIB), "0 (automatic) is sorted by its effective size"
    small = {**DEFAULTS, "memory.page_bytes": 256 * KIB}
    assert space.key({**small, "storage.request_bytes": MIB}) == space.key({**small, "storage.request_bytes": 2 * MIB})
    assert space.key({**DEFAULTS, "storage.request_bytes": MIB}) == space.key(DEFAULTS)


def test_defaults_can_win_over_start() -> None:
    """They are measured after the start, and the search then continues from them."""
    space = grid(1)
    start = {**space.defaults, "storage.queue_depth": 1}
    land = Landscape(Space(space.settings, start, space.defaults), 3, noise=0.0)
    land.peaks, land.weights = dict(space.defaults), dict.fromkeys(space.defaults, 0.25)
    found = land.search(40 * TRIAL, repeats=1)
    assert found.best == space.defaults
    assert land.asked[1][0] == "defaults"
