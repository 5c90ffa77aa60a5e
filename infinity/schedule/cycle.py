"""One cycle of a trace in the form of flat lists, and the transfers that result from a window. Pure, like the planner.

A *use* is one page in one access; `planner` defines the other terms. The planner compares many plans for one trace, and
a large model uses hundreds of thousands of pages per step. Therefore all values that do not depend on the plan are
computed once, and the transfers of a plan are computed with NumPy.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Mode

_AHEAD = 2
"""Number of FSDP modules beyond an update in backward that the window includes if all pages have cache slots."""


class Uses:
    """Uses of a sequence of accesses, numbered in order. The uses of one access are ordered by the first use of their
    page.
    """

    def __init__(self, accesses: Sequence[Access]) -> None:
        self.pages: list[int] = []
        """Page number of each use."""
        self.modes: list[Mode] = []
        """Mode of each use."""
        self.places: list[int] = []
        """Position of the access to which each use belongs. The last item is the number of accesses."""
        self.starts: list[int] = [0]
        """Number of the first use of each access. The last item is the total number of uses."""
        first: dict[int, int] = {}  # page -> number of pages used before it
        for place, access in enumerate(accesses):
            for page, _ in access:
                first.setdefault(page, len(first))
            for page, mode in sorted(access, key=lambda use: first[use.page]) if len(access) > 1 else access:
                self.pages.append(page)
                self.modes.append(mode)
                self.places.append(place)
            self.starts.append(len(self.pages))
        self.places.append(len(accesses))
        number = len(self.pages)
        self.before = [-1] * number
        """For each use, the previous use of the same page, or -1."""
        self.after = [number] * number
        """For each use, the next use of the same page, or the number of uses if there is no later use."""
        last: dict[int, int] = {}
        for use, page in enumerate(self.pages):
            if page in last:
                self.before[use] = last[page]
                self.after[last[page]] = use
            last[page] = use


def windows(uses: Uses, length: int, resident: AbstractSet[int], streaming: int) -> list[int]:
    """Return the end c(i) of the window for every position i except in the last cycle. [Note: the window] in `planner`.

    Args:
        uses: uses of two cycles, preceded by the uses of a prefix if the plan has one.
        resident: pages that stay permanently. They do not count towards `streaming`.
        streaming: maximum number of distinct pages in the window.
    """
    pages, places, starts, before, after = uses.pages, uses.places, uses.starts, uses.before, uses.after
    reach: list[int] = []
    # The window ends before the use `head` and contains `inside` pages. There are at most `streaming` of them, because
    # more pages would not have cache slots. `head` never moves back, so c is monotone. The cursor relies on this
    # property, because it claims every position once.
    head = inside = 0
    for position in range(len(starts) - 1 - length):
        tail, limit = starts[position], starts[position + length]
        while head < limit:
            if before[head] < tail and pages[head] not in resident:  # the page is not yet in the window
                if inside == streaming:
                    break
                inside += 1
            head += 1
        reach.append(places[head] - 1)
        for use in range(tail, starts[position + 1]):
            if after[use] >= head and pages[use] not in resident:
                inside -= 1
    return reach


def windows_of_all(accesses: Sequence[Access], length: int, layout: Layout) -> list[int]:
    """Return the end c(i) of the window for every position i, except in the last cycle, if all pages have cache slots.

    [Note: all pages resident] in `planner`.

    Args:
        accesses: accesses of two cycles, preceded by the accesses of a prefix if the plan has one.
        length: number of accesses in one cycle, which is also the maximum length of a window.
    """
    fsdp_modules = [layout.pages[access[0].page].fsdp_module for access in accesses]
    # Positions that are followed by an access of a different FSDP module.
    ends = [place for place, (a, b) in enumerate(itertools.pairwise(fsdp_modules)) if a != b]
    reach = list(range(length - 1, len(accesses) - 1))
    last = len(accesses)
    for position in reversed(range(len(accesses))):
        # Gradients for updates in backward wait in memory outside the host cache. Without this limit, the training
        # thread could finish backward before any update, and the memory for gradients would grow with the number of
        # layers.
        roles = {layout.pages[use.page].role for use in accesses[position]}
        if Role.GRAD not in roles and any(use.mode.modifies for use in accesses[position]):  # an update in backward
            end = bisect_left(ends, position) + _AHEAD
            last = ends[end] if end < len(ends) else len(accesses)
        if position < len(reach):
            reach[position] = min(reach[position], last)
    return reach


def _array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Transfers of one steady step (a step that follows an identical step)."""

    entering: npt.NDArray[np.int64]
    """Uses for which the page enters the host cache, in order."""
    read: npt.NDArray[np.bool_]
    """For each entering use, whether the content of the page is read from the store."""
    leaving: npt.NDArray[np.int64]
    """Uses after which the page leaves the host cache, in order."""
    written: npt.NDArray[np.bool_]
    """For each leaving use, whether the content of the page is written to the store."""
    staying: int
    """Number of pages that are not resident in the plan, but never leave the host cache."""
    total_bytes: int
    """Total bytes read and written."""


class Cycle:
    """Immutable cycle of a trace: the accesses of a step that is followed by identical steps."""

    def __init__(self, trace: Sequence[Access], layout: Layout) -> None:
        self.trace, self.layout, self.length = tuple(trace), layout, len(trace)
        """Accesses of the step, pages of this rank, and number of accesses, respectively."""
        uses = self._uses = Uses((*self.trace, *self.trace))
        self.number = number = uses.starts[self.length]
        """Number of uses in one cycle."""
        self.pages, self.places = _array(uses.pages[:number]), _array(uses.places[:number])
        """Page number and position of each use in one cycle."""
        self.used = frozenset(uses.pages)
        """All pages that the step uses."""
        self.used_in_order = _array(sorted(self.used))
        """`used`, ordered by page number."""
        self.roles = np.array([page.role.value for page in layout.pages])
        """Value of the role of every page of the layout."""
        self.nbytes = _array([page.nbytes for page in layout.pages])
        """Size of every page of the layout, in bytes."""
        self.used_bytes = sum(layout.pages[page].nbytes for page in self.used)
        """Total size of the pages that the step uses, in bytes."""
        self.then = _array([uses.places[use] for use in uses.after[:number]])
        """For each use, the position of the next use of the same page. Positions continue into the next cycle."""
        self._after = _array([use % number for use in uses.after[:number]])
        self._before = _array([use % number for use in uses.before[number:]])
        modes = uses.modes[:number]
        self._fetches = np.array([mode.fetches for mode in modes], np.bool_)
        self._modifies = np.array([mode.modifies for mode in modes], np.bool_)
        self._consumes = np.array([mode is Mode.CONSUME for mode in modes], np.bool_)
        self._near = self._near_uses()

    def windows(self, resident: AbstractSet[int], streaming: int) -> list[int]:
        """Return the end c(i) of the window for every position i. [Note: the window] in `planner`."""
        return windows(self._uses, self.length, resident, streaming)

    def windows_of_all(self) -> list[int]:
        """Return c(i) for every position i if all pages have cache slots. [Note: all pages resident] in `planner`."""
        return windows_of_all((*self.trace, *self.trace), self.length, self.layout)

    def _last(self, reach: Sequence[int]) -> list[int]:
        """Return, for each position, the end of the window when the next position has been reached."""
        return [*reach[1:], *(first + self.length for first in reach[:1])]

    def moves(self, reach: Sequence[int], resident: AbstractSet[int], kept: Collection[int]) -> Moves:
        """Return the transfers of one steady step.

        Args:
            reach: end c(i) of the window for every position i.
            kept: uses after which the page stays in memory although the window does not include its next use.
        """
        streams = np.ones(len(self.nbytes), np.bool_)
        streams[list(resident)] = False
        leaves = (self.then > _array(self._last(reach))[self.places]) & streams[self.pages]
        leaves[list(kept)] = False
        leaving = np.flatnonzero(leaves)
        enters = np.zeros(self.number, np.bool_)
        enters[self._after[leaving]] = True
        entering = np.flatnonzero(enters)
        read, written = self._fetches[entering], self._modified(leaving, enters)
        streams[self.pages[leaving]] = False
        return Moves(
            entering=entering,
            read=read,
            leaving=leaving,
            written=written,
            staying=int(streams[self.used_in_order].sum()),
            total_bytes=int(self.nbytes[self.pages[np.concatenate((entering[read], leaving[written]))]].sum()),
        )

    def _modified(self, leaving: npt.NDArray[np.int64], enters: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return, for each leaving use, whether its page has been modified since it entered the host cache."""
        at, decided = leaving.copy(), self._modifies | self._consumes | enters
        while len(earlier := np.flatnonzero(~decided[at])):
            at[earlier] = self._before[at[earlier]]
        return self._modifies[at]

    def _near_uses(self) -> list[tuple[int, int, int, int]]:
        """Return the uses for which the next use of the page is near, as defined in `between_uses`.

        Each item is (position of the next use, position, negative index within the access, use). Items are ordered by
        position.
        """
        fsdp_modules = [self.layout.pages[access[0].page].fsdp_module for access in self.trace]
        runs = list(itertools.accumulate((a != b for a, b in itertools.pairwise(fsdp_modules)), initial=0))
        found = []
        updated = self._modifies[self._after]
        for use in np.flatnonzero((self.then < self.length) & ~self._consumes).tolist():
            then, place = int(self.then[use]), int(self.places[use])
            if runs[then] - runs[place] <= (3 if updated[use] else 0):
                order = [page for page, _ in self.trace[place]].index(self.pages[use])
                found.append((then, place, -order, use))
        return found

    def between_uses(self, reach: Sequence[int], resident: AbstractSet[int], most: int) -> tuple[frozenset[int], int]:
        """Return the uses after which a page is kept until its next use, and the peak number of kept pages.

        As many pages as possible are kept. Only near uses qualify: no accesses of other FSDP modules come in between
        or, if the next use is an update, at most two runs of such accesses. For example, FSDP module 5 is gathered, 6
        is updated, 4 is gathered, and then 5 is updated. If `most` cache slots are not enough, the page whose next use
        is latest is not kept. This rule keeps the maximum number of pages (Carlisle and Lloyd, "On the k-coloring of
        intervals", 1995).

        Args:
            reach: end c(i) of the window for every position i.
            most: maximum number of cache slots for kept pages.
        """
        if not most:
            return frozenset(), 0
        last, pages = self._last(reach), self.pages.tolist()
        kept: set[int] = set()
        held: list[tuple[int, int, int, int]] = []  # pages kept at this position, ordered by next use
        cache_slots = 0
        for near in self._near:
            then, place, _, use = near
            if then > last[place] and pages[use] not in resident:
                while held and held[0][0] <= place:
                    del held[0]
                insort(held, near)
                kept.add(use)
                if len(held) > most:
                    kept.remove(held.pop()[-1])
                cache_slots = max(cache_slots, len(held))
        return frozenset(kept), cache_slots
