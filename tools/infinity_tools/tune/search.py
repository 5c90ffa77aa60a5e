"""The search for the fastest settings: pure, given a function that measures a candidate and a clock.

[Note: the search] A trial costs seconds and is noisy, and machines get slower and faster while one looks; so there are
a few dozen trials, and each counts as a ratio to what was measured next to it.

1. The start (the defaults, or the settings of a file) is measured first. Where it is the defaults, it is measured once
   more, as the first trial is a cold one, and two of the same show how noisy the machine is. Else the defaults come
   next: they are good settings on most machines, and one trial may replace many.
2. From the best so far one setting is changed at a time (`Proposals`): first the neighbours of its value, then values
   further away; those that have been tried the least, or with the least loss, come first, and the direction that has
   just helped goes on. When all single changes have been tried, pairs of those that lost the least are drawn.
3. The planner's clock comes before the drive: with the bandwidth and computation of the best so far, the plan of a
   candidate says after one step what it would take. What it finds slower by `_SKIP` is not measured. What takes `_SLOW`
   times as long as the best in its first counted step is broken off.
4. Few trials for many candidates, more for those that look good: one that was not faster is gone. One that was, by less
   than the noise could be, is measured again behind the best so far; the median of the ratios decides. It has to
   gain `GAIN`, and more than the noise.
5. The best so far is measured again every few trials. Ratios are to its last measurement, so the machine's drift
   cancels.
6. At the end every changed setting is put back once, and stays so unless that costs `GAIN`. Then start and winner are
   measured in turn (`repeats`): the median of these ratios is the gain, their range its spread. A gain below `GAIN`, or
   below the spread, is none: the start stays.

Nothing in it is drawn but pairs, from a seed. With equal answers it asks equal questions, so a journal can resume it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from infinity_tools.tune.outcome import Bounds, Outcome, Result, Role, Trial
from infinity_tools.tune.proposals import Proposals
from infinity_tools.tune.search_space import AUTOMATIC, Candidate, Space

GAIN = 0.01
"""A change that saves less than this part of a step is not worth a line in a file."""
_SLOW, _SKIP = 1.5, 1.2
_AGAIN = 4
"""Trials after which the best so far is measured again."""
_ROUNDS = 1
"""How often a promising candidate is measured again, in turn with the best so far."""
_NOISE, _MOST_NOISE = 0.02, 0.2
"""Of a ratio, before anything is known of it, and at most."""
_SURE, _SURE_NOISES = 0.05, 2.5
"""A gain that needs no second measurement: so much, and so many times the noise."""
_MOST_RESERVED = 0.4
"""Part of the time that is kept for the comparison at the end, at most."""


class SearchFailed(Exception):
    """The start itself cannot be measured."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Measure(Protocol):
    """Trains with a candidate for some steps."""

    def __call__(self, candidate: Candidate, role: Role, bounds: Bounds, /) -> Outcome:
        """Return what that has shown; what cannot be trained with is an outcome too."""


class Search:
    """One search, see [Note: the search]."""

    def __init__(
        self,
        measure: Measure,
        make_space: Callable[[Mapping[str, Any]], Space],
        clock: Callable[[], float],
        *,
        seconds: float,
        repeats: int = 3,
        seed: int = 0,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        on_best: Callable[[float, Candidate], None] = lambda relative, best: None,
    ) -> None:
        """Begin nothing yet.

        Args:
            make_space: makes the space, given what automatic values have come to.
            clock: seconds since the search began.
            seconds: that it may take.
            repeats: comparisons of start and winner at the end.
            seed: of what is drawn.
            on_trial: is told of every trial.
            on_best: is told of every new best, and of its seconds over those of the start.
        """
        self._measure, self._make_space, self._clock = measure, make_space, clock
        self._on_trial, self._on_best = on_trial, on_best
        self._seconds, self._repeats = seconds, repeats
        self._effective: dict[str, Any] = {}
        self._space = make_space(self._effective)
        self.trials: list[Trial] = []
        self.best: dict[str, Any] = dict(self._space.start)
        """The best so far."""
        self.relative = 1.0
        """Its seconds over those of the start."""
        self._home = self.best  # what settings are put back to: the start, or the defaults if they were faster
        self._shown = Outcome(kind="failed")  # what the last measurement of the best so far has shown
        self._age = 0  # trials since then
        self._spread = [_NOISE]  # |log| of ratios of the same candidate
        self._proposals = Proposals(self._space, seed)
        self._put_back: dict[str, float] = {}

    @property
    def noise(self) -> float:
        """By how much a ratio of two trials of the same candidate differs from one: about one standard deviation."""
        return min(_MOST_NOISE, 1.48 * statistics.median(self._spread))

    def run(self) -> Result:
        """Search until the time is over or nothing is left to try.

        Raises:
            SearchFailed: the start cannot be measured.
        """
        self._begin()
        complete = False
        while self._has_time(1):
            if self._age >= _AGAIN:
                self._measure_best("again")
                continue
            following = self._proposals.following(self.best)
            if following is None:
                complete = True
                break
            self._challenge(following, "change")
        self._put_settings_back()
        gains = self._compare()
        return self._result(gains, complete)

    # Parts of a search #

    def _begin(self) -> None:
        outcome = self._try(self.best, "start", Bounds())
        if not outcome.counts:
            raise SearchFailed(outcome)
        self._shown = outcome
        if not self._has_time(1):
            return
        if self._space.defaults == self._space.start:
            self._measure_best("start")
        else:
            self._challenge(dict(self._space.defaults), "defaults")
            self._home = self.best
        self._space = self._proposals.space = self._make_space(self._effective)

    def _challenge(self, candidate: dict[str, Any], role: Role) -> None:
        """Measure a candidate against the best so far, as often as it takes; it may become that."""
        changes = self._space.changes(candidate, self.best)
        outcome = self._try(candidate, role, self._bounds())
        ratio = self._ratio(outcome)
        ratios = [] if ratio is None else [ratio]
        self._proposals.note(changes, ratios[0] if ratios else math.inf)
        if outcome.kind != "measured":
            return
        while len(ratios) <= _ROUNDS and self._is_promising(ratios) and not self._is_sure(ratios):
            if not self._has_time(2):
                break
            self._measure_best("again")
            outcome = self._try(candidate, "again", self._bounds(skip=False))
            if not outcome.counts:
                return
            ratios.append(outcome.seconds / self._shown.seconds)
        ratio = statistics.median(ratios)
        if ratio < 1 - max(GAIN, self.noise):
            self._proposals.follow(changes, self.best)
            self.best, self.relative, self._shown, self._age = candidate, self.relative * ratio, outcome, 0
            self._on_best(self.relative, self.best)

    def _is_promising(self, ratios: list[float]) -> bool:
        return statistics.median(ratios) < 1 - max(GAIN, self.noise / 2)

    def _is_sure(self, ratios: list[float]) -> bool:
        return statistics.median(ratios) < 1 - max(_SURE, _SURE_NOISES * self.noise)

    def _put_settings_back(self) -> None:
        """Put back what does not help any more; of a single change that is what the comparison shows."""
        for name in self._changes_to_put_back():
            if not self._changes_to_put_back() or not self._has_time(1, self._comparing_seconds()):
                return
            candidate = {**self.best, name: self._home[name]}
            outcome = self._try(candidate, "put back", self._bounds(skip=False))
            if outcome.kind == "measured" and (ratio := outcome.seconds / self._shown.seconds) < 1 + GAIN:
                self.best, self.relative, self._shown = candidate, self.relative * ratio, outcome
                self._put_back[name] = ratio

    def _changes_to_put_back(self) -> dict[str, Any]:
        if len(self._space.changes(self.best, self._space.start)) < 2:
            return {}
        return self._space.changes(self.best, self._home)

    def _compare(self) -> tuple[float, ...]:
        """Measure start and best in turn; the start is the best again where there is no gain."""
        gains: list[float] = []
        start = dict(self._space.start)
        if self.best == start:
            return ()
        winner = self._shown
        for number in range(self._repeats):
            if number and not self._has_time(2, 0.0):
                break
            before = self._try(start, "compare", Bounds())
            after = self._try(self.best, "compare", Bounds())
            if before.counts and after.counts:
                winner = after
                gains.append(before.seconds / after.seconds)
        spread = (max(gains) - min(gains)) / 2 if len(gains) > 1 else self.noise
        if not gains or statistics.median(gains) < 1 + max(GAIN, spread):
            self.best, self.relative = start, 1.0
        else:
            self.relative, self._shown = 1 / statistics.median(gains), winner
        return tuple(gains)

    # Trials #

    def _try(self, candidate: dict[str, Any], role: Role, bounds: Bounds) -> Outcome:
        outcome = self._measure(candidate, role, bounds)
        self._proposals.tried.append(dict(candidate))
        self._age += 1
        if outcome.counts:
            self._effective |= {
                name: value
                for name, value in outcome.effective.items()
                if name in AUTOMATIC and candidate[name] == AUTOMATIC[name]
            }
        ratio = self._ratio(outcome)
        start = 1.0 if candidate == self._space.start else None
        trial = Trial(
            number=len(self.trials) + 1,
            role=role,
            candidate=dict(candidate),
            changes=self._space.changes(candidate, self.best),
            outcome=outcome,
            ratio=ratio,
            relative=start or (None if ratio is None else ratio * self.relative),
            best_relative=self.relative,
            at=self._clock(),
        )
        self.trials.append(trial)
        self._on_trial(trial)
        return outcome

    def _ratio(self, outcome: Outcome) -> float | None:
        """Return the seconds of a step over those of the best so far: as measured, or as both are predicted."""
        shown = self._shown
        if outcome.counts and shown.counts:
            return outcome.seconds / shown.seconds
        return outcome.predicted / shown.predicted if outcome.kind == "skipped" and shown.predicted else None

    def _measure_best(self, role: Role) -> None:
        """Measure the best so far again, which says how far the machine has drifted, and how noisy it is."""
        outcome = self._try(self.best, role, Bounds())
        if outcome.counts:
            self._spread.append(abs(math.log(outcome.seconds / self._shown.seconds)))
            self._shown = outcome
        self._age = 0

    def _bounds(self, *, skip: bool = True) -> Bounds:
        shown = self._shown
        return Bounds(
            slow_above=_SLOW * shown.seconds,
            skip_above=_SKIP * shown.predicted if skip else 0.0,
            bandwidth=shown.bandwidth,
            computation=shown.computation,
        )

    # Time #

    def _has_time(self, trials: int, kept: float | None = None) -> bool:
        """Whether so many trials fit before what is kept: by default for all that comes at the end."""
        if kept is None:
            kept = self._comparing_seconds() + len(self._changes_to_put_back()) * self._trial_seconds()
        return self._clock() + trials * self._trial_seconds() + kept <= self._seconds

    def _trial_seconds(self) -> float:
        walls = [trial.outcome.wall for trial in self.trials[-8:] if trial.outcome.kind == "measured"]
        return statistics.median(walls) if walls else 0.0

    def _comparing_seconds(self) -> float:
        """Return what the comparison at the end takes, at most a part of all."""
        if self.best == self._space.start:
            return 0.0
        walls = {self._space.key(trial.candidate): trial.outcome.wall for trial in self.trials if trial.outcome.counts}
        once = sum(walls.get(self._space.key(one), 0.0) for one in (self._space.start, self.best))
        return max(once, min(self._repeats * once, _MOST_RESERVED * self._seconds))

    def _result(self, gains: tuple[float, ...], complete: bool) -> Result:
        start = self._space.key(self._space.start)
        measured = [trial for trial in self.trials if trial.outcome.counts and trial.relative is not None]
        worst = max(measured, key=lambda trial: trial.relative or 0.0)
        last = [trial for trial in measured if self._space.key(trial.candidate) == start][-1]
        return Result(
            start=dict(self._space.start),
            best=self.best,
            gains=gains,
            noise=self.noise,
            step_seconds=self._shown.seconds if self.best != self._space.start else last.outcome.seconds,
            start_seconds=last.outcome.seconds,
            worst=worst.candidate,
            worst_ratio=max(1.0, (worst.relative or 1.0) / self.relative),
            complete=complete,
            tried=len({self._space.key(trial.candidate) for trial in measured}),
            put_back=self._put_back,
        )
