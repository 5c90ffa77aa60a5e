"""What is asked of a trial, and what comes back: plain data, so that a journal can keep it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["measured", "slow", "skipped", "failed"]
"""`slow`: broken off after the first counted step; `skipped`: before it, since the plan predicts much more; `failed`:
cannot be trained with."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """When a trial is not worth its time any more."""

    slow_above: float = 0.0
    """Seconds of a step above which one counted step is enough; 0: never."""
    skip_above: float = 0.0
    """Predicted seconds of a step above which none is taken; 0: never."""
    bandwidth: float = 0.0
    """Bytes per second of the drives, for that prediction."""
    computation: float = 0.0
    """Seconds of a step that are no waiting, for that prediction."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one trial has shown."""

    kind: Kind
    seconds: float = 0.0
    """Of a step: the median of those counted."""
    samples: tuple[float, ...] = ()
    """Seconds of every counted step."""
    stall_seconds: float = 0.0
    """Of a step: waiting for pages; the median."""
    read_bytes: int = 0
    """Of a step."""
    written_bytes: int = 0
    """Of a step."""
    predicted: float = 0.0
    """Seconds of a step by the planner's clock, with the bandwidth and computation of this trial, or those that it
    was given where it was skipped; 0: nothing is moved."""
    bandwidth: float = 0.0
    """Bytes per second while pages were on their way."""
    computation: float = 0.0
    """Seconds of a step that were no waiting."""
    total_written: int = 0
    """Bytes that the whole trial has written to the drives."""
    wall: float = 0.0
    """Seconds that the whole trial took."""
    effective: dict[str, Any] = field(default_factory=dict)
    """What the settings came to that are left to infinity."""
    reason: str = ""
    """Why it failed."""
    usage: bool = False
    """Whether it failed because of what was asked for, and not because something broke."""

    @property
    def counts(self) -> bool:
        """Whether steps were measured."""
        return self.kind in ("measured", "slow")


Role = Literal["start", "defaults", "change", "again", "put back", "compare"]
"""Why a trial was made."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial, with what it says about the candidate."""

    number: int
    """Counted from 1."""
    role: Role
    candidate: dict[str, Any]
    """Its settings."""
    changes: dict[str, Any]
    """Those that differ from the best so far at that time; none for that itself."""
    outcome: Outcome
    ratio: float | None
    """Seconds over those of the best so far next to it; None where there are none."""
    relative: float | None
    """Seconds over those of the start, by the ratios on the way."""
    best_relative: float
    """The same of what was the best so far before this trial."""
    at: float
    """Seconds since the search began, at the trial's end."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search has found."""

    start: dict[str, Any]
    best: dict[str, Any]
    """The winner; the start where nothing was faster."""
    gains: tuple[float, ...]
    """Seconds of the start over those of the winner, of every comparison at the end."""
    noise: float
    """Of a ratio of two trials."""
    step_seconds: float
    """Of the winner, measured last."""
    start_seconds: float
    """Of the start."""
    worst: dict[str, Any]
    """The slowest candidate that was measured."""
    worst_ratio: float
    """Its seconds over those of the winner."""
    complete: bool
    """Whether there was nothing left to try before the time was over."""
    tried: int
    """Different candidates that were measured."""
    put_back: dict[str, float] = field(default_factory=dict)
    """Settings that looked faster and were put back, with what that cost: a ratio of seconds."""

    @property
    def gain(self) -> float:
        """Seconds of the start over those of the winner; the median."""
        return statistics.median(self.gains) if self.gains else 1.0

    @property
    def is_faster(self) -> bool:
        """Whether anything was faster than the start."""
        return self.best != self.start
