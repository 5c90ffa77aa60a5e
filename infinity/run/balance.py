"""Load balancing over a rank's NVMe paths: pages move to other paths when the bandwidth of a path changes.

The bandwidth of a path is measured from the rank's own transfers: the bytes transferred divided by the time in which at
least one transfer was pending. If one path keeps the others waiting, the pages are redistributed in proportion to
bandwidth. A page moves when it is next written, so moving it costs no additional transfer. The loads are evaluated
again after the pages have moved. No value changes.
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
"""Decay per second of earlier measurements: half of the weight is on the last 14 seconds."""
_BUSY: Final = 0.3
"""If even the busiest path works for a smaller fraction of the time, no path keeps the others waiting."""
_SATURATED: Final = 0.9
"""Busy fraction from which a path is saturated, so that its throughput is its bandwidth."""
_LONGER: Final = 1.1
"""Pages move if the slowest path needs more than this factor of the time of a balanced distribution."""
_LOOKS: Final = 5
"""Number of consecutive evaluations in which this must hold."""
_MUCH: Final = 1.25
"""Below this factor, pages move half of the way only, because the next evaluation gives a better estimate."""
_HOPE: Final = 1.5
"""Largest factor by which a path is tried beyond its highest known bandwidth. Bandwidth in bursts may not last, but a
path may also be capable of more than it has shown."""
_WAIT_SECONDS: Final = 30.0
"""Time until a path is tried again after an unsuccessful trial. It doubles with each further one, up to an hour."""
_MOST_WAIT_SECONDS: Final = 3600.0
_FLUSHED_STEPS: Final = 2
"""Number of steps after which pages that have not moved are no longer waited for: they stay in memory, or never change.
"""
_LEAST_MOVED: Final = 0.03
"""Fraction of the bytes below which moving pages is not worthwhile."""
_LEAST_SHARE: Final = 0.03
"""Smallest stripe weight relative to the fastest path. Some pages stay on every path so that an increase of its
bandwidth is detected."""
_PARTS: Final = (1.0, 0.5, 0.25)
"""Fractions of the way that are tried in turn if the drives have no space for all of it."""


class Load(NamedTuple):
    """Work of a path during an interval."""

    nbytes: float
    """Bytes transferred."""
    busy: float
    """Seconds in which a transfer was pending."""


class Finding(NamedTuple):
    """Estimate for a path."""

    rate: float
    """Bandwidth in bytes per second."""
    factor: float
    """Ratio of the bandwidth to the throughput while another path kept this one waiting."""


class PathLoads:
    """Counter of the work of a rank's paths. Thread-safe."""

    def __init__(self, paths: int) -> None:
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._loads = [Load(0, 0)] * paths
        """Work by path since the last `take`."""
        self._until = [0.0] * paths
        """Time up to which each path has been counted, in seconds of `time.perf_counter`."""

    def moved(self, path: int, nbytes: int, started: float, ended: float) -> None:
        """Count a transfer. The transfers of a path must be reported in the order of their completion.

        Args:
            path: index of the path.
            nbytes: bytes transferred.
            started: start time, in seconds of `time.perf_counter`.
            ended: end time, in seconds of `time.perf_counter`.
        """
        with self._lock:
            load, until = self._loads[path], self._until[path]
            self._loads[path] = Load(load.nbytes + nbytes, load.busy + max(0.0, ended - max(started, until)))
            self._until[path] = max(until, ended)

    def take(self) -> list[Load]:
        """Return the work by path since the previous call."""
        with self._lock:
            taken, self._loads = self._loads, [Load(0, 0)] * len(self._loads)
        return taken


class Watch:
    """Detector of unequal loads: it reports them when one path has kept the others waiting for a while."""

    def __init__(self, known: Sequence[float]) -> None:
        """Start without measurements.

        Args:
            known: bandwidth by path as measured earlier, in bytes per second; 0 if unknown.
        """
        self._known = list(known)
        """Bandwidth by path in bytes per second, from sustained throughput or the last saturation; 0 if unknown."""
        self._tried = [False] * len(known)
        """By path, ``True`` while it is tried with more than its known bandwidth."""
        self._wait = [_WAIT_SECONDS] * len(known)
        """By path, seconds until the next trial if the current one fails."""
        self._not_before = [0.0] * len(known)
        """By path, value of `_time` before which there is no further trial."""
        self._time = 0.0
        """Observed time in seconds."""
        self._loads: list[Load]
        """Work by path with exponential decay. This and all following attributes are set by `restart`."""
        self._worked: float
        """Seconds in which the busiest path worked, with the same decay."""
        self._seconds: float
        """Observed seconds, with the same decay."""
        self._saturated: list[int]
        """By path, number of evaluations since it was last saturated."""
        self._uneven: int
        """Number of consecutive evaluations in which one path took too long."""
        self.restart()

    def restart(self) -> None:
        """Discard the measured loads, because the distribution of pages has changed. Known bandwidths are kept."""
        self._loads = [Load(0.0, 0.0)] * len(self._known)
        self._worked = self._seconds = 0.0
        self._saturated = [_LOOKS] * len(self._known)
        self._uneven = 0

    def look(self, loads: Sequence[Load], seconds: float) -> list[Finding] | None:
        """Return estimates for all paths if their loads have been unequal for a while, else None.

        Args:
            loads: work by path during the last `seconds`.
            seconds: length of the interval.
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
        """Update the bandwidth of a path that was saturated."""
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
        """Return the bandwidth to assume for a path: the known one, or more if it was exceeded and a trial is due."""
        load, known = self._loads[path], self._known[path]
        if self._saturated[path] < _LOOKS or self._time < self._not_before[path]:
            return known
        return max(known, min(load.nbytes / load.busy, _HOPE * known)) if load.busy else known


class Balance:
    """A thread that watches the loads from `__init__` to `close` and has the store redistribute pages."""

    def __init__(
        self,
        loads: PathLoads,
        known: Sequence[float],
        pages: Sequence[Page],
        store: PageStore,
        names: Sequence[str],
        steps: Callable[[], float],
    ) -> None:
        """Start watching.

        Args:
            loads: counter of the store's transfers.
            known: bandwidth by path as measured earlier, in bytes per second; 0 if unknown.
            pages: the rank's pages, by index.
            store: store that moves the pages.
            names: names of the paths, for messages.
            steps: returns the number of completed steps.
        """
        self._loads, self._pages, self._store = loads, pages, store
        self._names, self._steps = names, steps
        self._watch = Watch(known)
        self._moving: list[int] = []
        """Pages that have not been written to their new path yet. Used by the thread only."""
        self._since = 0.0  # completed steps when pages were last redistributed; used by the thread only
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
        """Return whether pages remain to be written to their new paths."""
        if self._moving and self._steps() < self._since + _FLUSHED_STEPS:
            self._moving = self._store.not_moved(self._moving)
        else:
            self._moving = []
        return bool(self._moving)

    def _spread(self, found: Sequence[Finding]) -> bool:
        """Redistribute the pages as far as there is space. Return ``False`` if watching should stop."""
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
                self._store.spread_anew(paths)
            except BudgetError as error:
                full = error
                continue
            except StorageError as error:
                _log.warning("pages are not rebalanced between storage.paths: %s", error)
                return False
            self._moving, self._since = [page.index for page in moving], self._steps()
            by_name = zip(self._names, found, strict=True)
            rates = ", ".join(f"{name} provides {format_size(item.rate)}/s" for name, item in by_name)
            _log.info("%s: %.0f %% of the pages move when they are next written", rates, 100 * size / sum(held))
            return True
        _log.warning("drives are unequally loaded, but there is no space to move pages: %s", full)
        return False
