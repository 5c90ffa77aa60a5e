"""Inputs and outcomes of trials."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["measured", "slow", "skipped", "failed"]
"""``slow``: stopped after the first counted step. ``skipped``: stopped before it because the plan predicts a much
longer step. ``failed``: training with these settings is not possible."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits above which a trial is stopped early."""

    slow_above: float = 0.0
    """Step time in seconds above which a trial stops after one counted step; 0: never."""
    skip_above: float = 0.0
    """Predicted step time in seconds above which a trial stops before it is measured; 0: never."""
    bandwidth: float = 0.0
    """Bandwidth of the drives for the prediction, in bytes per second."""
    computation: float = 0.0
    """Step time without stalls for the prediction, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a trial."""

    kind: Kind
    seconds: float = 0.0
    """Step time in seconds: median of the counted steps."""
    predicted: float = 0.0
    """Step time in seconds predicted by the planner from the bandwidth and computation time of this trial, or from
    `Bounds` if the trial was skipped; 0 if no data is transferred.
    """
    bandwidth: float = 0.0
    """Bytes per second while pages were in transfer."""
    computation: float = 0.0
    """Step time without stalls, in seconds."""
    total_written: int = 0
    """Bytes written to the drives by the whole trial."""
    wall: float = 0.0
    """Duration of the whole trial, in seconds."""
    effective: dict[str, Any] = field(default_factory=dict)
    """Values that infinity chose for automatic settings."""
    reason: str = ""
    """Reason for a failure."""
    usage: bool = False
    """Whether the failure is caused by the requested settings rather than by a bug."""

    @property
    def counts(self) -> bool:
        """Whether steps were measured."""
        return self.kind in ("measured", "slow")


Role = Literal["start", "defaults", "change", "again", "compare"]
"""Purpose of a trial."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial and its result relative to other trials."""

    number: int
    """Number of the trial, from 1."""
    role: Role
    candidate: dict[str, Any]
    """Settings of the trial."""
    changes: dict[str, Any]
    """Settings that differ from the best candidate at that time; empty for that candidate itself."""
    outcome: Outcome
    ratio: float | None
    """Step time relative to the most recent measurement of the best candidate; None if the trial was not measured."""
    relative: float | None
    """Step time relative to the start, as the product of all ratios up to this trial."""
    best_relative: float
    """Step time of the best candidate before this trial, relative to the start."""
    at: float
    """End of the trial in seconds since the search began."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a search."""

    start: dict[str, Any]
    best: dict[str, Any]
    """The winner, or the start if no candidate was faster."""
    gains: tuple[float, ...]
    """Step time of the start divided by the winner's, for every final comparison."""
    noise: float
    """Noise in the step-time ratio of two trials of the same candidate."""
    step_seconds: float
    """Last measured step time of the winner, in seconds."""
    start_seconds: float
    """Step time of the start, in seconds."""
    worst_ratio: float
    """Step time of the slowest candidate relative to the winner."""
    tried: int
    """Number of different candidates that were measured."""

    @property
    def gain(self) -> float:
        """Step time of the start divided by the winner's; median of the final comparisons."""
        return statistics.median(self.gains) if self.gains else 1.0

    @property
    def is_faster(self) -> bool:
        """Whether any candidate was faster than the start."""
        return self.best != self.start
