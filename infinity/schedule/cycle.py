"""One turn of a trace as plain lists, and what moves in it under a window. Pure, as the planner is.

The planner compares many plans of one trace. So what does not depend on a plan is found out once, and lists of numbers
are all that is walked for each plan: a large model uses hundreds of thousands of pages in a step.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Mode

_AHEAD = 2
"""How many FSDP modules the window reaches beyond an update in backward, where all pages have cache slots."""


class Uses:
    """The uses of some accesses, numbered in order. Those of one access come as their pages are first used at all."""

    def __init__(self, accesses: Sequence[Access]) -> None:
        """Number the uses of `accesses`."""
        self.pages: list[int] = []
        """Page of each use."""
        self.modes: list[Mode] = []
        """How each use uses it."""
        self.places: list[int] = []
        """Position of the access that each use belongs to; the last item is the number of accesses."""
        self.starts: list[int] = [0]
        """First use of each access; the last item is the number of uses."""
        first: dict[int, int] = {}  # page -> how many others are used before it
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
        """Use of the same page before each use; -1 if there is none."""
        self.after = [number] * number
        """Use of the same page after each use; the number of uses if there is none."""
        last: dict[int, int] = {}
        for use, page in enumerate(self.pages):
            if page in last:
                self.before[use] = last[page]
                self.after[last[page]] = use
            last[page] = use


def windows(uses: Uses, length: int, resident: AbstractSet[int], streaming: int) -> list[int]:
    """Return c(i) for all positions but those of the last turn. [Note: the window] in `planner`.

    Args:
        uses: of a prefix, if there is one, and two turns.
        length: accesses of one turn.
        resident: pages that do not count.
    """
    places, starts, before, after = uses.places, uses.starts, uses.before, uses.after
    if resident:  # as if they were inside before and behind
        number = len(uses.pages)
        before = [number if page in resident else use for page, use in zip(uses.pages, before, strict=True)]
        after = [-1 if page in resident else use for page, use in zip(uses.pages, after, strict=True)]
    reach: list[int] = []
    head = inside = 0  # the window ends before the use `head` and has so many pages; its last access may be in part
    for position in range(len(starts) - 1 - length):
        tail, limit = starts[position], starts[position + length]
        while head < limit:
            if before[head] < tail:  # not in the window yet
                if inside == streaming:
                    break
                inside += 1
            head += 1
        reach.append(places[head] - 1)
        for use in range(tail, starts[position + 1]):
            if after[use] >= head:
                inside -= 1
    return reach


def windows_of_all(accesses: Sequence[Access], length: int, layout: Layout) -> list[int]:
    """Return c(i) for all positions but those of the last turn, where all pages have cache slots.

    [Note: nothing streams] in `planner`.

    Args:
        accesses: of a prefix, if there is one, and two turns.
        length: accesses of one turn, which no window exceeds.
    """
    fsdp_modules = [layout.pages[access[0].page].fsdp_module for access in accesses]
    ends = [
        place for place, (a, b) in enumerate(itertools.pairwise(fsdp_modules)) if a != b
    ]  # where another FSDP module comes next
    reach = list(range(length - 1, len(accesses) - 1))
    last = len(accesses)
    for position in reversed(range(len(accesses))):
        if _uses_gradients_in_memory(accesses[position], layout):
            end = bisect_left(ends, position) + _AHEAD
            last = ends[end] if end < len(ends) else len(accesses)
        if position < len(reach):
            reach[position] = min(reach[position], last)
    return reach


def _uses_gradients_in_memory(access: Access, layout: Layout) -> bool:
    """Whether an access is a part of an update in backward."""
    roles = {layout.pages[use.page].role for use in access}
    return Role.GRAD not in roles and any(use.mode.modifies for use in access)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What one steady step moves."""

    entering: Sequence[int]
    """Uses that get a cache slot for their page, in order."""
    read: AbstractSet[int]
    """Those for which its content is read."""
    leaving: Sequence[int]
    """Uses after which their page gives up its cache slot, in order."""
    written: AbstractSet[int]
    """Those after which its content is written."""
    staying: frozenset[int]
    """Pages that are not resident, but never leave."""
    total_bytes: int
    """Bytes read and written."""


class Cycle:
    """One turn of a trace, the accesses of a step that is followed by others like it; nothing of it changes."""

    def __init__(self, trace: Sequence[Access], layout: Layout) -> None:
        """Number the uses of a trace and of the turn after it."""
        self.trace, self.layout, self.length = tuple(trace), layout, len(trace)
        """The accesses, the pages, and how many accesses there are."""
        uses = self._uses = Uses((*self.trace, *self.trace))
        self.number = number = uses.starts[self.length]
        """How many uses one turn has."""
        self.pages, self.places = uses.pages[:number], uses.places[:number]
        """Page and position of each use of one turn."""
        self.used = frozenset(self.pages)
        """All pages that are used."""
        self.nbytes = [page.nbytes for page in layout.pages]
        """Length of every page of the layout."""
        self.then = [uses.places[use] for use in uses.after[:number]]
        """Position of the next use of the page, the next turn counted on."""
        self._after = [use % number for use in uses.after[:number]]
        self._before = [use % number for use in uses.before[number:]]
        write, update, consume = Mode.WRITE, Mode.UPDATE, Mode.CONSUME
        self._fetches = [mode is not write for mode in uses.modes[:number]]
        self._modifies = [mode is write or mode is update for mode in uses.modes[:number]]
        self._consumes = [mode is consume for mode in uses.modes[:number]]
        self._near = self._near_uses()

    def windows(self, resident: AbstractSet[int], streaming: int) -> list[int]:
        """Return c(i) for every position. [Note: the window] in `planner`."""
        return windows(self._uses, self.length, resident, streaming)

    def windows_of_all(self) -> list[int]:
        """Return c(i) for every position where all pages have cache slots. [Note: nothing streams] in `planner`."""
        return windows_of_all((*self.trace, *self.trace), self.length, self.layout)

    def _last(self, reach: Sequence[int]) -> list[int]:
        """Return the last position whose pages are in memory once a position is done: the window of the next one."""
        return [*reach[1:], *(first + self.length for first in reach[:1])]

    def moves(self, reach: Sequence[int], resident: AbstractSet[int], kept: Collection[int]) -> Moves:
        """Return what one steady step moves.

        Args:
            kept: uses after which their page stays though the window does not reach to its next use.
        """
        pages, nbytes, last = self.pages, self.nbytes, self._last(reach)
        leaving = [
            use
            for use, (then, place, page) in enumerate(zip(self.then, self.places, pages, strict=True))
            if then > last[place] and page not in resident and use not in kept
        ]
        enters = bytearray(self.number)
        for use in leaving:
            enters[self._after[use]] = 1
        entering = [use for use, enter in enumerate(enters) if enter]
        read = [use for use in entering if self._fetches[use]]
        written = self._modified(leaving, enters)
        return Moves(
            entering=entering,
            read=frozenset(read),
            leaving=leaving,
            written=frozenset(written),
            staying=self.used.difference(resident, [pages[use] for use in leaving]),
            total_bytes=sum([nbytes[pages[use]] for use in itertools.chain(read, written)]),
        )

    def _modified(self, leaving: Sequence[int], enters: Sequence[int]) -> list[int]:
        """Return those uses, after which pages leave, that leave them modified since they have entered."""
        before, modifies, consumes = self._before, self._modifies, self._consumes
        found = []
        for use in leaving:
            at = use
            while not (modifies[at] or consumes[at] or enters[at]):
                at = before[at]
            if modifies[at]:
                found.append(use)
        return found

    def _near_uses(self) -> list[tuple[int, int, int, int]]:
        """Return the uses whose next use is near, see `between_uses`.

        As (position of the next use, position, how many uses of the access come behind, use), by position.
        """
        fsdp_modules = [self.layout.pages[access[0].page].fsdp_module for access in self.trace]
        turns = list(itertools.accumulate((a != b for a, b in itertools.pairwise(fsdp_modules)), initial=0))
        found = []
        for use, (then, place) in enumerate(zip(self.then, self.places, strict=True)):
            if then >= self.length or self._consumes[use]:
                continue
            if turns[then] - turns[place] <= (3 if self._modifies[self._after[use]] else 0):
                order = [page for page, _ in self.trace[place]].index(self.pages[use])
                found.append((then, place, -order, use))
        return found

    def between_uses(self, reach: Sequence[int], resident: AbstractSet[int], most: int) -> tuple[frozenset[int], int]:
        """Return after which uses a page is kept until the next one, as many as possible, and how many at once.

        Only between uses that are near: with no other FSDP module's accesses in between or, where the next use is an
        update,
        with at most two turns of other FSDP modules. For example, FSDP module 5 is gathered, 6 is updated, 4 is
        gathered, then 5 is
        updated. Where `most` cache slots are too few, the page whose next use is last is not kept: so the largest
        number of
        intervals finds room (Carlisle and Lloyd, "On the k-coloring of intervals", 1995).
        """
        if not most:
            return frozenset(), 0
        last, pages = self._last(reach), self.pages
        kept: set[int] = set()
        held: list[tuple[int, int, int, int]] = []  # what is kept at this position, the next use that comes first first
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
