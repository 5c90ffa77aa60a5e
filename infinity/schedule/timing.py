"""How long a step takes under a plan: the plan, walked with a clock. Pure, as the planner is.

The walk knows one drive, which moves one transfer after the other in the order in which the pager starts them, the
frames of the arena, and how long the training thread computes between its accesses. Time is counted in bytes that the
drive could have moved meanwhile. So nothing has to be measured, plans are the same on every machine, and what is found
holds for any drive: computation that takes as long as the transfers hides them only if the window reaches far enough.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Mode
from infinity.schedule.turn import Moves, Turn

BACKWARD = 2.5
"""Computation of a unit in backward, over that in forward: between 2, and 3 where backward computes forward again."""
_STEPS = 2
"""How many steps it takes until one is like those that follow."""
_Stop = tuple[bool, int, int, Sequence[bool], float, Sequence[int]]
"""An access: whether it is aside, reads that have been wanted, the last position of the window, whether each page that
enters is read, how long it computes, and how many bytes each page that leaves has to write."""


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


class Timing:
    """The walks of plans of one trace: what does not depend on the plan is found out once. Nothing of it changes."""

    def __init__(self, turn: Turn, *, threaded: bool) -> None:
        """Find out when a step computes.

        Args:
            threaded: whether updates are waited for on a thread of their own.
        """
        self._turn = turn
        self._shares = computation(turn.trace, turn.layout)
        pages, update = turn.layout.pages, Role.UPDATE
        self._aside = [threaded and any(pages[page].role is update for page, _ in access) for access in turn.trace]

    def lengths(
        self, reach: Sequence[int], moves: Moves, frames: int, works: Sequence[float], updates: float = 0.0
    ) -> list[float]:
        """Return how long a steady step takes for each time that its computation may take.

        In bytes that the drive could move meanwhile.

        Args:
            reach: the last position of the window, by position.
            moves: what the step moves.
            frames: of the arena, without those of pages that always stay.
            works: how long all computation of a step takes but that of updates.
            updates: how long all updates of a step take, beside their transfers.
        """
        turn = self._turn
        nbytes = [turn.nbytes[page] for page in turn.pages]
        entering: list[list[bool]] = [[] for _ in turn.trace]
        leaving: list[list[int]] = [[] for _ in turn.trace]  # by position; 0 for a page that is not written
        for use in moves.entering:
            entering[turn.places[use]].append(use in moves.read)
        for use in moves.leaving:
            leaving[turn.places[use]].append(nbytes[use] if use in moves.written else 0)
        counts = [*itertools.accumulate(map(sum, entering), initial=0)]
        wanted = [counts[-1] * (last // turn.length) + counts[last % turn.length + 1] for last in reach]
        reads = [nbytes[use] for use in moves.entering if use in moves.read]
        each = [updates * share for share in updating(turn.trace, turn.layout)] if updates else [0.0] * turn.length
        stops = list(zip(self._aside, wanted, reach, entering, each, leaving, strict=True))
        return [self._length(stops, reads, frames, [share * work for share in self._shares]) for work in works]

    def _length(self, stops: Sequence[_Stop], reads: Sequence[int], frames: int, work: Sequence[float]) -> float:
        """Walk some steps; return how long the last one takes.

        Args:
            stops: what happens at every position.
            reads: length of every page that is read in a step, in the order in which they are used.
            work: how long computation takes before each access, and behind all.
        """
        clockwork = Clockwork(reads, frames)
        before = [work[0] + work[-1], *work[1:-1]]  # what comes behind all is before the first one of the next step
        training = updated = began = 0.0  # how far the training thread has come, and the thread for updates
        ended: deque[tuple[int, float]] = deque()  # how far the window reaches until an update has ended, and when
        for step in range(_STEPS):
            began = training
            position = step * len(stops)
            more = step * len(reads)
            for computing, (aside, wanted, last, entering, updating, leaving) in zip(before, stops, strict=True):
                clockwork.wanted = wanted + more
                training += computing
                while ended and not aside and ended[0][0] < position:
                    training = max(training, ended.popleft()[1])
                if training > clockwork.now or clockwork.wanted > clockwork.started:
                    clockwork.go_on(training)
                at = updated if aside and updated > training else training
                if entering:
                    at = clockwork.enter(entering, at)
                at += updating
                if aside:
                    updated = at
                    ended.append((step * len(stops) + last, at))
                else:
                    training = at
                if at > clockwork.now:
                    clockwork.go_on(at)
                if leaving:
                    clockwork.leave(leaving)
                position += 1
        return training - began


class Clockwork:
    """The drive and the frames of an arena, in time, which is counted in bytes that the drive could have moved.

    A model of the pager for one walk, on one thread. Life cycle of a page: wanted, started when there is a frame, ready
    when the drive has read it, arrived when somebody takes it; its frame is free when it leaves, or when it has been
    written. Pages are started, and arrive, in the order in which they are wanted.
    """

    def __init__(self, reads: Sequence[int], frames: int) -> None:
        """Begin with an empty arena.

        Args:
            reads: length of every page that is read in a step, in order; over and over.
            frames: of the arena.
        """
        self._reads = itertools.cycle(reads)
        self._free = frames  # frames that are free now
        self._drive = 0.0  # when it has done all that it was given, in bytes
        self._ready: deque[float] = deque()  # when pages that have not arrived have been read, in bytes, in order
        self._written: deque[float] = deque()  # when frames come back from writing, in bytes, in order
        self.started = 0
        """How many reads have been started."""
        self.wanted = 0
        """How many reads have been wanted, each as soon as there is a frame."""
        self.now = 0.0
        """How far anything has come, in bytes."""

    def go_on(self, until: float) -> None:
        """Let the time go on, if it has not come so far."""
        now = self.now
        if until > now:
            self.now = until
        if self.started < self.wanted:
            self._start(now)

    def _start(self, before: float) -> None:
        """Start reads for which there is a frame, since `before` or since the one that was there has been written."""
        now, free, drive, written, ready = self.now, self._free, self._drive, self._written, self._ready
        left = self.wanted - self.started
        while left:
            if free:
                free -= 1
                since = before
            elif written and written[0] <= now:
                since = written.popleft()
            else:
                break
            left -= 1
            drive = (drive if drive > since else since) + next(self._reads)
            ready.append(drive)
        self._free, self._drive, self.started = free, drive, self.wanted - left

    def enter(self, reads: Sequence[bool], at: float) -> float:
        """Return when somebody has some pages who begins to wait for them: the next of those read, or just a frame."""
        ready, written = self._ready, self._written
        for read in reads:
            if read:
                while not ready:
                    self.go_on(written[0])
                since = ready.popleft()
            elif self._free:
                self._free -= 1
                continue
            else:
                since = written.popleft()
            if since > at:
                at = since
        return at

    def leave(self, writes: Sequence[int]) -> None:
        """Give up the frames of pages, which are written first where they were modified: so many bytes, or 0."""
        drive, now = self._drive, self.now
        for nbytes in writes:
            if nbytes:
                drive = (drive if drive > now else now) + nbytes
                self._written.append(drive)
            else:
                self._free += 1
        self._drive = drive
