"""Step time under a plan, from a simulation of the plan. Pure: no I/O, no torch, no wall clock.

The simulation models one drive, which performs transfers one at a time in the order in which the pager starts them; the
cache slots of the host cache; and the time that the training thread computes between its accesses. Time is counted in
the bytes that the drive could have moved meanwhile. Therefore no measurement is needed, plans are the same on every
machine, and a comparison of plans holds for any drive: computation that takes as long as the transfers hides them only
if the window reaches far enough. The planner compares plans by this simulation alone.

If more is known about a machine (`OtherResources`), the simulation takes it into account. Each resource does one thing at a
time, and is represented by the time at which it will have finished all work that it was given:

- Updates run on a thread of their own or on the training thread.
- Checksums: a page is available when it has been read and then verified, and its cache slot is free when the page has
  been hashed and written.
- The Python interpreter: each access costs its thread some Python time.
- The link to a device, in both directions. Weights are copied when their pages are available, but not before their
  update has ended. If they are prefetched to the GPU, a separate thread copies them, and the training thread waits for
  it at the gather; otherwise the training thread copies them. Gradients are copied to the host after the computation of
  their FSDP module, overlapping the computation of the next one. The update, or the page that stores them, waits for
  the copy. If updates run in backward, only a limited number of FSDP modules may have been computed and not yet
  updated.

The simulation ignores three effects. The training thread launches no work ahead of time, so that the Python time of its
accesses adds to computation. No thread waits for the Python time of another thread. Copies share neither the link with
the opposite direction nor host memory bandwidth with updates.
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
"""Computation time of an FSDP module in backward, relative to forward: 2 without recomputation, 3 with it."""
_STEPS = 2
"""Number of simulated steps. The last one is steady: all later steps take as long."""
_TRAINING, _UPDATES, _STAGES, _LINK = range(4)
"""Thread of an access: the training thread, which waits for it; the update thread; the thread that prefetches weights
to the GPU; the copy of gradients to the host.
"""
_Stop = tuple[int, int, int, Sequence[bool], float, Sequence[int]]
"""An access: its thread, the number of reads requested so far, the last position of the window, whether each page that
enters is read, the time that the access takes, and the number of bytes that each page that leaves has to write.
"""


@dataclass(frozen=True, kw_only=True)
class OtherResources:
    """Resources other than the drive and computation, each as the time per step that it would need alone.

    All fields have one unit of time: seconds, or bytes that the drive could move meanwhile. 0 means that the resource
    does not exist or takes no time.
    """

    updates: float = 0.0
    """Updates, without their transfers and copies."""
    weights: float = 0.0
    """Copies of all gathered weights to the device."""
    gradients: float = 0.0
    """Copies of all gradients to the host."""
    read: float = 0.0
    """Copies to the device of all pages that are updated there. 0 if updates run on the CPU."""
    changed: float = 0.0
    """Copies of these pages back to the host."""
    verifying: float = 0.0
    """Checksums of all pages that are read."""
    hashing: float = 0.0
    """Checksums of all pages that are written."""
    interpreter: float = 0.0
    """Python time of all accesses."""
    behind: int = 0
    """Maximum number of FSDP modules that have computed their gradients and are not updated yet, if updates run in
    backward. 0 means no limit.
    """

    def times(self, factor: float) -> OtherResources:
        """Return the same resources in another unit of time.

        Args:
            factor: value of one current unit in the new unit, e.g. bytes per second.
        """
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
        """Return ``True`` if anything is copied to a device or back."""
        return self.weights > 0 or self.gradients > 0 or self.read > 0

    @property
    def longest(self) -> float:
        """Return a lower bound for the time of a step, in the unit of the fields.

        Updates and Python do not count because they may run on any thread.
        """
        return max(self.weights + self.read, self.gradients + self.changed, self.verifying, self.hashing)


NOTHING = OtherResources()
"""No resources: only the drive and computation take time."""


def computation(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return the fraction of a step's computation that precedes each access. The last item is the part after all
    accesses.

    The computation of an FSDP module begins when all of its pages have been gathered. It precedes the next access to
    the pages of this FSDP module that is not a gather, or the gather of another FSDP module. Its time is proportional
    to the size of the weights, and multiplied by `BACKWARD` if they are gathered again.

    Args:
        trace: accesses of one step.
        layout: pages of this rank.
    """
    shares = [0.0] * (len(trace) + 1)
    gathered: set[int] = set()
    # FSDP module that was gathered last, its factor, and its computation that has not been assigned to a position yet.
    fsdp_module, factor, due = -1, 1.0, 0.0
    for position, access in enumerate(trace):
        page = layout.pages[access[0].page]
        gathers = _gathers(access, layout)
        another = page.fsdp_module != fsdp_module
        # Another FSDP module is gathered, or pages of this one are updated or receive gradients.
        if (gathers and another) or (not gathers and not another):
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
    """Computation of a step that prefetches weights to the GPU.

    The trace does not show it, because pages are read ahead of their gather. For example, FSDP module 1 has finished
    its computation before position 7. FSDP module 2, whose pages were read at positions 3 to 6, computes next and
    finishes before position 7 too, because FSDP module 3 is already on the device. Then `shares[7]` is the fraction of
    FSDP module 1, and `awaited` contains (7, 2, fraction of FSDP module 2).
    """

    shares: tuple[float, ...]
    """Fractions of a step's computation, by position: the computation before the access that waits for no prefetched
    weights. The last item is the part after all accesses.
    """
    prefetched: frozenset[int]
    """Positions of accesses that another thread performs ahead of the gather."""
    awaited: tuple[tuple[int, int, float], ...]
    """(position, FSDP module, fraction), in order. Before this access, the training thread waits until the weights of
    the FSDP module are on the device, and then computes this fraction.
    """


def staged_computation(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule
) -> StagedComputation | None:
    """Return the computation of a step, or ``None`` if it neither prefetches weights to the GPU nor has GPU-resident
    modules.

    The computation of an FSDP module lasts from its gather event to the next event. The fractions are the same as
    in `computation`.

    Args:
        events: one step.
        layout: pages of this rank.
        update_schedule: where updates run, and which weights the device holds.
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
    """Return the fraction of a step's computation that follows each event."""
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
    """Return whether an access reads weights for a gather."""
    return len(access) == 1 and access[0].mode is Mode.READ and layout.pages[access[0].page].role is Role.PARAM


def updating(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return the fraction of a step's updates that each access performs, in proportion to the number of updated
    elements.

    Args:
        trace: accesses of one step.
        layout: pages of this rank.
    """
    pages = layout.pages
    elements = [
        # The smallest modified page is the updated range: weight pages may extend beyond it.
        min((pages[p].count for p, mode in access if mode.modifies and pages[p].role is not Role.GRAD), default=0)
        for access in trace
    ]
    total = sum(elements) or 1
    return [count / total for count in elements]


class _Side(NamedTuple):
    """Relation of an access to the device."""

    fsdp_module: int
    """FSDP module of its pages."""
    gathers: bool = False
    """``True`` if the access copies weights to the device."""
    stores: bool = False
    """``True`` if the access stores gradients that come from the device."""
    updates: bool = False
    """``True`` if the access uses gradients that come from the device and are not stored."""
    begins: bool = False
    """``True`` if the access is the first one of a gather, or of an update that uses gradients from the device."""
    copying: float = 0.0
    """Fraction of a step's weights that the access copies, or of the gradients that it stores or (if it is the first
    one of an update) uses.
    """
    updating: float = 0.0
    """Fraction of a step's updates that the access performs."""
    weights: tuple[int, ...] = ()
    """Weight pages that the access copies or modifies."""


def _sides(trace: Sequence[Access], layout: Layout, *, on_device: bool) -> list[_Side]:
    """Return the relation of each access to the device.

    Args:
        trace: accesses of one step.
        layout: pages of this rank.
        on_device: whether updates run on the device. If so, gradients that are used at once stay there.
    """
    pages, param, grad = layout.pages, Role.PARAM, Role.GRAD
    weights, gradients = Counter[int](), Counter[int]()  # bytes by FSDP module; of gradients, the first component
    for page in pages:
        weights[page.fsdp_module] += page.nbytes if page.role is param else 0
        gradients[page.fsdp_module] += page.nbytes if page.role is grad and not page.component else 0
    accesses = [len(list(gather_accesses(layout, fsdp_module))) for fsdp_module in range(len(layout.fsdp_modules))]
    sides: list[_Side] = []
    before: tuple[int, bool] | None = None  # FSDP module of the previous access, and whether that was a gather
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
    """Simulations of plans for one trace. Immutable: the constructor precomputes all values that do not depend on the
    plan.
    """

    def __init__(self, cycle: Cycle, *, threaded: bool, prefetched: StagedComputation | None = None) -> None:
        """Precompute the computation before each access.

        Args:
            cycle: the trace.
            threaded: whether updates run on a thread of their own.
            prefetched: computation of a step of this trace, if its weights are prefetched to the GPU.
        """
        self._cycle = cycle
        self._shares = prefetched.shares if prefetched else computation(cycle.trace, cycle.layout)
        pages, update = cycle.layout.pages, Role.UPDATE
        self._who = [
            _UPDATES if threaded and any(pages[page].role is update for page, _ in access) else _TRAINING
            for access in cycle.trace
        ]
        self._fsdp_modules = [pages[access[0].page].fsdp_module for access in cycle.trace]
        # By position, FSDP modules and the computation that follows each.
        self._awaited: dict[int, list[tuple[int, float]]] = {}
        if prefetched:
            for position in prefetched.prefetched:
                self._who[position] = _STAGES
            for position, fsdp_module, share in prefetched.awaited:
                self._awaited.setdefault(position % cycle.length, []).append((fsdp_module, share))

    def lengths(
        self,
        reach: Sequence[int],
        moves: Moves,
        cache_slots: int,
        works: Sequence[float],
        beside: OtherResources = NOTHING,
    ) -> list[float]:
        """Return the time of a steady step for each of several computation times.

        All times are counted in the bytes that the drive could move meanwhile.

        Args:
            reach: last position of the window, by position.
            moves: transfers of the step.
            cache_slots: cache slots of the host cache, without the slots of pages that always stay.
            works: time that all computation of a step takes, without updates.
            beside: other resources that take time.
        """
        cycle = self._cycle
        nbytes = [cycle.nbytes[page] for page in cycle.pages]
        entering: list[list[bool]] = [[] for _ in cycle.trace]
        leaving: list[list[int]] = [[] for _ in cycle.trace]  # bytes to write, by position; 0: the page is not written
        for use in moves.entering:
            entering[cycle.places[use]].append(use in moves.read)
        for use in moves.leaving:
            leaving[cycle.places[use]].append(nbytes[use] if use in moves.written else 0)
        counts = [*itertools.accumulate(map(sum, entering), initial=0)]
        wanted = [counts[-1] * (last // cycle.length) + counts[last % cycle.length + 1] for last in reach]
        reads = [nbytes[use] for use in moves.entering if use in moves.read]
        each = [0.0] * cycle.length
        if beside.updates:
            each = [beside.updates * share for share in updating(cycle.trace, cycle.layout)]
        before = [0.0] * (cycle.length + 1)
        if beside.interpreter:  # a gather runs a hook on the training thread, no matter which thread copies
            python = beside.interpreter / cycle.length
            hooks = [_gathers(access, cycle.layout) for access in cycle.trace]
            each = [taking if hook else taking + python for taking, hook in zip(each, hooks, strict=True)]
            before = [python if hook else 0.0 for hook in (*hooks, False)]
        who = self._who
        sides = _sides(cycle.trace, cycle.layout, on_device=beside.read > 0) if beside.linked else None
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
        """Simulate `_STEPS` steps and return the time of the last one.

        Args:
            stops: accesses, by position.
            clockwork: drive and cache slots; nothing has moved yet.
            work: time of the computation before each access, and after all accesses.
            awaited: by position, the FSDP modules whose prefetched weights the computation waits for, and the time that
                it then takes.
            link: link to the device, if there is one.
        """
        before = [work[0] + work[-1], *work[1:-1]]  # computation after the last access precedes the next step's first
        training = updated = prefetched = began = 0.0  # times of the training thread and of the other threads
        there: dict[int, float] = {}  # by FSDP module, when its weights have been prefetched to the GPU
        # (position, time): until an access of another thread ends at this time, the window does not reach beyond this
        # position.
        ended: deque[tuple[int, float]] = deque()
        for step in range(_STEPS):
            began = training
            position = step * len(stops)
            more = step * clockwork.reads
            for place, (computing, stop) in enumerate(zip(before, stops, strict=True)):
                who, wanted, last, entering, taking, leaving = stop
                clockwork.wanted = wanted + more
                training += computing
                for fsdp_module, duration in awaited.get(place, ()):
                    training = max(training, there.get(fsdp_module, 0.0)) + duration
                if link is not None:
                    training = link.leave(place, training)
                # Keep in step with `Cursor`: its window begins at the oldest access that has not ended, so an open
                # update limits how far the training thread gets. Without this wait, the simulation hides transfers that
                # the pager cannot hide, and the planner prefers plans that are slow in practice.
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
    """Both directions of the link to a device, for one simulation.

    Weights are copied page by page. Life cycle of gradients: they leave the device when they have been computed, arrive
    when all of them have been copied, and are used up by an update of their FSDP module.
    """

    def __init__(self, sides: Sequence[_Side], beside: OtherResources) -> None:
        """Start with an idle link.

        Args:
            sides: relation of each access to the device, by position.
            beside: time that copies take, and the number of FSDP modules that may wait for their update.
        """
        self._sides, self._limit = sides, beside.behind
        self._weights, self._gradients = beside.weights, beside.gradients
        self._read, self._changed = beside.read, beside.changed
        self._there = 0.0  # when all copies to the device so far have ended
        self._back = 0.0  # when all copies to the host so far have ended
        self._arrived: dict[int, float] = {}  # by FSDP module, when its gradients are in host memory
        self._updated: dict[int, float] = {}  # by FSDP module, when its last update from them has ended
        self._waiting: deque[int] = deque()  # FSDP modules whose gradients have left most recently
        self._written: dict[int, float] = {}  # by page, when weights were last modified

    def leave(self, place: int, training: float) -> float:
        """Start to copy the gradients that an access uses. Return the time at which the training thread continues."""
        side = self._sides[place]
        if side.updates and side.begins:
            if self._limit and len(self._waiting) == self._limit:
                training = max(training, self._updated.get(self._waiting.popleft(), 0.0))
            self._waiting.append(side.fsdp_module)
            self._back = max(self._back, training) + side.copying * self._gradients
            self._arrived[side.fsdp_module] = self._back
        return training

    def begin(self, place: int, at: float) -> float:
        """Return the time at which an access begins, after waiting for the link and for copies that it depends on.

        Args:
            place: position of the access.
            at: time of its thread.
        """
        side = self._sides[place]
        if side.gathers:
            # As in the pager, a prefetch to the GPU waits for the update of its weights: an earlier copy would contain
            # stale weights.
            return max(at, self._there, self._written.get(side.weights[0], 0.0))
        if side.stores:
            return max(at, self._back)
        return max(at, self._arrived.get(side.fsdp_module, 0.0)) if side.updates else at

    def end(self, place: int, at: float) -> tuple[float, float]:
        """Return the time at which the thread of an access continues, and the time at which the access ends.

        Args:
            place: position of the access.
            at: time at which its pages are available.
        """
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
    """The drive and the cache slots of a host cache. Times are counted in bytes that the drive could have moved.

    This class models the pager for one simulation, on one thread. Life cycle of a page: requested; started when a cache
    slot is free; ready when the drive has read it and its checksum has been verified; arrived when an access takes it.
    Its cache slot is free when the page leaves or, if it was modified, when it has been written. Pages are started, and
    arrive, in the order in which they are requested.
    """

    def __init__(self, reads: Sequence[int], cache_slots: int, *, verifying: float = 0.0, hashing: float = 0.0) -> None:
        """Start with an empty host cache.

        Args:
            reads: lengths in bytes of the pages that a step reads, in order; repeated for every step.
            cache_slots: number of cache slots.
            verifying: time of a checksum per byte that has been read.
            hashing: time of a checksum per byte that will be written.
        """
        self.reads = len(reads)
        """Pages read per step."""
        self._reads = itertools.cycle(reads)
        self._verifying, self._hashing = verifying, hashing
        self._verified = self._hashed = 0.0  # when all checksums so far are done, of read pages and of written pages
        self._free = cache_slots  # cache slots that are free now
        self._drive = 0.0  # when the drive will have finished its transfers, in bytes
        self._ready: deque[float] = deque()  # when pages that have not arrived are ready, in bytes, in order
        self._written: deque[float] = deque()  # when cache slots are free after a write, in bytes, in order
        self.started = 0
        """Number of reads that have started."""
        self.wanted = 0
        """Number of reads that have been requested. Each starts as soon as there is a cache slot."""
        self.now = 0.0
        """Latest time that the drive or any thread has reached, in bytes."""

    def go_on(self, until: float) -> None:
        """Advance the time to `until`, unless it is later already, and start the reads that have a cache slot."""
        now = self.now
        if until > now:
            self.now = until
        if self.started < self.wanted:
            self._start(now)

    def _start(self, before: float) -> None:
        """Start requested reads as far as there are cache slots.

        Args:
            before: earliest time at which a read into a free cache slot starts.
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
        """Return the time at which an access has its pages.

        Args:
            reads: for each page, whether it is the next one that the drive reads; otherwise it only needs a cache slot.
            at: time at which the access begins to wait.
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
        """Free the cache slots of pages, after a write if the page was modified.

        Args:
            writes: number of bytes to write for each page; 0 if it is not written.
        """
        drive, now = self._drive, self.now
        for nbytes in writes:
            if nbytes:
                drive = (drive if drive > now else now) + nbytes
                if self._hashing:  # overlaps the drive's transfers
                    self._hashed = max(self._hashed, now) + self._hashing * nbytes
                    self._written.append(max(drive, self._hashed))
                else:
                    self._written.append(drive)
            else:
                self._free += 1
        self._drive = drive
