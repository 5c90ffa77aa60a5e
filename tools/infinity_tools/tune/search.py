"""Search for the fastest settings. The clock and the function that measures a candidate are passed in.

[Note: the search] A trial takes seconds and is noisy, and the speed of a machine drifts during the search. The search
therefore makes a few dozen trials and compares each with a measurement made next to it.

1. The start (the defaults, or the settings in a file) is measured first. If the start is the defaults, it is measured
   twice, because the first trial runs cold and two equal trials show the noise of the machine. Otherwise the defaults
   are measured next: they are good settings on most machines, and one trial may replace many.
2. One setting of the best candidate is changed at a time, first to the neighbors of its value and then to values
   further away. Values that were tried least, or with the least loss, come first.
3. The planner's prediction comes before a measurement. After one step, the plan of a candidate predicts its step time
   from the bandwidth and the computation time of the best candidate. A candidate that is predicted to be slower by a
   factor of `_SKIP` is not measured. A candidate whose first counted step takes `_SLOW` times as long as the best is
   stopped.
4. A candidate that is not faster is dropped. Otherwise it is measured again after the best candidate, and the mean of
   both ratios decides. It has to gain more than `GAIN` and more than the noise.
5. The best candidate is measured again every few trials. Ratios refer to its last measurement, so drift of the machine
   cancels out.
6. At the end, start and winner are measured alternately (`repeats`). The median of these ratios is the gain, and half
   their range is its spread. If the gain is below `GAIN` or below the spread, the start is kept.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from infinity_tools.tune.outcome import Bounds, Outcome, Result, Role, Trial
from infinity_tools.tune.search_space import AUTOMATIC, Candidate, Space, changes

GAIN = 0.01
"""Minimum gain, as a fraction of the step time. A smaller gain does not justify changing a setting."""
_SLOW, _SKIP = 1.5, 1.2
_AGAIN = 4
"""Number of trials after which the best candidate is measured again."""
_NOISE, _MOST_NOISE = 0.02, 0.2
"""Assumed noise of a ratio before the first repeated measurement, and its upper limit."""
_TRIED, _LOSS = 2.0, 10.0
"""Additions to the distance of a value: for each trial of the value, and for a trial that took twice as long."""
_MOST_RESERVED = 0.4
"""Maximum fraction of the time that is reserved for the final comparison."""


class SearchFailed(Exception):
    """Raised if the start cannot be measured."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


Measure = Callable[[Candidate, Role, Bounds], Outcome]
"""Function that trains with a candidate for a few steps. The outcome is ``failed`` if this is not possible."""


class Search:
    """A search for the fastest settings. See [Note: the search]."""

    def __init__(
        self,
        measure: Measure,
        make_space: Callable[[Mapping[str, Any]], Space],
        clock: Callable[[], float],
        *,
        seconds: float,
        repeats: int = 3,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        on_best: Callable[[float, Candidate], None] = lambda relative, best: None,
    ) -> None:
        """Prepare the search.

        Args:
            measure: Function that measures a candidate.
            make_space: Function that returns the search space, given the values chosen for automatic settings.
            clock: Function that returns the seconds since the search began.
            seconds: Time limit of the search.
            repeats: Number of final comparisons between start and winner.
            on_trial: Called after every trial.
            on_best: Called for every new best candidate with its step time relative to the start.
        """
        self._measure, self._make_space, self._clock = measure, make_space, clock
        self._on_trial, self._on_best = on_trial, on_best
        self._seconds, self._repeats = seconds, repeats
        self._effective: dict[str, Any] = {}
        self._space = make_space(self._effective)
        self.trials: list[Trial] = []
        self.best: dict[str, Any] = dict(self._space.start)
        """Best candidate so far."""
        self.relative = 1.0
        """Step time of the best candidate relative to the start."""
        self._shown = Outcome(kind="failed")  # last measurement of the best candidate
        self._age = 0  # number of trials since that measurement
        self._spread = [_NOISE]  # |log| of ratios of the same candidate

    @property
    def noise(self) -> float:
        """Approximate standard deviation of the step-time ratio of two trials of the same candidate."""
        return min(_MOST_NOISE, 1.48 * statistics.median(self._spread))

    def run(self) -> Result:
        """Search until time runs out or all single changes of the best candidate have been tried.

        Raises:
            SearchFailed: if the start cannot be measured.
        """
        self._begin()
        while self._has_time(1):
            if self._age >= _AGAIN:
                self._measure_best("again")
            elif (candidate := self._following()) is not None:
                self._challenge(candidate, "change")
            else:
                break
        gains = self._compare()
        return self._result(gains)

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
        self._space = self._make_space(self._effective)

    def _following(self) -> dict[str, Any] | None:
        """Return the next single change of the best candidate, or None if all have been tried."""
        tried = {self._space.key(trial.candidate) for trial in self.trials}
        costs: defaultdict[tuple[str, Any], float] = defaultdict(float)
        for trial in self.trials:
            if trial.role == "change":
                loss = 1.0 if trial.ratio is None else min(1.0, max(0.0, trial.ratio - 1))
                costs[next(iter(trial.changes.items()))] += _TRIED + _LOSS * loss
        scored = [
            (setting.distance(self.best[setting.name], value) + costs[setting.name, value], setting.name, value)
            for setting in self._space.settings
            for value in setting.values
            if self._space.key({**self.best, setting.name: value}) not in tried
        ]
        if not scored:
            return None
        _, name, value = min(scored, key=lambda row: row[0])
        return {**self.best, name: value}

    def _challenge(self, candidate: dict[str, Any], role: Role) -> None:
        outcome = self._try(candidate, role, self._bounds())
        if outcome.kind != "measured":
            return
        ratio = outcome.seconds / self._shown.seconds
        if ratio < 1 - max(GAIN, self.noise / 2) and self._has_time(2):
            self._measure_best("again")
            outcome = self._try(candidate, "again", self._bounds(skip=False))
            if not outcome.counts:
                return
            ratio = (ratio + outcome.seconds / self._shown.seconds) / 2
        if ratio < 1 - max(GAIN, self.noise):
            self.best, self.relative, self._shown, self._age = candidate, self.relative * ratio, outcome, 0
            self._on_best(self.relative, self.best)

    def _compare(self) -> tuple[float, ...]:
        """Measure the start and the best candidate alternately. Without a gain, the start becomes the best candidate
        again.
        """
        gains: list[float] = []
        start = dict(self._space.start)
        if self.best == start:
            return ()
        winner = self._shown
        for number in range(self._repeats):
            if number and self._clock() + 2 * self._trial_seconds() > self._seconds:
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
            changes=changes(candidate, self.best),
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
        """Return the step time relative to the best candidate's: measured, or predicted if the trial was skipped."""
        shown = self._shown
        if outcome.counts and shown.counts:
            return outcome.seconds / shown.seconds
        return outcome.predicted / shown.predicted if outcome.kind == "skipped" and shown.predicted else None

    def _measure_best(self, role: Role) -> None:
        """Measure the best candidate again, which shows the drift and the noise of the machine."""
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

    def _has_time(self, trials: int) -> bool:
        """Return whether this many trials fit before the final comparison."""
        return self._clock() + trials * self._trial_seconds() + self._comparing_seconds() <= self._seconds

    def _trial_seconds(self) -> float:
        walls = [trial.outcome.wall for trial in self.trials[-8:] if trial.outcome.kind == "measured"]
        return statistics.median(walls) if walls else 0.0

    def _comparing_seconds(self) -> float:
        """Return the time reserved for the final comparison, at most a fraction of the total."""
        if self.best == self._space.start:
            return 0.0
        walls = {self._space.key(trial.candidate): trial.outcome.wall for trial in self.trials if trial.outcome.counts}
        once = sum(walls.get(self._space.key(one), 0.0) for one in (self._space.start, self.best))
        return max(once, min(self._repeats * once, _MOST_RESERVED * self._seconds))

    def _result(self, gains: tuple[float, ...]) -> Result:
        start = self._space.key(self._space.start)
        measured = [trial for trial in self.trials if trial.outcome.counts and trial.relative is not None]
        worst = max(trial.relative or 0.0 for trial in measured)
        last = [trial for trial in measured if self._space.key(trial.candidate) == start][-1]
        return Result(
            start=dict(self._space.start),
            best=self.best,
            gains=gains,
            noise=self.noise,
            step_seconds=self._shown.seconds if self.best != self._space.start else last.outcome.seconds,
            start_seconds=last.outcome.seconds,
            worst_ratio=max(1.0, worst / self.relative),
            tried=len({self._space.key(trial.candidate) for trial in measured}),
        )
