"""How fast each run may use a drive that several of them share.

The aim is max-min fairness with weights: of the runs that stand still for want of the drive, the one that has got least
for its weight goes as fast as it can, and no other gets more for its own. So nothing has to be known of how fast the
drive is, nothing of it is left unused, and a run that is alone is never held back. Rates move towards the aim by a
twentieth per second (`Fairness.observe`), because a run that computes most of the time stands still only now and
then: it is to get what it needs, and the others all the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from infinity.telemetry import BY_NAME, Snapshot
from infinity.telemetry.stats_cells import label_sets

Rank = tuple[str, int]
"""Run id and rank."""

SMOOTH_SECONDS: Final = 3.0
"""Over how long what a run does is averaged: a few passes of a short step."""
_WANTS: Final = 0.1
"""Share of the time that a training thread stands still for pages, from which on its run wants more of the drive."""
_AHEAD: Final = 1.03
"""How far a run may be ahead of the one that has got least: what is only noise is to slow nobody down."""
_DOWN: Final = 0.95
_UP: Final = 1.05
"""How much a rate changes in a second, at most."""
_BEHIND: Final = 1.1
"""How much the rate of the run that has got least rises in a second."""
_UNUSED: Final = 0.8
"""A rate of which less is used holds nobody back, and is taken away when nobody wants more."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a rank has done since it began, as its stats page says."""

    moved: Mapping[str, float]
    """Bytes read and written, by drive."""
    stalled: float
    """Seconds that its training thread stood still for pages."""
    weight: float = 1.0
    """`storage.weight` of its run."""


def usages(pages: Iterable[Snapshot], drive_of: Callable[[str], str | None]) -> dict[Rank, Usage]:
    """Return what the ranks of some stats pages have done.

    `drive_of` gives the name of the drive that a path is on, or None.
    """
    found: dict[Rank, Usage] = {}
    stalls, transfers = BY_NAME["stall_seconds_total"], BY_NAME["io_bytes_total"]
    for page in pages:
        devices = page.header.devices
        drives = dict(zip(devices, map(drive_of, page.header.paths), strict=False))
        moved: dict[str, float] = defaultdict(float)
        for values in label_sets(transfers, devices):
            drive = drives.get(dict(zip(transfers.label_names, values, strict=True))["device"])
            if drive is not None:
                moved[drive] += page.value_at(transfers, values)
        stalled = sum(page.value_at(stalls, values) for values in label_sets(stalls, devices))
        found[page.header.run_id, page.header.rank] = Usage(
            moved=dict(moved), stalled=stalled, weight=page.header.weight
        )
    return found


@dataclass(kw_only=True)
class _Run:
    """What a run does on its drives, averaged; changed by `Fairness.observe`."""

    ranks: dict[int, Usage] = field(default_factory=dict)
    """Of its live ranks, by rank, when they were last looked at."""
    rate: dict[str, float] = field(default_factory=dict)
    """Bytes per second by drive, of all ranks together."""
    stalled: float = 0.0
    """Share of the time that the rank stood still which did so most."""


class Fairness:
    """The rates of runs, from what their ranks have moved; used from the event loop only."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        """The runs that have live ranks, by id."""
        self._observed = 0.0
        """When they were last looked at, in monotonic seconds."""
        self._rates: dict[str, dict[str, float]] = {}
        """Bytes per second that a run may move, by drive and run; only of those that are held back."""

    def rates_of(self, run: str) -> dict[str, float]:
        """Return the bytes per second that each rank of a run may move, by drive; others have no limit."""
        ranks = len(self._runs[run].ranks) if run in self._runs else 1
        return {drive: rates[run] / ranks for drive, rates in self._rates.items() if run in rates}

    def observe(self, usages: Mapping[Rank, Usage], now: float) -> None:
        """Take what all live ranks have done until `now`, in monotonic seconds, and move the rates."""
        passed, self._observed = now - self._observed, now
        ranks: dict[str, dict[int, Usage]] = defaultdict(dict)
        for (run, rank), usage in usages.items():
            ranks[run][rank] = usage
        known, self._runs = self._runs, {}
        for run, found in ranks.items():
            self._runs[run] = known.get(run, _Run())
            _average(self._runs[run], found, passed)
        rates = {}
        for drive in {drive for run in self._runs.values() for drive in run.rate}:
            moving = {name: run.rate[drive] for name, run in self._runs.items() if run.rate.get(drive, 0.0) > 0}
            wanting = {name for name in moving if self._runs[name].stalled >= _WANTS}
            weights = {name: max(rank.weight for rank in self._runs[name].ranks.values()) for name in moving}
            rates[drive] = next_rates(self._rates.get(drive, {}), moving, wanting, weights)
        self._rates = rates


def next_rates(
    rates: Mapping[str, float], moving: Mapping[str, float], wanting: set[str], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return the rates of a drive a second later, in bytes per second by run; others have no limit.

    Args:
        rates: of now.
        moving: bytes per second that each run moves.
        wanting: the runs that want more.
        weights: of all that move.
    """
    if len(moving) < 2:
        return {}
    served = {run: moving[run] / weights[run] for run in moving}
    # Limits rise before they go: one that went at once would let a run that is behind by noise take all of the drive.
    raised = {run: _UP * rate for run, rate in rates.items() if moving.get(run, 0.0) > _UNUSED * rate}
    if not wanting:
        return raised
    last = min(wanting, key=lambda run: (served[run], run))
    found = {last: _BEHIND * rates[last]} if last in raised else {}
    for run in moving.keys() - {last}:
        target, rate = _AHEAD * served[last] * weights[run], rates.get(run)
        if rate is None and moving[run] <= target:
            continue  # it is not ahead
        before = moving[run] if rate is None else rate
        found[run] = min(max(target, _DOWN * before), _UP * before)
    return found


def _average(run: _Run, ranks: dict[int, Usage], passed: float) -> None:
    """Take in what the ranks of a run have done in `passed` seconds; a rank that is new counts from now on."""
    both = [(run.ranks[rank], usage) for rank, usage in ranks.items() if rank in run.ranks]
    run.ranks = ranks
    if not both or passed <= 0:
        return
    share = min(1.0, passed / SMOOTH_SECONDS)
    moved: dict[str, float] = defaultdict(float)
    for before, now in both:
        for drive, count in now.moved.items():
            moved[drive] += max(0.0, count - before.moved.get(drive, 0.0))
    run.rate = {
        drive: (1 - share) * run.rate.get(drive, 0.0) + share * count / passed for drive, count in moved.items()
    }
    stalled = max(max(0.0, now.stalled - before.stalled) for before, now in both) / passed
    run.stalled += share * (stalled - run.stalled)
