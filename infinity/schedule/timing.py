"""How long a step takes under a plan: the plan, walked with a clock. Pure, as the planner is.

The walk knows one drive, which moves one transfer after the other in the order in which the pager starts them, the
frames of the arena, and how long the training thread computes between its accesses. Time is counted in bytes that the
drive could have moved meanwhile. So nothing has to be measured, plans are the same on every machine, and what is found
holds for any drive: computation that takes as long as the transfers hides them only if the window reaches far enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Mode

BACKWARD = 2.5
"""Computation of a unit in backward, over that in forward: between 2, and 3 where backward computes forward again."""
_STEPS = 2
"""How many steps it takes until one is like those that follow."""


def computation(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return which share of a step's computation comes before each access; the last item is what comes behind all.

    A unit is computed with when all of it has been gathered: before the next access to its pages, or the next gather.
    It takes time in proportion to its weights, and more when it is gathered again.
    """
    shares = [0.0] * (len(trace) + 1)
    gathered: set[int] = set()
    unit, factor, due = -1, 1.0, 0.0  # what was gathered last, its factor, and its computation that has not come yet
    for position, access in enumerate(trace):
        page = layout.pages[access[0].page]
        gathers = page.role is Role.PARAM and len(access) == 1 and access[0].mode is Mode.READ
        another = page.unit != unit
        if (gathers and another) or (not gathers and not another):  # another unit is gathered, or this one written to
            shares[position], due = due, 0.0
        if gathers:
            if another:
                factor = BACKWARD if page.unit in gathered else 1.0
                unit = page.unit
                gathered.add(unit)
            due += factor * page.nbytes
    shares[-1] = due
    total = sum(shares) or 1.0
    return [share / total for share in shares]


def updating(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return which share of a step's updates each access is: as many as it updates of all elements."""
    pages = layout.pages
    elements = [
        # Of an update: the range itself, which the pages of weights that it lies in may be longer than.
        min((pages[p].count for p, mode in access if mode.modifies and pages[p].role is not Role.GRAD), default=0)
        for access in trace
    ]
    total = sum(elements) or 1
    return [count / total for count in elements]


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What a steady step moves, by position in the trace."""

    entering: Sequence[Sequence[tuple[int, bool]]]
    """Pages that get a frame, and whether their content is read."""
    leaving: Sequence[Sequence[tuple[int, bool]]]
    """Pages that give up their frame, and whether their content is written."""
    staying: frozenset[int]
    """Pages that are not resident, but never leave."""


def step_length(
    trace: Sequence[Access],
    reach: Sequence[int],
    moves: Moves,
    layout: Layout,
    frames: int,
    work: Sequence[float],
    updates: Sequence[float],
    *,
    threaded: bool,
) -> float:
    """Return how long a steady step takes, in bytes that the drive could move meanwhile.

    Args:
        reach: the last position of the window, by position.
        frames: of the arena, without those of pages that always stay.
        work: how long computation takes before each access, and behind all.
        updates: how long each access computes when its pages are there.
        threaded: whether updates are waited for on a thread of their own.
    """
    length, clockwork = len(trace), Clockwork(layout, frames)
    before = [work[0] + work[-1], *work[1:-1]]  # what comes behind all is before the first one of the next step
    aside = [threaded and any(layout.pages[page].role is Role.UPDATE for page, _ in access) for access in trace]
    training = updated = 0.0  # how far the training thread has come, and the thread for updates
    ended: deque[tuple[int, float]] = deque()  # how far the window reaches until an update has ended, and when it has
    cursor, began = -1, 0.0
    for step in range(_STEPS):
        began = training
        for position in range(length):
            while cursor < step * length + reach[position]:
                cursor += 1
                for page, read in moves.entering[cursor % length]:
                    if read:
                        clockwork.want(page)
            training += before[position]
            while not aside[position] and ended and ended[0][0] < step * length + position:
                training = max(training, ended.popleft()[1])
            clockwork.go_on(training)
            at = max(training, updated) if aside[position] else training
            for page, read in moves.entering[position]:
                at = clockwork.arrive(page, at) if read else clockwork.occupy(at)
            at += updates[position]
            if aside[position]:
                updated = at
                ended.append((step * length + reach[position], at))
            else:
                training = at
            clockwork.go_on(at)
            for page, written in moves.leaving[position]:
                clockwork.leave(page, modified=written)
    return training - began


class Clockwork:
    """The drive and the frames of an arena, in time, which is counted in bytes that the drive could have moved.

    A model of the pager for one walk, on one thread. Life cycle of a page: wanted (queued), started when there is a
    frame, ready when the drive has read it, arrived when somebody takes it; its frame is free when it leaves, or when
    it has been written.
    """

    def __init__(self, layout: Layout, frames: int) -> None:
        self._layout = layout
        self._free = frames  # frames that are free now
        self._drive = 0.0  # when it has done all that it was given, in bytes
        self._queue: deque[int] = deque()  # pages to be read that have no frame yet
        self._ready: dict[int, float] = {}  # page -> when it has been read, in bytes
        self._written: deque[float] = deque()  # when frames come back from writing, in bytes, in order
        self.now = 0.0
        """How far anything has come, in bytes."""

    def want(self, page: int) -> None:
        """Have a page read as soon as there is a frame."""
        self._queue.append(page)

    def go_on(self, until: float) -> None:
        """Let the time go on, if it has not come so far."""
        self._start()
        if until > self.now:
            self.now = until
            self._start()

    def _start(self) -> None:
        while self._queue and (self._free or (self._written and self._written[0] <= self.now)):
            since = self.now
            if self._free:
                self._free -= 1
            else:
                since = self._written.popleft()
            page = self._queue.popleft()
            self._ready[page] = self._move(page, since)

    def _move(self, page: int, since: float) -> float:
        self._drive = max(self._drive, since) + self._layout.pages[page].nbytes
        return self._drive

    def arrive(self, page: int, at: float) -> float:
        """Return when somebody has a page who begins to wait for it to be read."""
        while page not in self._ready:
            self.go_on(self._written[0])
        return max(at, self._ready.pop(page))

    def occupy(self, at: float) -> float:
        """Return when somebody has a frame who needs nothing to be read into it."""
        if self._free:
            self._free -= 1
            return at
        return max(at, self._written.popleft())

    def leave(self, page: int, *, modified: bool) -> None:
        """Give up the frame of a page, written first if it was modified."""
        if modified:
            self._written.append(self._move(page, self.now))
        else:
            self._free += 1
