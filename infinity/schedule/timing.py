"""How long a step takes under a plan: the plan, walked with a clock. Pure, as the planner is.

The walk knows one drive, which moves one transfer after the other in the order in which the pager starts them, the
cache slots of the host cache, and how long the training thread computes between its accesses. Time is counted in bytes
that the
drive could have moved meanwhile. So nothing has to be measured, plans are the same on every machine, and what is found
holds for any drive: computation that takes as long as the transfers hides them only if the window reaches far enough.
Plans are compared by that alone.

Where more is known of a machine (`Beside`), the walk of a plan takes it into account. Each resource does one thing
after the other, and is known by when it has done all that it was given:

- updates, on a thread of their own or on the training thread;
- checksums: a page is there when it has been read and then verified, and its cache slot is free when it has been hashed
  and
  written;
- the interpreter: each access costs the thread that makes it some Python;
- the link to a device, both ways. Weights are copied when their pages are there, but not before their update has ended:
  where they are staged, by a thread of its own that training waits for when it gathers them, else by the training
  thread. Gradients leave behind the computation of their FSDP module, beside that of the next one, and are waited for
  by the
  update or the page that takes them; where updates are in backward, only so many FSDP modules may be between the two.

What is left out: the training thread launches nothing ahead, so that Python of its accesses adds to computation; no
thread waits for another one's Python; what is copied shares neither the link with the other direction nor the memory of
the host with updates.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.cycle import Cycle, Moves
from infinity.schedule.trace import Access, Event, EventKind, Mode, gather_accesses
from infinity.schedule.update_schedule import UpdateSchedule, expand_events

BACKWARD = 2.5
"""Computation of an FSDP module in backward, over that in forward:

between 2, and 3 where backward computes forward again.
"""
_STEPS = 2
"""How many steps it takes until one is like those that follow."""
_TRAINING, _UPDATES, _STAGES, _LINK = range(4)
"""Who makes an access: the training thread, which waits for it; the thread for updates; the one that copies weights to
a device ahead of their gather; the link back."""
_Stop = tuple[int, int, int, Sequence[bool], float, Sequence[int]]
"""An access: who makes it, reads that have been wanted, the last position of the window, whether each page that
enters is read, how long it computes, and how many bytes each page that leaves has to write."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What works in a step beside the drive and computation, and how long all of it takes in a step, if it were alone.

    In one FSDP module of time: seconds, or bytes that the drive could move meanwhile. 0: there is none, or it takes no
    time.
    """

    updates: float = 0.0
    """Updates, beside their transfers and copies."""
    weights: float = 0.0
    """Copies to the device of all weights that are gathered."""
    gradients: float = 0.0
    """Copies of all gradients back."""
    read: float = 0.0
    """Copies to the device of all pages that are updated there; 0: updates are on the CPU."""
    changed: float = 0.0
    """Copies of those pages back."""
    verifying: float = 0.0
    """Checksums of all pages that are read."""
    hashing: float = 0.0
    """Checksums of all pages that are written."""
    interpreter: float = 0.0
    """Python of all accesses."""
    behind: int = 0
    """FSDP modules that may have computed their gradients and not been updated, where updates are in backward; 0: any
    number."""

    def times(self, factor: float) -> Beside:
        """Return the same in another FSDP module of time."""
        return replace(
            self,
            updates=factor * self.updates,
            weights=factor * self.weights,
            gradients=factor * self.gradients,
            read=factor * self.read,
            changed=factor * self.changed,
            verifying=factor * self.verifying,
            hashing=factor * self.hashing,
            interpreter=factor * self.interpreter,
        )

    @property
    def linked(self) -> bool:
        """Whether anything is copied to a device or back."""
        return self.weights > 0 or self.gradients > 0 or self.read > 0

    @property
    def longest(self) -> float:
        """What none of them lets a step be shorter than, but updates and Python, which may be on any thread."""
        return max(self.weights + self.read, self.gradients + self.changed, self.verifying, self.hashing)


NOTHING = Beside()
"""Nothing takes any time but the drive and computation."""


def computation(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return which share of a step's computation comes before each access; the last item is what comes behind all.

    An FSDP module is computed with when all of it has been gathered: before the next access to its pages, or the next
    gather.
    It takes time in proportion to its weights, and more when it is gathered again.
    """
    shares = [0.0] * (len(trace) + 1)
    gathered: set[int] = set()
    fsdp_module, factor, due = (
        -1,
        1.0,
        0.0,
    )  # what was gathered last, its factor, and its computation that has not come yet
    for position, access in enumerate(trace):
        page = layout.pages[access[0].page]
        gathers = _gathers(access, layout)
        another = page.fsdp_module != fsdp_module
        if (gathers and another) or (
            not gathers and not another
        ):  # another FSDP module is gathered, or this one written to
            shares[position], due = due, 0.0
        if gathers:
            if another:
                factor = BACKWARD if page.fsdp_module in gathered else 1.0
                fsdp_module = page.fsdp_module
                gathered.add(fsdp_module)
            due += factor * page.nbytes
    shares[-1] = due
    total = sum(shares) or 1.0
    return [share / total for share in shares]


@dataclass(frozen=True, kw_only=True)
class StagedComputation:
    """When a step computes whose weights are staged: its trace does not tell, as pages are read ahead of their gather.

    For example, at position 7 the computation with FSDP module 1 has come, then FSDP module 2 is computed with, whose
    pages were read
    at positions 3 to 6, and that ends before position 7 too, where FSDP module 3 is on the device already: `shares[7]`
    is that
    of FSDP module 1, and `awaited` has (7, 2, share of FSDP module 2).
    """

    shares: tuple[float, ...]
    """Of a step's computation, by position: what comes before the access and waits for nothing more; the last item is
    what comes behind all."""
    prefetched: frozenset[int]
    """Positions of accesses that another thread makes, ahead of the gather."""
    awaited: tuple[tuple[int, int, float], ...]
    """(position, FSDP module, share), in order: before the access, training waits until the FSDP module's weights are
    on the device,
    and then computes so much."""


def staged_computation(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule
) -> StagedComputation | None:
    """Return when a step computes that looks like `events`; None where nothing is staged, and nothing lives there.

    An FSDP module is computed with from the event of its gather to the next event. Shares are those of `computation`.
    """
    if not update_schedule.prefetched and not update_schedule.gpu_resident:
        return None
    expansion = expand_events(events, layout, update_schedule)
    work = _computation_of_events(events, layout)
    length = len(expansion.accesses)
    shares = [0.0] * (length + 1)
    awaited: list[tuple[int, int, float]] = []

    def compute(position: int, share: float) -> None:
        if awaited and awaited[-1][0] == position:
            _, fsdp_module, before = awaited.pop()
            awaited.append((position, fsdp_module, before + share))
        else:
            shares[position] += share

    ends = [*expansion.starts[1:], length]
    for number, (event, begin, end) in enumerate(zip(events, expansion.starts, ends, strict=True)):
        if event.kind is EventKind.GATHER:
            if number in expansion.awaited:
                awaited.append((begin, event.fsdp_module, 0.0))
            compute(end, work[number])
    return StagedComputation(shares=tuple(shares), prefetched=expansion.prefetched, awaited=tuple(awaited))


def _computation_of_events(events: Sequence[Event], layout: Layout) -> list[float]:
    """Return which share of a step's computation comes behind each event."""
    gathered: set[int] = set()
    work = [0.0] * len(events)
    for position, event in enumerate(events):
        if event.kind is EventKind.GATHER:
            weight = sum(layout.pages[access[0].page].nbytes for access in gather_accesses(layout, event.fsdp_module))
            work[position] = weight * (BACKWARD if event.fsdp_module in gathered else 1.0)
            gathered.add(event.fsdp_module)
    total = sum(work) or 1.0
    return [each / total for each in work]


def _gathers(access: Access, layout: Layout) -> bool:
    """Whether an access copies weights out to be computed with."""
    return len(access) == 1 and access[0].mode is Mode.READ and layout.pages[access[0].page].role is Role.PARAM


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


class _Side(NamedTuple):
    """What an access has to do with the device."""

    fsdp_module: int
    """FSDP module of its pages."""
    gathers: bool = False
    """Whether it copies weights to the device."""
    stores: bool = False
    """Whether it stores gradients that come from the device."""
    updates: bool = False
    """Whether it uses gradients that come from the device, and are not stored."""
    begins: bool = False
    """Whether it is the first one of a gather, or of an update that uses gradients from the device."""
    copying: float = 0.0
    """Share of a step's weights that it copies, or of the gradients that it stores or, if it begins, uses."""
    updating: float = 0.0
    """Share of a step's updates that it is."""
    weights: tuple[int, ...] = ()
    """Pages of weights that it copies or changes."""


def _sides(trace: Sequence[Access], layout: Layout, *, on_device: bool) -> list[_Side]:
    """Return what each access has to do with the device.

    Args:
        on_device: whether it updates: then gradients that are used at once stay there.
    """
    pages, param, grad = layout.pages, Role.PARAM, Role.GRAD
    weights, gradients = Counter[int](), Counter[int]()  # bytes by FSDP module, of gradients as they arrive
    for page in pages:
        weights[page.fsdp_module] += page.nbytes if page.role is param else 0
        gradients[page.fsdp_module] += page.nbytes if page.role is grad and not page.component else 0
    accesses = [len(list(gather_accesses(layout, fsdp_module))) for fsdp_module in range(len(layout.fsdp_modules))]
    sides: list[_Side] = []
    before: tuple[int, bool] | None = None  # FSDP module, and whether it was gathered
    for access in trace:
        first, mode = access[0]
        fsdp_module, gathers = pages[first].fsdp_module, _gathers(access, layout)
        begins, before = (fsdp_module, gathers) != before, (fsdp_module, gathers)
        changed = tuple(page for page, how in access if how.modifies and pages[page].role is param)
        if gathers:
            copying = weights[fsdp_module] / accesses[fsdp_module]
            sides.append(_Side(fsdp_module, gathers=True, begins=begins, copying=copying, weights=(first,)))
        elif pages[first].role is not grad:
            copying = float(begins and not on_device and gradients[fsdp_module])
            sides.append(_Side(fsdp_module, updates=True, begins=begins, copying=copying, weights=changed))
        elif mode.modifies:
            sides.append(_Side(fsdp_module, stores=True, copying=float(pages[first].nbytes)))
        else:
            sides.append(_Side(fsdp_module, weights=changed))
    there = sum(side.copying for side in sides if side.gathers) or 1.0
    back = sum(side.copying for side in sides if not side.gathers) or 1.0
    return [
        side._replace(copying=side.copying / (there if side.gathers else back), updating=share)
        for side, share in zip(sides, updating(trace, layout), strict=True)
    ]


class Timing:
    """The walks of plans of one trace: what does not depend on the plan is found out once. Nothing of it changes."""

    def __init__(self, turn: Cycle, *, threaded: bool, prefetched: StagedComputation | None = None) -> None:
        """Find out when a step computes.

        Args:
            threaded: whether updates are waited for on a thread of their own.
            staged: when a step of this trace computes, if its weights are staged.
        """
        self._turn = turn
        self._shares = prefetched.shares if prefetched else computation(turn.trace, turn.layout)
        pages, update = turn.layout.pages, Role.UPDATE
        self._who = [
            _UPDATES if threaded and any(pages[page].role is update for page, _ in access) else _TRAINING
            for access in turn.trace
        ]
        self._fsdp_modules = [pages[access[0].page].fsdp_module for access in turn.trace]
        self._awaited: dict[
            int, list[tuple[int, float]]
        ] = {}  # by position, FSDP modules and the computation behind each
        if prefetched:
            for position in prefetched.prefetched:
                self._who[position] = _STAGES
            for position, fsdp_module, share in prefetched.awaited:
                self._awaited.setdefault(position % turn.length, []).append((fsdp_module, share))

    def lengths(
        self, reach: Sequence[int], moves: Moves, cache_slots: int, works: Sequence[float], beside: Beside = NOTHING
    ) -> list[float]:
        """Return how long a steady step takes for each time that its computation may take.

        In bytes that the drive could move meanwhile.

        Args:
            reach: the last position of the window, by position.
            moves: what the step moves.
            cache slots: of the host cache, without those of pages that always stay.
            works: how long all computation of a step takes but that of updates.
            beside: what else takes time.
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
        each = [0.0] * turn.length
        if beside.updates:
            each = [beside.updates * share for share in updating(turn.trace, turn.layout)]
        before = [0.0] * (turn.length + 1)
        if beside.interpreter:  # a gather is a hook of the training thread, whoever copies
            python = beside.interpreter / turn.length
            hooks = [_gathers(access, turn.layout) for access in turn.trace]
            each = [taking if hook else taking + python for taking, hook in zip(each, hooks, strict=True)]
            before = [python if hook else 0.0 for hook in (*hooks, False)]
        who = self._who
        sides = _sides(turn.trace, turn.layout, on_device=beside.read > 0) if beside.linked else None
        if sides is not None:
            who = [_LINK if side.stores else thread for side, thread in zip(sides, who, strict=True)]
        stops = list(zip(who, wanted, reach, entering, each, leaving, strict=True))
        written = sum(nbytes[use] for use in moves.written)
        verifying = beside.verifying / sum(reads) if reads else 0.0
        hashing = beside.hashing / written if written else 0.0
        return [
            self._length(
                stops,
                Clockwork(reads, cache_slots, verifying=verifying, hashing=hashing),
                [share * work + python for share, python in zip(self._shares, before, strict=True)],
                {
                    place: [(fsdp_module, share * work) for fsdp_module, share in found]
                    for place, found in self._awaited.items()
                },
                _Link(sides, beside) if sides is not None else None,
            )
            for work in works
        ]

    def _length(
        self,
        stops: Sequence[_Stop],
        clockwork: Clockwork,
        work: Sequence[float],
        awaited: Mapping[int, Sequence[tuple[int, float]]],
        link: _Link | None,
    ) -> float:
        """Walk some steps; return how long the last one takes.

        Args:
            stops: what happens at every position.
            clockwork: nothing has moved yet.
            work: how long computation takes before each access, and behind all.
            awaited: by position, FSDP modules whose weights computation waits for then, and how long it takes with
                each.
            link: to the device, where there is one.
        """
        before = [work[0] + work[-1], *work[1:-1]]  # what comes behind all is before the first one of the next step
        training = updated = prefetched = began = 0.0  # how far the training thread has come, and those beside it
        there: dict[int, float] = {}  # by FSDP module, when its weights have been staged
        ended: deque[tuple[int, float]] = deque()  # how far the window reaches until others have ended, and when
        for step in range(_STEPS):
            began = training
            position = step * len(stops)
            more = step * clockwork.reads
            for place, (computing, stop) in enumerate(zip(before, stops, strict=True)):
                who, wanted, last, entering, taking, leaving = stop
                clockwork.wanted = wanted + more
                training += computing
                for fsdp_module, behind in awaited.get(place, ()):
                    training = max(training, there.get(fsdp_module, 0.0)) + behind
                if link is not None:
                    training = link.leave(place, training)
                while ended and who == _TRAINING and ended[0][0] < position:
                    training = max(training, ended.popleft()[1])
                if training > clockwork.now or clockwork.wanted > clockwork.started:
                    clockwork.go_on(training)
                at = training
                if who == _UPDATES and updated > at:
                    at = updated
                elif who == _STAGES and prefetched > at:
                    at = prefetched
                if link is not None:
                    at = link.begin(place, at)
                if entering:
                    at = clockwork.enter(entering, at)
                at += taking
                free = at
                if link is not None:
                    free, at = link.end(place, at)
                if who != _TRAINING:
                    ended.append((step * len(stops) + last, at))
                    if who == _UPDATES:
                        updated = free
                    elif who == _STAGES:
                        prefetched = there[self._fsdp_modules[place]] = at
                elif at > training:
                    training = at
                if at > clockwork.now:
                    clockwork.go_on(at)
                if leaving:
                    clockwork.leave(leaving)
                position += 1
        return training - began


class _Link:
    """The link to a device in time, both ways, for one walk.

    Weights are copied page after page. Life cycle of gradients: they leave when they have been computed, and are there
    when all have been copied; an update of the FSDP module uses them up.
    """

    def __init__(self, sides: Sequence[_Side], beside: Beside) -> None:
        """Begin with nothing on the device.

        Args:
            sides: by position.
            beside: how long copies take, and how many FSDP modules may wait for their update.
        """
        self._sides, self._behind = sides, beside.behind
        self._weights, self._gradients = beside.weights, beside.gradients
        self._read, self._changed = beside.read, beside.changed
        self._there = 0.0  # when all that was to be copied to the device so far has been
        self._back = 0.0  # when all that was to be copied back so far has been
        self._arrived: dict[int, float] = {}  # by FSDP module, when its gradients are in host memory
        self._updated: dict[int, float] = {}  # by FSDP module, when its last update from them has ended
        self._waiting: deque[int] = deque()  # FSDP modules whose gradients have left, those of the last ones
        self._written: dict[int, float] = {}  # by page, when weights have been changed last

    def leave(self, place: int, training: float) -> float:
        """Let gradients leave that an access uses, before all that it does; return when the training thread goes on."""
        side = self._sides[place]
        if side.updates and side.begins:
            if self._behind and len(self._waiting) == self._behind:
                training = max(training, self._updated.get(self._waiting.popleft(), 0.0))
            self._waiting.append(side.fsdp_module)
            self._back = max(self._back, training) + side.copying * self._gradients
            self._arrived[side.fsdp_module] = self._back
        return training

    def begin(self, place: int, at: float) -> float:
        """Return when an access begins of which the thread is at `at`: its copy, or what waits for one."""
        side = self._sides[place]
        if side.gathers:
            return max(at, self._there, self._written.get(side.weights[0], 0.0))
        if side.stores:
            return max(at, self._back)
        return max(at, self._arrived.get(side.fsdp_module, 0.0)) if side.updates else at

    def end(self, place: int, at: float) -> tuple[float, float]:
        """Return when the thread of an access goes on that has its pages at `at`, and when the access ends."""
        side = self._sides[place]
        if side.gathers:
            at = self._there = at + side.copying * self._weights
        elif side.stores:
            at = self._back = at + side.copying * self._gradients
        else:
            free = at
            if self._read and side.updating:
                free = self._there = max(at, self._there) + side.updating * self._read
                at = self._back = max(free, self._back) + side.updating * self._changed
            self._updated[side.fsdp_module] = at
            self._written.update(dict.fromkeys(side.weights, at))
            return free, at
        return at, at


class Clockwork:
    """The drive and the cache slots of a host cache, in time, which is counted in bytes that the drive could have
    moved.

    A model of the pager for one walk, on one thread. Life cycle of a page: wanted, started when there is a cache slot,
    ready
    when the drive has read it and it has been verified, arrived when somebody takes it; its cache slot is free when it
    leaves, or when it has been written. Pages are started, and arrive, in the order in which they are wanted.
    """

    def __init__(self, reads: Sequence[int], cache_slots: int, *, verifying: float = 0.0, hashing: float = 0.0) -> None:
        """Begin with an empty host cache.

        Args:
            reads: length of every page that is read in a step, in order; over and over.
            cache slots: of the host cache.
            verifying: how long a checksum takes for each byte that has been read.
            hashing: how long it takes for each byte that is to be written.
        """
        self.reads = len(reads)
        """How many pages are read in a step."""
        self._reads = itertools.cycle(reads)
        self._verifying, self._hashing = verifying, hashing
        self._verified = self._hashed = 0.0  # when all checksums are done of pages that were read, and are written
        self._free = cache_slots  # cache slots that are free now
        self._drive = 0.0  # when it has done all that it was given, in bytes
        self._ready: deque[float] = deque()  # when pages that have not arrived have been read, in bytes, in order
        self._written: deque[float] = deque()  # when cache slots come back from writing, in bytes, in order
        self.started = 0
        """How many reads have been started."""
        self.wanted = 0
        """How many reads have been wanted, each as soon as there is a cache slot."""
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
        """Start reads for which there is a cache slot, since `before` or since the one that was there has
        been written.
        """
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
            nbytes = next(self._reads)
            drive = (drive if drive > since else since) + nbytes
            if self._verifying:
                self._verified = max(self._verified, drive) + self._verifying * nbytes
                ready.append(self._verified)
            else:
                ready.append(drive)
        self._free, self._drive, self.started = free, drive, self.wanted - left

    def enter(self, reads: Sequence[bool], at: float) -> float:
        """Return when somebody has some pages who begins to wait for them:

        the next of those read, or just a cache slot.
        """
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
        """Give up the cache slots of pages, which are written first where they were modified: so many bytes, or 0."""
        drive, now = self._drive, self.now
        for nbytes in writes:
            if nbytes:
                drive = (drive if drive > now else now) + nbytes
                if self._hashing:  # beside other transfers
                    self._hashed = max(self._hashed, now) + self._hashing * nbytes
                    self._written.append(max(drive, self._hashed))
                else:
                    self._written.append(drive)
            else:
                self._free += 1
        self._drive = drive
