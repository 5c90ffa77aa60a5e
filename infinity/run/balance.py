"""Keeps the NVMe paths of a rank equally busy: pages move to others when a drive has become slower or faster.

What a path can do is seen from the rank's own transfers: the bytes that it moved over the time in which it had
something to move. Where one path keeps the others waiting, the pages are spread anew, so that each has as much as it
can do. A page moves when it is next written, so that it costs no transfer; when they have moved, it is looked at again.
No value changes.
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
"""What a second counts after the next one: half of what is counted is of the last 14 seconds."""
_BUSY: Final = 0.3
"""A path that works for less of the time keeps nobody waiting."""
_SATURATED: Final = 0.9
"""A path that works for so much of the time shows what it can do."""
_LONGER: Final = 1.1
"""So much longer than all would together one path must need, before pages move."""
_LOOKS: Final = 5
"""How often in succession it must."""
_MUCH: Final = 1.25
"""If it needs less than so much longer, pages go half of the way: the next look tells more."""
_HOPE: Final = 1.5
"""How many times as much as it ever did a path is tried with: what it does in bursts need not last, but it may be able
to do more than it was seen to."""
_WAIT_SECONDS: Final = 30.0
"""How long it is not tried with more when that was in vain; twice as long each further time, up to an hour."""
_MOST_WAIT_SECONDS: Final = 3600.0
_FLUSHED_STEPS: Final = 2
"""After so many steps, pages that have not moved are not waited for: they stay in memory, or never change."""
_LEAST_MOVED: Final = 0.03
"""Of the bytes; fewer are not worth it."""
_LEAST_SHARE: Final = 0.03
"""Of that of the fastest path: something stays everywhere, so that it shows when a path gets faster."""
_PARTS: Final = (1.0, 0.5, 0.25)
"""How much of the way the pages go, where the drives have no room for all of it."""


class Load(NamedTuple):
    """What a path did in some time."""

    nbytes: float
    """Bytes that it moved."""
    busy: float
    """Seconds in which it had something to move."""


class Finding(NamedTuple):
    """What a path could do."""

    rate: float
    """Bytes per second."""
    factor: float
    """How many times as much as it did, while a path kept the others waiting."""


class PathLoads:
    """Counts what the paths of a rank do. Threads may share it."""

    def __init__(self, paths: int) -> None:
        self._lock = threading.Lock()
        """Guards what follows."""
        self._loads = [Load(0, 0)] * paths
        """By path, since they were last taken."""
        self._until = [0.0] * paths
        """By path, up to when its time is counted, in seconds of `time.perf_counter`."""

    def moved(self, path: int, nbytes: int, started: float, ended: float) -> None:
        """Count a transfer, in seconds of `time.perf_counter`; those of a path come in the order in which they end."""
        with self._lock:
            load, until = self._loads[path], self._until[path]
            self._loads[path] = Load(load.nbytes + nbytes, load.busy + max(0.0, ended - max(started, until)))
            self._until[path] = max(until, ended)

    def take(self) -> list[Load]:
        """Return what the paths did since this was last called."""
        with self._lock:
            taken, self._loads = self._loads, [Load(0, 0)] * len(self._loads)
        return taken


class Watch:
    """Looks at loads, and says how unequal they are when one path keeps the others waiting for a while."""

    def __init__(self, known: Sequence[float]) -> None:
        """Nothing has been seen yet.

        Args:
            known: by path, bytes per second as they were measured before; 0 if they were not.
        """
        self._known = list(known)
        """By path, bytes per second that it did for a while, or when it last had to do all it could; 0 is unknown."""
        self._tried = [False] * len(known)
        """By path, whether it is being tried with more than is known."""
        self._wait = [_WAIT_SECONDS] * len(known)
        """By path, how long it is not tried with more if that is in vain."""
        self._not_before = [0.0] * len(known)
        """By path, until when it is not tried with more, in seconds of `_time`."""
        self._time = 0.0
        """Seconds that it was looked at."""
        self._loads: list[Load]
        """By path, what is longer ago counting less; set by `restart`, as all that follows."""
        self._worked: float
        """Seconds that the busiest path worked, weighed in the same way."""
        self._seconds: float
        """The time that all of this is of, weighed in the same way."""
        self._saturated: list[int]
        """By path, how often it was looked at since it last had to do all it could."""
        self._uneven: int
        """How often in succession one path worked too long."""
        self.restart()

    def restart(self) -> None:
        """Forget what the paths did, as they have something else to do now; what they can do is still known."""
        self._loads = [Load(0.0, 0.0)] * len(self._known)
        self._worked = self._seconds = 0.0
        self._saturated = [_LOOKS] * len(self._known)
        self._uneven = 0

    def look(self, loads: Sequence[Load], seconds: float) -> list[Finding] | None:
        """Return what each path can do, if the paths have been working unequally for a while.

        Args:
            loads: of the last `seconds`, by path.
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
        """Note what a path did that had to do all it could."""
        known = self._known[path]
        if self._tried[path] and rate < _LONGER * known:  # in vain
            self._not_before[path] = self._time + self._wait[path]
            self._wait[path] = min(2 * self._wait[path], _MOST_WAIT_SECONDS)
        elif rate > _HOPE * known:  # another drive, as it were
            self._wait[path] = _WAIT_SECONDS
        self._tried[path] = False
        self._known[path] = (known + rate) / 2 if known else rate
        self._saturated[path] = 0

    def _rate(self, path: int) -> float:
        """Return what a path can do: what is known, or more if it was quicker than that and may be tried."""
        load, known = self._loads[path], self._known[path]
        if self._saturated[path] < _LOOKS or self._time < self._not_before[path]:
            return known
        return max(known, min(load.nbytes / load.busy, _HOPE * known)) if load.busy else known


class Balance:
    """A thread that watches, from `__init__` to `close`, and has the store spread pages anew."""

    def __init__(
        self,
        loads: PathLoads,
        known: Sequence[float],
        pages: Sequence[Page],
        store: PageStore,
        names: Sequence[str],
        steps: Callable[[], float],
    ) -> None:
        """Begin to watch.

        Args:
            loads: that the store's transfers are counted in.
            known: by path, bytes per second as they were measured before; 0 if they were not.
            pages: of the rank, by index.
            store: whose pages move.
            names: of the paths, for messages.
            steps: returns how many steps have ended.
        """
        self._loads, self._pages, self._store = loads, pages, store
        self._names, self._steps = names, steps
        self._watch = Watch(known)
        self._moving: list[int] = []
        """Pages that were not yet written to where they go; the thread's."""
        self._since = 0.0  # the number of steps when pages were last spread; the thread's
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._run, name="infinity-balance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; pages stay where they are. Idempotent."""
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
        """Whether pages are still to be written to where they go."""
        if self._moving and self._steps() < self._since + _FLUSHED_STEPS:
            self._moving = self._store.not_moved(self._moving)
        else:
            self._moving = []
        return bool(self._moving)

    def _spread(self, found: Sequence[Finding]) -> bool:
        """Spread the pages anew, as far as there is room; return whether it is worth to go on watching."""
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
                _log.warning("pages stay on the paths that they are on: %s", error)
                return False
            self._moving, self._since = [page.index for page in moving], self._steps()
            base_optimizer = zip(self._names, found, strict=True)
            what = ", ".join(f"{name} gives {format_size(item.rate)}/s" for name, item in base_optimizer)
            _log.info("%s: %.0f %% of the pages move when they are next written", what, 100 * size / sum(held))
            return True
        _log.warning("drives are not equally busy, but there is no room to move pages: %s", full)
        return False
