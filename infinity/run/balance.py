"""Keeps the NVMe paths of a rank equally busy: pages move to others when a drive has become slower or faster.

What a path gives is seen from the rank's own transfers: the bytes that it moved over the time in which it had something
to move. Where one path works much longer than all would if the pages lay as their rates are, the pages are spread anew:
each one moves when it is next written, so that it costs no transfer. No value changes by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from infinity.content.layout import Page
from infinity.errors import BudgetError, StorageError
from infinity.run.space import FileSpace
from infinity.store.extents import respread
from infinity.store.pages import PageStore
from infinity.units import format_size

_log = logging.getLogger("infinity")
_EVERY_SECONDS: Final = 1.0
_KEPT: Final = 0.9
"""What a second counts after the next one: half of what is counted is of the last seven seconds."""
_BUSY: Final = 0.3
"""A path that works for less of the time keeps nobody waiting."""
_LONGER: Final = 1.25
"""So much longer than all would together one path must work, before pages move."""
_LOOKS: Final = 5
"""How often in succession it must."""
_LEAST_MOVED: Final = 0.05
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
    """Looks at loads, and says when pages should be spread by other rates than they are."""

    def __init__(self, paths: int) -> None:
        self._loads = [Load(0.0, 0.0)] * paths
        """By path, what is longer ago counting less."""
        self._seconds = 0.0
        """The time that they are of, weighed in the same way."""
        self._uneven = 0
        """How often in succession one path worked too long."""

    def look(self, loads: Sequence[Load], seconds: float) -> list[float] | None:
        """Return the bytes per second of each path if they have been working unequally for a while.

        Args:
            loads: of the last `seconds`, by path.
        """
        before = zip(self._loads, loads, strict=True)
        self._loads = [Load(a.nbytes * _KEPT + b.nbytes, a.busy * _KEPT + b.busy) for a, b in before]
        self._seconds = self._seconds * _KEPT + seconds
        if not all(load.nbytes and load.busy for load in self._loads):
            return None
        rates = [load.nbytes / load.busy for load in self._loads]
        longest = max(load.busy for load in self._loads)
        even = sum(load.nbytes for load in self._loads) / sum(rates)
        uneven = longest > _LONGER * even and longest > _BUSY * self._seconds
        self._uneven = self._uneven + 1 if uneven else 0
        return rates if self._uneven >= _LOOKS else None


class Balance:
    """A thread that watches, from `__init__` to `close`, and has the store spread pages anew."""

    def __init__(
        self,
        loads: PathLoads,
        pages: Sequence[Page],
        store: PageStore,
        names: Sequence[str],
        space: FileSpace,
        grown: Callable[[int], None],
    ) -> None:
        """Begin to watch.

        Args:
            loads: that the store's transfers are counted in.
            pages: of the rank, by index.
            store: whose pages move.
            names: of the paths, for messages.
            space: of the data files, for further slots.
            grown: is told how many bytes the data files have.
        """
        self._loads, self._pages, self._store = loads, pages, store
        self._names, self._space, self._grown = names, space, grown
        self._watch = Watch(len(names))
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._run, name="infinity-balance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; pages stay where they are. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            rates = self._watch.look(self._loads.take(), _EVERY_SECONDS)
            if rates is not None and not self._spread(rates):
                return

    def _spread(self, rates: Sequence[float]) -> bool:
        """Spread the pages by these rates, as far as there is room; return whether it is worth to go on watching."""
        before = self._store.paths
        wanted = [max(rate, _LEAST_SHARE * max(rates)) for rate in rates]
        held = [0] * len(rates)
        for page in self._pages:
            held[before[page.index]] += page.nbytes
        for part in _PARTS:
            shares = [
                part * rate / sum(wanted) + (1 - part) * size / sum(held)
                for rate, size in zip(wanted, held, strict=True)
            ]
            paths = respread(self._pages, before, shares)
            moved = sum(page.nbytes for page in self._pages if paths[page.index] != before[page.index])
            if moved < _LEAST_MOVED * sum(held):
                return True
            try:
                slots = self._store.slots_to_spread(paths)
                self._space.allocate(slots)
            except BudgetError as error:
                full = error
                continue
            except StorageError as error:
                _log.warning("pages stay on the paths that they are on: %s", error)
                return False
            self._grown(self._space.nbytes)
            self._store.spread_anew(paths, slots)
            given = zip(self._names, rates, strict=True)
            what = ", ".join(f"{name} gives {format_size(rate)}/s" for name, rate in given)
            _log.info("%s: %.0f %% of the pages move when they are next written", what, 100 * moved / sum(held))
            return True
        _log.warning("drives are not equally busy, but there is no room to move pages: %s", full)
        return False
