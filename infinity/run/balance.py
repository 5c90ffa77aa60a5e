"""Load balancing across a rank's NVMe paths: if the bandwidth of a path changes, pages move to other paths.

The bandwidth of a path is measured from the rank's own transfers, as the bytes transferred divided by the time during
which at least one transfer was pending. If one path keeps the others waiting, the pages are redistributed in proportion
to bandwidth. A page moves to its new path when it is next written, so the move costs no extra transfer. The loads are
evaluated again once the pages have moved. Balancing changes only where pages are stored, not what they contain.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from infinity.content.layout import Page
from infinity.errors import BudgetError, StorageError
from infinity.store.extents import respread
from infinity.store.page_store import PageStore
from infinity.units import format_size

_log = logging.getLogger("infinity")
_EVERY_SECONDS: Final = 1.0
_KEPT: Final = 0.95
"""Factor by which earlier measurements decay per second. The last 14 seconds carry half of the weight."""
_BUSY: Final = 0.3
"""Minimum busy fraction of the busiest path. Below it, no path keeps the others waiting."""
_SATURATED: Final = 0.9
"""Busy fraction at or above which a path counts as saturated, so its throughput equals its bandwidth."""
_LONGER: Final = 1.1
"""Pages move if the slowest path takes more than this many times as long as it would with balanced loads."""
_LOOKS: Final = 5
"""Number of consecutive evaluations in which `_LONGER` must be exceeded."""
_MUCH: Final = 1.25
"""If the slowest path takes less than this many times as long, only half of the imbalance is corrected, because the
next evaluation gives a better estimate."""
_HOPE: Final = 1.5
"""Maximum bandwidth that a trial assumes for a path, relative to its highest known bandwidth. A short burst may not be
sustainable, but a path may also be faster than observed so far."""
_WAIT_SECONDS: Final = 30.0
"""Time before a path is tried again after a failed trial. It doubles with each further failure, up to one hour."""
_MOST_WAIT_SECONDS: Final = 3600.0
_FLUSHED_STEPS: Final = 2
"""Number of steps after which pages that have not moved are no longer waited for, because they stay in memory or never
change.
"""
_LEAST_MOVED: Final = 0.03
"""Minimum fraction of the bytes that must move for a redistribution to be worthwhile."""
_LEAST_SHARE: Final = 0.03
"""Minimum stripe weight relative to the fastest path. Every path keeps some pages so that an increase in its bandwidth
is detected."""
_PARTS: Final = (1.0, 0.5, 0.25)
"""Fractions of the full redistribution, tried in this order until the drives have enough space."""


class Load(NamedTuple):
    """Work done by a path during an interval."""

    nbytes: float
    """Bytes transferred."""
    busy: float
    """Seconds during which at least one transfer was pending."""


class Finding(NamedTuple):
    """Estimate for one path."""

    rate: float
    """Bandwidth in bytes per second."""
    factor: float
    """Factor by which the fraction of the bytes stored on this path should change."""


class PathLoads:
    """Counts the work of each of a rank's paths. Thread-safe."""

    def __init__(self, paths: int) -> None:
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._loads = [Load(0, 0)] * paths
        """Work of each path since the last call to `take`."""
        self._until = [0.0] * paths
        """Time up to which each path's transfers have been counted, as returned by `time.perf_counter`."""

    def moved(self, path: int, nbytes: int, started: float, ended: float) -> None:
        """Count a transfer. Transfers on the same path must be reported in order of completion.

        Args:
            started: start time, as returned by `time.perf_counter`.
            ended: end time, as returned by `time.perf_counter`.
        """
        with self._lock:
            load, until = self._loads[path], self._until[path]
            self._loads[path] = Load(load.nbytes + nbytes, load.busy + max(0.0, ended - max(started, until)))
            self._until[path] = max(until, ended)

    def take(self) -> list[Load]:
        """Return the work of each path since the previous call."""
        with self._lock:
            taken, self._loads = self._loads, [Load(0, 0)] * len(self._loads)
        return taken


class Watch:
    """Detects unequal loads, which it reports after one path has kept the others waiting for a while."""

    def __init__(self, known: Sequence[float]) -> None:
        """Start without measurements.

        Args:
            known: previously measured bandwidth of each path, in bytes per second; 0 if unknown.
        """
        self._known = list(known)
        """Bandwidth of each path in bytes per second, from sustained throughput or last saturation; 0 if unknown."""
        self._tried = [False] * len(known)
        """``True`` for each path whose assumed bandwidth currently exceeds its known bandwidth."""
        self._wait = [_WAIT_SECONDS] * len(known)
        """Seconds until each path's next trial if the current one fails."""
        self._not_before = [0.0] * len(known)
        """Value of `_time` before which each path is not tried again."""
        self._time = 0.0
        """Total observed time, in seconds."""
        self._loads: list[Load]
        """Exponentially decayed work of each path. `restart` sets this attribute and all attributes below."""
        self._worked: float
        """Seconds for which the busiest path was busy, with the same decay as `_loads`."""
        self._seconds: float
        """Observed seconds, with the same decay as `_loads`."""
        self._saturated: list[int]
        """Number of evaluations since each path was last saturated."""
        self._uneven: int
        """Number of consecutive evaluations in which the slowest path took too long."""
        self.restart()

    def restart(self) -> None:
        """Discard the measured loads after pages have been redistributed. Known bandwidths are kept."""
        self._loads = [Load(0.0, 0.0)] * len(self._known)
        self._worked = self._seconds = 0.0
        self._saturated = [_LOOKS] * len(self._known)
        self._uneven = 0

    def look(self, loads: Sequence[Load], seconds: float) -> list[Finding] | None:
        """Return an estimate for each path if the loads have been unequal for a while, otherwise None.

        Args:
            loads: work of each path during the interval.
            seconds: length of the interval, in seconds.
        """
        self._time += seconds
        for path, load in enumerate(loads):
            self._saturated[path] += 1
            if load.busy >= _SATURATED * seconds:
                self._learn(path, load.nbytes / load.busy)
        before = zip(self._loads, loads, strict=True)
        self._loads = [Load(a.nbytes * _KEPT + b.nbytes, a.busy * _KEPT + b.busy) for a, b in before]
        self._worked = self._worked * _KEPT + max(load.busy for load in loads)
        self._seconds = self._seconds * _KEPT + seconds
        if self._worked < _BUSY * self._seconds:
            self._uneven = 0
            return None
        for path, load in enumerate(self._loads):
            if self._saturated[path] >= _LOOKS:
                self._known[path] = max(self._known[path], load.nbytes / self._worked)
        rates = [self._rate(path) for path in range(len(loads))]
        needed = max(load.nbytes / rate for load, rate in zip(self._loads, rates, strict=True) if rate)
        even = sum(load.nbytes for load in self._loads) / sum(rates)
        self._uneven = self._uneven + 1 if needed > _LONGER * even else 0
        if self._uneven < _LOOKS:
            return None
        self._tried = [rate > known for rate, known in zip(rates, self._known, strict=True)]
        part = 1.0 if needed > _MUCH * even else 0.5
        return [
            Finding(rate, (rate * self._worked / load.nbytes) ** part if load.nbytes else _HOPE)
            for rate, load in zip(rates, self._loads, strict=True)
        ]

    def _learn(self, path: int, rate: float) -> None:
        """Update the known bandwidth of a path from its throughput while it was saturated."""
        known = self._known[path]
        if self._tried[path] and rate < _LONGER * known:  # the trial failed
            self._not_before[path] = self._time + self._wait[path]
            self._wait[path] = min(2 * self._wait[path], _MOST_WAIT_SECONDS)
        elif rate > _HOPE * known:  # so different that earlier failed trials no longer count
            self._wait[path] = _WAIT_SECONDS
        self._tried[path] = False
        self._known[path] = (known + rate) / 2 if known else rate
        self._saturated[path] = 0

    def _rate(self, path: int) -> float:
        """Return the bandwidth to assume for a path: the known one, or a higher one if the path exceeded it and a trial
        is due.
        """
        load, known = self._loads[path], self._known[path]
        if self._saturated[path] < _LOOKS or self._time < self._not_before[path]:
            return known
        return max(known, min(load.nbytes / load.busy, _HOPE * known)) if load.busy else known


class Balance:
    """A thread that monitors the loads, from construction until `close`, and has the store redistribute pages."""

    def __init__(
        self,
        loads: PathLoads,
        known: Sequence[float],
        pages: Sequence[Page],
        store: PageStore,
        names: Sequence[str],
        steps: Callable[[], float],
    ) -> None:
        """Start monitoring.

        Args:
            loads: counts of the store's transfers.
            known: previously measured bandwidth of each path, in bytes per second; 0 if unknown.
            pages: the rank's pages, by index.
            names: names of the paths, for log messages.
            steps: function that returns the number of completed steps.
        """
        self._loads, self._pages, self._store = loads, pages, store
        self._names, self._steps = names, steps
        self._watch = Watch(known)
        self._moving: list[int] = []
        """Pages that have not been written to their new paths yet. Accessed only by the thread."""
        self._since = 0.0  # completed steps at the last redistribution; accessed only by the thread
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-balance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Pages stay on their current paths. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            loads = self._loads.take()
            if self._are_moving():
                continue
            found = self._watch.look(loads, _EVERY_SECONDS)
            if found is not None:
                self._watch.restart()
                if not self._spread(found):
                    return

    def _are_moving(self) -> bool:
        if self._moving and self._steps() < self._since + _FLUSHED_STEPS:
            self._moving = self._store.not_moved(self._moving)
        else:
            self._moving = []
        return bool(self._moving)

    def _spread(self, found: Sequence[Finding]) -> bool:
        """Redistribute the pages as far as space allows. Return ``False`` if monitoring should stop."""
        before = self._store.paths
        held = [0] * len(found)
        for page in self._pages:
            held[before[page.index]] += page.nbytes
        wanted = [size / sum(held) * item.factor for size, item in zip(held, found, strict=True)]
        wanted = [max(stripe_weight, _LEAST_SHARE * max(wanted)) for stripe_weight in wanted]
        for part in _PARTS:
            stripe_weights = [
                part * stripe_weight / sum(wanted) + (1 - part) * size / sum(held)
                for stripe_weight, size in zip(wanted, held, strict=True)
            ]
            paths = respread(self._pages, before, stripe_weights)
            moving = [page for page in self._pages if paths[page.index] != before[page.index]]
            size = sum(page.nbytes for page in moving)
            if size < _LEAST_MOVED * sum(held):
                return True
            try:
                self._store.redirect_writes(paths)
            except BudgetError as error:
                full = error
                continue
            except StorageError as error:
                _log.warning("cannot rebalance pages across storage.paths: %s", error)
                return False
            self._moving, self._since = [page.index for page in moving], self._steps()
            by_name = zip(self._names, found, strict=True)
            rates = ", ".join(f"{name} provides {format_size(item.rate)}/s" for name, item in by_name)
            _log.info("%s: %.0f %% of the page bytes move when they are next written", rates, 100 * size / sum(held))
            return True
        _log.warning("the load on storage.paths is uneven, but there is not enough space to move pages: %s", full)
        return False
