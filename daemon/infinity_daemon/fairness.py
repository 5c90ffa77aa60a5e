"""Bandwidth limits for runs that share a drive.

The goal is weighted max-min fairness, first between users and then between the runs of each user: the weights of a
user's runs are divided by their sum. Among the runs that are stalled on a drive, the *slowest run* is the one with the
least bandwidth relative to its weight. It is not limited, and no other run may have more bandwidth relative to its own
weight. This method does not need to know the bandwidth of the drive, leaves no bandwidth unused, and never limits a run
that has the drive to itself. Limits move towards the goal gradually, by 5% per second. A run that mostly computes
stalls only occasionally, so it gets the bandwidth it needs, and the other runs get the rest.

The activity of a run is what its own stats file claims. With a false one, a user could pretend to get almost nothing,
which would slow down all other users. If several users use a drive, no limit is therefore lower than half of the run's
share of the drive's bandwidth: its profile or, if it is higher, the total throughput that the runs have reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from infinity.telemetry import Snapshot

Rank = tuple[str, int]
"""Run id and rank."""

SMOOTH_SECONDS: Final = 3.0
"""Time constant for averaging a run's activity."""
_WANTS: Final = 0.1
"""A run needs more bandwidth if it is stalled for at least this fraction of the time."""
_AHEAD: Final = 1.03
"""Factor by which a run may exceed the slowest run, so that noise does not lead to limits."""
_DOWN: Final = 0.95
_UP: Final = 1.05
"""Minimum and maximum factor by which a limit changes per second."""
_BEHIND: Final = 1.1
"""Factor by which the limit of the slowest run rises per second."""
_LEAST_SHARE: Final = 0.5
"""Minimum of a limit relative to an equal share, if several users use a drive."""
_UNUSED: Final = 0.8
"""A limit has no effect if its run uses less than this fraction of it. It is removed once no run needs more."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Cumulative activity of a rank since it started, from its stats file."""

    moved: Mapping[str, float]
    """Bytes read and written, by drive."""
    stalled: float
    """Seconds during which the training thread was stalled on storage."""
    weight: float = 1.0
    """`storage.bandwidth_weight` of the run."""
    uid: int = 0
    """Id of the user whose run it is."""


def usages(snapshots: Iterable[Snapshot], drive_of: Callable[[str], str | None]) -> dict[Rank, Usage]:
    """Return the activity of each rank from its stats file.

    Args:
        snapshots: Snapshots of the stats files.
        drive_of: Function that returns the name of the drive that stores a path, or None if unknown.
    """
    found: dict[Rank, Usage] = {}
    for snapshot in snapshots:
        header, moved = snapshot.header, defaultdict[str, float](float)
        for device, path in zip(header.devices, header.paths, strict=False):
            if (drive := drive_of(path)) is not None:
                moved[drive] += snapshot.value("io_bytes_total", device=device)
        stalled = snapshot.value("stall_seconds_total")
        found[header.run_id, header.rank] = Usage(moved=moved, stalled=stalled, weight=header.weight, uid=snapshot.uid)
    return found


@dataclass(kw_only=True)
class _Run:
    """Averaged activity of a run."""

    ranks: dict[int, Usage] = field(default_factory=dict)
    """Last observed activity of each live rank."""
    rate: dict[str, float] = field(default_factory=dict)
    """Total throughput of all ranks in bytes per second, by drive."""
    stalled: float = 0.0
    """Fraction of the time for which the most stalled rank was stalled."""


class Fairness:
    """Computes the bandwidth limits of runs from the activity of their ranks. Only used on the event loop."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        """Runs with live ranks, by run id."""
        self._observed = 0.0
        """Monotonic time of the last observation, in seconds."""
        self._rates: dict[str, dict[str, float]] = {}
        """Limits in bytes per second, by drive and run id. Unlimited runs are absent."""
        self._peaks: dict[str, float] = {}
        """Highest total throughput or profile so far of each drive that runs use, in bytes per second."""

    def rates_of(self, run: str) -> dict[str, float]:
        """Return the limit for each rank of a run in bytes per second, by drive. Unlimited drives are absent."""
        ranks = len(self._runs[run].ranks) if run in self._runs else 1
        return {drive: rates[run] / ranks for drive, rates in self._rates.items() if run in rates}

    def observe(self, usages: Mapping[Rank, Usage], now: float, profiles: Mapping[str, float] | None = None) -> None:
        """Record the activity of all live ranks, and adjust the limits.

        Args:
            usages: Activity of each rank.
            now: Monotonic time in seconds.
            profiles: Measured bandwidth of drives in bytes per second, by drive.
        """
        passed, self._observed = now - self._observed, now
        ranks: dict[str, dict[int, Usage]] = defaultdict(dict)
        for (run, rank), usage in usages.items():
            ranks[run][rank] = usage
        known, self._runs = self._runs, {}
        for run, found in ranks.items():
            self._runs[run] = known.get(run, _Run())
            _average(self._runs[run], found, passed)
        rates, peaks = {}, {}
        for drive in {drive for run in self._runs.values() for drive in run.rate}:
            moving = {name: run.rate[drive] for name, run in self._runs.items() if run.rate.get(drive, 0.0) > 0}
            wanting = {name for name in moving if self._runs[name].stalled >= _WANTS}
            weights, users = self._weights(moving)
            if moving:
                peaks[drive] = max(self._peaks.get(drive, 0.0), (profiles or {}).get(drive, 0.0), sum(moving.values()))
            least = _LEAST_SHARE * peaks[drive] / users if users > 1 else 0.0
            rates[drive] = next_rates(self._rates.get(drive, {}), moving, wanting, weights, least)
        self._rates, self._peaks = rates, peaks

    def _weights(self, runs: Iterable[str]) -> tuple[dict[str, float], int]:
        """Return the weights of runs, which add up to 1 for each user, and the number of users."""
        given, users = {}, {}
        for name in runs:
            ranks = self._runs[name].ranks.values()
            given[name], users[name] = max(rank.weight for rank in ranks), next(rank.uid for rank in ranks)
        total: dict[int, float] = defaultdict(float)
        for name, weight in given.items():
            total[users[name]] += weight
        return {name: weight / total[users[name]] for name, weight in given.items()}, len(total)


def next_rates(
    rates: Mapping[str, float],
    moving: Mapping[str, float],
    wanting: set[str],
    weights: Mapping[str, float],
    least: float,
) -> dict[str, float]:
    """Return the limits on a drive for the next second, in bytes per second by run id. Unlimited runs are absent.

    Args:
        rates: Current limits.
        moving: Current throughput of each run, in bytes per second.
        wanting: Ids of the runs that need more bandwidth.
        weights: Bandwidth weight of each run in `moving`.
        least: Minimum of a limit relative to the weight of its run, in bytes per second.
    """
    if len(moving) < 2:
        return {}
    served = {run: moving[run] / weights[run] for run in moving}
    # Limits are raised before they are removed. If they were removed immediately, a run that is slowest only because
    # of noise could use the entire drive.
    raised = {run: _UP * rate for run, rate in rates.items() if moving.get(run, 0.0) > _UNUSED * rate}
    if not wanting:
        return raised
    last = min(wanting, key=lambda run: (served[run], run))
    found = {last: _BEHIND * rates[last]} if last in raised else {}
    for run in moving.keys() - {last}:
        target, rate = max(_AHEAD * served[last], least) * weights[run], rates.get(run)
        if rate is None and moving[run] <= target:
            continue  # within its target
        before = moving[run] if rate is None else rate
        found[run] = min(max(target, _DOWN * before), _UP * before)
    return found


def _average(run: _Run, ranks: dict[int, Usage], passed: float) -> None:
    """Update a run's averages with the activity of its ranks in the last `passed` seconds, excluding new ranks."""
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
