"""Simulation of a plan, which predicts the step time. Pure: no I/O, no torch, no wall clock.

The simulation models one drive, which performs transfers one at a time in the order in which the pager starts them; the
cache slots of the host cache; and the computation of the training thread between its accesses. Time is measured by the
number of bytes that the drive can transfer in that time. Therefore no benchmark is needed, plans are the same on every
machine, and a comparison of plans is valid for any drive: computation that takes as long as the transfers overlaps them
only if the window reaches far enough ahead. The planner compares plans by this simulation alone.

If more is known about a machine (`OtherResources`), the simulation takes it into account. Each resource does one thing
at a time and is represented by the time at which it will have finished all work assigned so far:

- Updates run on their own thread or on the training thread.
- Checksums take time: a page becomes available when it has been read and verified, and its cache slot becomes free when
  the page has been hashed and written.
- The Python interpreter takes time. All threads of a process share it (GIL), so the computation of an FSDP module takes
  at least as long as launching it, plus the Python code of the accesses since the previous computation. An update also
  occupies its own thread for the time of its Python code.
- The link to a device is used in both directions. Weights are copied when their pages are available and their update
  has ended. If weights are prefetched to the GPU, a separate thread copies them, and the training thread waits for that
  thread at the gather; otherwise the training thread copies them. Gradients are copied to the host after the
  computation of their FSDP module, overlapping the computation of the next one. The update, or the access that stores
  the gradients, waits for the copy. If updates run in backward, only a limited number of FSDP modules may be waiting
  for their update after their gradients have been computed. If updates run on the device, a limited number of batches
  is queued there.
- The network runs one collective at a time, in parallel with computation, if it is given as a resource. Weights are
  gathered after they have been copied to the device. Gradients are reduced after the computation of their FSDP module
  and before they leave the device. Collectives that the training thread waits for, as on the CPU, are not a resource.
  They are a part of its computation.

The simulation makes two simplifications. Launching the computation of one FSDP module overlaps only the computation of
this FSDP module. Copies compete neither with copies in the opposite direction for the link, nor with updates for host
memory bandwidth.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

import numpy as np

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.cycle import Cycle, Moves
from infinity.schedule.trace import Access, Event, EventKind, Mode, gather_accesses, is_gather
from infinity.schedule.update_schedule import Expansion, UpdateSchedule

BACKWARD = 2.5
"""Computation time of an FSDP module in backward relative to forward. The ratio is 2 without recomputation of
activations and 3 with it; this value is the mean.
"""
_STEPS = 2
"""Number of simulated steps. The last one is steady: every later step would take the same time."""
QUEUED = 3
"""Maximum number of unfinished batches of updates on the device. See `infinity.optim.device_pages`."""
_TRAINING, _UPDATES, _PREFETCHES, _LINK = range(4)
"""Executor of an access: the training thread, which waits for the access; the update thread; the thread that prefetches
weights to the GPU; or the link, which copies gradients to the host.
"""
_GATHERS, _STORES, _UPDATES_AT_ONCE, _UPDATES_STORED = range(4)
"""Use of the link by an access: it copies weights to the device; it stores gradients from the device in pages; it
applies gradients from the device that are not stored in pages; or it applies stored gradients.
"""
_SimulatedAccess = tuple[int, int, int, int, Sequence[bool], Sequence[int]]
"""One access: its executor, its FSDP module, the number of reads requested so far, the position of the first access
that need not have ended before this one begins, for each entering page whether it is read, and for each leaving page
the number of bytes to write, or 0 if the page is not modified.
"""


@dataclass(frozen=True, kw_only=True)
class SimulatedTransfers:
    """Transfers of a plan by access, for the simulation."""

    accesses: Sequence[_SimulatedAccess]
    """Accesses of a step, by position."""
    reads: Sequence[int]
    """Sizes in bytes of the pages that a step reads, in order."""
    written: int
    """Bytes that a step writes."""
    cache_slots: int
    """Number of cache slots for pages that do not stay permanently."""


@dataclass(frozen=True, kw_only=True)
class OtherResources:
    """Time per step that each resource other than the drive and computation would need on its own.

    All times share one unit: either seconds, or the number of bytes that the drive can transfer in that time. 0 means
    that the resource does not exist or takes no time.
    """

    updates: float = 0.0
    """Time of updates, excluding their transfers and copies."""
    weights: float = 0.0
    """Time to copy all gathered weights to the device."""
    gradients: float = 0.0
    """Time to copy all gradients to the host."""
    read: float = 0.0
    """Time to copy all pages that are updated on the device to the device. 0 if updates run on the CPU."""
    changed: float = 0.0
    """Time to copy the pages that were updated on the device back to the host."""
    gathering: float = 0.0
    """Time of all-gathers of weights that run in parallel with computation."""
    reducing: float = 0.0
    """Time of reductions of gradients that run in parallel with computation."""
    verifying: float = 0.0
    """Time to verify the checksums of all pages that are read."""
    hashing: float = 0.0
    """Time to compute the checksums of all pages that are written."""
    launching: float = 0.0
    """Python time of a step that does not depend on its accesses: launching kernels, and hooks of FSDP modules."""
    per_access: float = 0.0
    """Python time of one access."""
    per_page: float = 0.0
    """Python time to read or write one page."""
    update_limit: int = 0
    """Maximum number of FSDP modules whose gradients have been computed but not yet applied, if updates run in
    backward. 0 means no limit.
    """

    def times(self, factor: float) -> OtherResources:
        """Return a copy in which all times are converted to another unit.

        Args:
            factor: number of new units per current unit, for example bytes per second.
        """
        times = {name: factor * value for name, value in vars(self).items() if name != "update_limit"}
        return replace(self, **times)

    @property
    def linked(self) -> bool:
        """``True`` if data is copied to or from a device, or exchanged in parallel with computation."""
        return self.weights > 0 or self.gradients > 0 or self.read > 0 or self.gathering > 0 or self.reducing > 0

    @property
    def longest(self) -> float:
        """Lower bound of the step time that the resources imply, in the unit of the fields.

        Updates and Python time are not included because they can run on any thread.
        """
        there, back = self.weights + self.read, self.gradients + self.changed
        return max(there, back, self.gathering + self.reducing, self.verifying, self.hashing)


NOTHING = OtherResources()
"""No other resources: only the drive and computation take time."""


def computation(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return the fraction of a step's computation that precedes each access, and the fraction after the last access.

    The computation of an FSDP module begins when all of its pages have been gathered. It ends before the next access
    that gathers another FSDP module, or that updates this FSDP module or stores its gradients. Its time is proportional
    to the size of the weights, and is multiplied by `BACKWARD` for the second and later gathers of a step.
    """
    shares = [0.0] * (len(trace) + 1)
    gathered: set[int] = set()
    # The FSDP module that was gathered last, its factor, and the part of its computation that has no position yet.
    fsdp_module, factor, due = -1, 1.0, 0.0
    for position, access in enumerate(trace):
        page = layout.pages[access[0].page]
        gathers = is_gather(access, layout)
        another = page.fsdp_module != fsdp_module
        # Another FSDP module is gathered, or pages of the current one are updated or receive gradients.
        if (gathers and another) or (not gathers and not another):
            shares[position], due = due, 0.0
        if gathers:
            if another:
                factor = BACKWARD if page.fsdp_module in gathered else 1.0
                fsdp_module = page.fsdp_module
                gathered.add(fsdp_module)
            due += factor * sum(layout.pages[use.page].nbytes for use in access)
    shares[-1] = due
    total = sum(shares) or 1.0
    return [share / total for share in shares]


@dataclass(frozen=True, kw_only=True)
class StagedComputation:
    """Position of the computation within a step that prefetches weights to the GPU.

    The trace alone does not determine this position, because pages are read before their gather. For example, FSDP
    module 1 finishes its computation before position 7. FSDP module 2, whose pages were read at positions 3 to 6,
    computes next and also finishes before position 7, because the weights of FSDP module 3 are already on the device.
    Then `shares[7]` is the fraction for FSDP module 1, and `awaited` contains (7, 2, fraction for FSDP module 2).
    """

    shares: tuple[float, ...]
    """For each access, the fraction of the step's computation that precedes it and does not wait for prefetched
    weights. The last item is the fraction after the last access.
    """
    prefetched: frozenset[int]
    """Positions of accesses that another thread performs before the gather."""
    awaited: tuple[tuple[int, int, float], ...]
    """Computation that waits for prefetched weights, as (position, FSDP module, fraction), in order. Before the access
    at the position, the training thread waits until the weights of the FSDP module are on the device, and then computes
    the fraction.
    """


def staged_computation(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, expansion: Expansion
) -> StagedComputation | None:
    """Return the position of the computation within a step that prefetches weights or has GPU-resident modules.

    The computation of an FSDP module lasts from its gather event to the next event. Its fraction of the step's
    computation is determined as in `computation`.

    Args:
        expansion: accesses of the step, as returned by `expand_events`.

    Returns:
        The position of the computation, or ``None`` if the step neither prefetches weights to the GPU nor has
        GPU-resident FSDP modules.
    """
    if not update_schedule.prefetched and not update_schedule.gpu_resident:
        return None
    gathered: set[int] = set()
    work = [0.0] * len(events)  # computation after each event
    for number, event in enumerate(events):
        if event.kind is EventKind.GATHER:
            factor = BACKWARD if event.fsdp_module in gathered else 1.0
            accesses = gather_accesses(layout, event.fsdp_module)
            work[number] = factor * sum(layout.pages[page].nbytes for access in accesses for page, _ in access)
            gathered.add(event.fsdp_module)
    total = sum(work) or 1.0
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
            compute(end, work[number] / total)
    return StagedComputation(shares=tuple(shares), prefetched=expansion.prefetched, awaited=tuple(awaited))


def updating(trace: Sequence[Access], layout: Layout) -> list[float]:
    """Return, for each access, the fraction of a step's updated elements that it updates."""
    pages = layout.pages
    write, update = Mode.WRITE, Mode.UPDATE  # properties of enum members take longer than `is`

    def modified(access: Access, role: Role) -> int:
        return sum(
            [pages[p].count for p, mode in access if pages[p].role is role and (mode is update or mode is write)]
        )

    # Weight pages may extend beyond the updated ranges. Without a master and states, each of them is a range.
    elements = [modified(access, Role.UPDATE) or modified(access, Role.PARAM) for access in trace]
    total = sum(elements) or 1
    return [count / total for count in elements]


class _LinkUse(NamedTuple):
    """Use of the link to the device by an access."""

    kind: int
    """`_GATHERS`, `_STORES`, `_UPDATES_AT_ONCE` or `_UPDATES_STORED`."""
    leaves: bool = False
    """``True`` if the access is the first one of an update that applies gradients from the device. These leave the
    device before it.
    """
    copying: float = 0.0
    """Fraction of a step's weights, or of its gradients, that is copied for the access. The first access of an update
    counts all gradients of the FSDP module.
    """
    updating: float = 0.0
    """Fraction of a step's updates that the access performs."""
    weights: tuple[int, ...] = ()
    """Pages of weights that the access copies or modifies."""
    reducing: float = 0.0
    """Fraction of a step's gradients that are reduced before they leave the device for the access."""


def _link_uses(trace: Sequence[Access], layout: Layout, shares: Sequence[float], *, on_device: bool) -> list[_LinkUse]:
    """Return, for each access, its use of the link to the device.

    Args:
        shares: result of `updating` for the trace.
        on_device: whether updates run on the device. If so, gradients that are not stored in pages stay on the device.
    """
    pages, param, grad = layout.pages, Role.PARAM, Role.GRAD
    gradients = Counter[int]()  # bytes by FSDP module; only the first gradient component
    for page in pages:
        gradients[page.fsdp_module] += page.nbytes if page.role is grad and not page.component else 0
    link_uses: list[_LinkUse] = []
    before: tuple[int, bool] | None = None  # FSDP module of the previous access, and whether it was a gather
    for access in trace:
        first, mode = access[0]
        fsdp_module, gathers = pages[first].fsdp_module, is_gather(access, layout)
        begins, before = (fsdp_module, gathers) != before, (fsdp_module, gathers)
        if gathers:
            read = tuple(page for page, _ in access)
            link_uses.append(_LinkUse(_GATHERS, copying=float(sum(pages[page].nbytes for page in read)), weights=read))
            continue
        changed = tuple(page for page, how in access if how.modifies and pages[page].role is param)
        if pages[first].role is not grad:
            reduced = float(begins and gradients[fsdp_module])
            copying = 0.0 if on_device else reduced
            link_uses.append(
                _LinkUse(_UPDATES_AT_ONCE, leaves=begins, copying=copying, weights=changed, reducing=reduced)
            )
        elif mode.modifies:
            stored = float(sum(pages[page].nbytes for page, _ in access))
            link_uses.append(_LinkUse(_STORES, copying=stored, reducing=stored))
        else:
            link_uses.append(_LinkUse(_UPDATES_STORED, weights=changed))
    there = sum(link_use.copying for link_use in link_uses if link_use.kind == _GATHERS) or 1.0
    back = sum(link_use.copying for link_use in link_uses if link_use.kind != _GATHERS) or 1.0
    reduced = sum(link_use.reducing for link_use in link_uses) or 1.0
    return [
        _LinkUse(kind, leaves, copying / (there if kind == _GATHERS else back), share, changed, reducing / reduced)
        for (kind, leaves, copying, _, changed, reducing), share in zip(link_uses, shares, strict=True)
    ]


class Timing:
    """Simulator of plans for one trace. It computes all values that do not depend on the plan only once.

    Args:
        prefetched: position of the computation in the step, if weights are prefetched to the GPU.
    """

    def __init__(self, cycle: Cycle, *, threaded: bool, prefetched: StagedComputation | None = None) -> None:
        self.cycle, self._threaded, self.prefetched = cycle, threaded, prefetched
        # By position: FSDP modules whose prefetched weights are awaited, and the computation that follows each wait.
        self._awaited: dict[int, list[tuple[int, float]]] = {}
        self._links: dict[bool, list[_LinkUse]] = {}  # by whether updates run on the device
        if prefetched:
            for position, fsdp_module, share in prefetched.awaited:
                self._awaited.setdefault(position % cycle.length, []).append((fsdp_module, share))

    @cached_property
    def _shares(self) -> Sequence[float]:
        """For each access, the fraction of a step's computation that precedes it."""
        return self.prefetched.shares if self.prefetched else computation(self.cycle.trace, self.cycle.layout)

    @cached_property
    def _executors(self) -> list[int]:
        """For each access, its executor."""
        pages, update = self.cycle.layout.pages, Role.UPDATE
        updates = {page.index for page in pages if page.role is update} if self._threaded else set[int]()
        found = [
            _UPDATES if updates and any(page in updates for page, _ in access) else _TRAINING
            for access in self.cycle.trace
        ]
        for position in self.prefetched.prefetched if self.prefetched else ():
            found[position] = _PREFETCHES
        return found

    @cached_property
    def _fsdp_modules(self) -> list[int]:
        """For each access, the FSDP module of its pages."""
        pages = self.cycle.layout.pages
        return [pages[access[0].page].fsdp_module for access in self.cycle.trace]

    @cached_property
    def _updating(self) -> list[float]:
        return updating(self.cycle.trace, self.cycle.layout)

    def _delays(self, accesses: Sequence[_SimulatedAccess], work: float, resources: OtherResources) -> list[float]:
        """Return, for each access and for the end, the time by which Python delays the computation before it."""
        shares = [*self._shares]
        for place, waits in self._awaited.items():
            shares[place] += sum(share for _, share in waits)
        python = [
            resources.per_access + resources.per_page * (sum(entering) + sum(map(bool, leaving)))
            for *_, entering, leaving in accesses
        ]
        last = max((position for position, share in enumerate(shares) if share), default=0)
        waiting = sum(python[last:])  # Python time since the previous computation
        delays = [0.0] * len(shares)
        for position, (share, taking) in enumerate(zip(shares, (*python, 0.0), strict=True)):
            if share:
                delays[position], waiting = max(0.0, share * (resources.launching - work) + waiting), 0.0
            waiting += taking
        return delays

    def _link_uses(self, *, on_device: bool) -> list[_LinkUse]:
        if on_device not in self._links:
            self._links[on_device] = _link_uses(
                self.cycle.trace, self.cycle.layout, self._updating, on_device=on_device
            )
        return self._links[on_device]

    def transfers(self, reach: Sequence[int], moves: Moves, cache_slots: int) -> SimulatedTransfers:
        """Return the transfers of a plan by access, for `length`.

        Args:
            reach: last position of the window, by position.
            cache_slots: number of cache slots of the host cache, excluding the slots of pages that stay permanently.
        """
        cycle, none = self.cycle, ()
        entering: list[tuple[bool, ...]] = [none] * cycle.length
        leaving: list[tuple[int, ...]] = [none] * cycle.length
        read = moves.entering[moves.read]
        reads: list[int] = cycle.nbytes[cycle.pages[read]].tolist()
        for place, is_read in zip(cycle.places[moves.entering].tolist(), moves.read.tolist(), strict=True):
            entering[place] += (is_read,)
        sizes = (cycle.nbytes[cycle.pages[moves.leaving]] * moves.written).tolist()
        for place, size in zip(cycle.places[moves.leaving].tolist(), sizes, strict=True):
            leaving[place] += (size,)
        ends = np.array(reach)
        # Number of reads before each position.
        counts = np.concatenate(([0], np.bincount(cycle.places[read], minlength=cycle.length).cumsum()))
        wanted = (counts[-1] * (ends // cycle.length) + counts[ends % cycle.length + 1]).tolist()
        # Keep this consistent with `Cursor`: its window begins at the oldest unfinished access, so an unfinished update
        # limits how far the training thread can advance. Without this limit, the simulation would overlap transfers
        # that the pager cannot overlap, and the planner would prefer plans that are slow in practice.
        ends = np.concatenate((ends - cycle.length, ends))
        oldest = (np.searchsorted(ends, np.arange(cycle.length)) - cycle.length).tolist()
        accesses = [*zip(self._executors, self._fsdp_modules, wanted, oldest, entering, leaving, strict=True)]
        return SimulatedTransfers(accesses=accesses, reads=reads, written=sum(sizes), cache_slots=cache_slots)

    def length(self, transfers: SimulatedTransfers, work: float, resources: OtherResources = NOTHING) -> float:
        """Return the duration of a steady step.

        All times are expressed as the number of bytes that the drive can transfer in that time.

        Args:
            work: computation time of a step, excluding updates.
        """
        length, reads = self.cycle.length, transfers.reads
        each = [0.0] * length
        if resources.updates:
            each = [resources.updates * share for share in self._updating]
        work_before = [share * work for share in self._shares]
        if resources.launching or resources.per_access:
            python = (resources.per_access if executor == _UPDATES else 0.0 for executor in self._executors)
            each = [*map(add, each, python)]
            work_before = [*map(add, work_before, self._delays(transfers.accesses, work, resources))]
        # The last computation precedes the next step.
        work_before[0] += work_before.pop()
        awaited: list[Sequence[tuple[int, float]]] = [()] * length
        for place, waits in self._awaited.items():
            awaited[place] = [(fsdp_module, share * work) for fsdp_module, share in waits]
        return simulate(
            transfers.accesses,
            reads,
            transfers.cache_slots,
            work_before,
            awaited,
            each,
            self._link_uses(on_device=resources.read > 0) if resources.linked else None,
            resources,
            verifying=resources.verifying / sum(reads) if reads else 0.0,
            hashing=resources.hashing / transfers.written if transfers.written else 0.0,
        )


def simulate(
    accesses: Sequence[_SimulatedAccess],
    reads: Sequence[int],
    cache_slots: int,
    work: Sequence[float],
    awaited: Sequence[Sequence[tuple[int, float]]],
    durations: Sequence[float],
    link_uses: Sequence[_LinkUse] | None = None,
    resources: OtherResources = NOTHING,
    *,
    verifying: float = 0.0,
    hashing: float = 0.0,
) -> float:
    """Simulate `_STEPS` steps and return the duration of the last one.

    Time is measured in bytes that the drive can transfer. Life cycle of a page: the page is requested; its read starts
    when a cache slot is free; the page is ready when the drive has read it and its checksum has been verified; and it
    arrives when an access takes it. Its cache slot becomes free when the page leaves or, if the page was modified, when
    it has been written. Reads start, and pages arrive, in the order of the requests. Life cycle of the gradients of an
    FSDP module on a device: they leave the device when they have been computed, arrive in host memory when all of them
    have been copied, and are consumed by an update of the FSDP module.

    A search simulates hundreds of steps with tens of thousands of accesses each. Therefore the whole state is in local
    variables of one function.

    Args:
        accesses: accesses of a step, by position.
        reads: sizes in bytes of the pages that a step reads, in order. Every step reads the same pages.
        cache_slots: number of cache slots, all of which are free at the beginning.
        work: computation time before each access.
        awaited: before each access, the FSDP modules whose prefetched weights the computation waits for, with the
            computation time that follows each wait.
        durations: duration of each access, excluding waits and copies.
        link_uses: use of the link to the device by each access, or ``None`` if the simulation includes no link.
        resources: times of copies over the link and of collectives, and the maximum number of FSDP modules that may
            wait for their update.
        verifying: time to verify the checksum, per byte read.
        hashing: time to compute the checksum, per byte written.
    """
    training = began = 0.0  # time of the training thread
    threads = [0.0] * 4  # by executor other than the training thread: time at which it will be free
    now = 0.0  # latest time that any thread or the drive has reached
    drive = verified = hashed = 0.0  # times at which the drive and the checksums will have finished
    free, started = cache_slots, 0  # cache slots that are currently free, and reads that have been started
    ready: deque[float] = deque()  # times at which pages that have not arrived are ready, in order
    written: deque[float] = deque()  # times at which writes free their cache slots, in order
    there: defaultdict[int, float] = defaultdict(float)  # by FSDP module: when its weights have been prefetched
    to_device = to_host = 0.0  # ends of all copies to the device and to the host so far
    network = 0.0  # end of all collectives so far
    gradients: defaultdict[int, float] = defaultdict(float)  # by FSDP module: arrival of its gradients in host memory
    applied: defaultdict[int, float] = defaultdict(float)  # by FSDP module: end of its last update
    recent: deque[int] = deque()  # FSDP modules whose gradients left the device most recently
    changed: defaultdict[int, float] = defaultdict(float)  # by page: time of the last modification of weights
    queued = deque([0.0] * QUEUED, QUEUED)  # ends of the latest updates on the device
    ends: list[float] = []  # by position, of any thread
    finished = 0  # accesses, from the first one on, for whose end the training thread has waited
    next_read, next_ready = itertools.cycle(reads).__next__, ready.popleft
    wanted = 0  # reads that have been requested; each read starts as soon as a cache slot is free
    uses: Sequence[_LinkUse | None] = [None] * len(accesses) if link_uses is None else link_uses
    steps = [*zip(work, awaited, durations, uses, accesses, strict=True)]

    def start(before: float) -> None:
        """Start as many requested reads as there are free cache slots, in slots that are free now from `before` on."""
        nonlocal free, started, drive, verified
        left = wanted - started
        while left:
            if free:
                free -= 1
                since = before
            elif written and written[0] <= now:
                since = written.popleft()
            else:
                break
            left -= 1
            nbytes = next_read()
            drive = (drive if drive > since else since) + nbytes
            verified = (verified if verified > drive else drive) + verifying * nbytes
            ready.append(verified)
        started = wanted - left

    for step in range(_STEPS):
        began = training
        first, more = step * len(accesses), step * len(reads)
        for computing, waits, taking, use, (executor, fsdp_module, requested, oldest, entering, leaving) in steps:
            wanted = requested + more
            training += computing
            if waits:
                for awaited_module, duration in waits:
                    training = max(training, there[awaited_module]) + duration
            if use:
                kind, leaves, copying, updating, weights, reducing = use
                if reducing and resources.reducing:
                    network = max(network, training) + reducing * resources.reducing
                if kind == _STORES:
                    executor = _LINK
                elif leaves:  # start copying the gradients
                    if len(recent) == resources.update_limit > 0:
                        training = max(training, applied[recent.popleft()])
                    recent.append(fsdp_module)
                    reduced = network if resources.reducing else training
                    gradients[fsdp_module] = to_host = max(to_host, reduced) + copying * resources.gradients
            if executor == _TRAINING:
                if first + oldest > finished:
                    training = max(training, *ends[finished : first + oldest])
                    finished = first + oldest
            elif (
                not (entering or leaving or taking or use)
                and training <= threads[executor]
                and (executor == _UPDATES or there[fsdp_module] == threads[executor])
            ):  # saves time: the access ends together with the previous one of its thread, and changes nothing
                ends.append(threads[executor])
                continue
            before = now
            if training > now:
                now = training
            if started < wanted and (free or (written and written[0] <= now)):
                start(before)
            at = threads[executor]
            if training > at:
                at = training
            if use:
                # As in the pager, a prefetch to the GPU waits for the update of its weights. An earlier copy would
                # contain stale weights.
                if kind == _GATHERS:
                    if to_device > at:
                        at = to_device
                    for page in weights:
                        if changed[page] > at:
                            at = changed[page]
                elif kind == _UPDATES_AT_ONCE and gradients[fsdp_module] > at:
                    at = gradients[fsdp_module]
                elif kind == _STORES:
                    at = max(at, to_host, network if resources.reducing else 0.0)
                if resources.read and updating and queued[0] > at:
                    at = queued[0]
            for read in entering:
                if read:
                    while not ready:
                        before, now = now, max(now, written[0])
                        start(before)
                    since = next_ready()
                elif free:  # the page is replaced, so it only needs a cache slot
                    free -= 1
                    continue
                else:
                    since = written.popleft()
                if since > at:
                    at = since
            end = at = at + taking
            if use:
                if kind == _GATHERS:
                    end = at = to_device = at + copying * resources.weights
                    if resources.gathering:
                        end = at = network = max(network, at) + copying * resources.gathering
                elif kind == _STORES:
                    end = at = to_host = at + copying * resources.gradients
                else:
                    if resources.read and updating:
                        to_device = max(at, to_device) + updating * resources.read
                        end = to_host = max(to_device, to_host) + updating * resources.changed
                        queued.append(end)
                    applied[fsdp_module] = end
                    for page in weights:
                        changed[page] = end
            if executor == _TRAINING:
                if end > training:
                    training = end
            else:
                threads[executor] = at
                if executor == _PREFETCHES:
                    there[fsdp_module] = end
            ends.append(end)
            if end > now:
                before, now = now, end
                if started < wanted and (free or (written and written[0] <= now)):
                    start(before)
            for nbytes in leaving:
                if nbytes:  # the page was modified
                    drive = (drive if drive > now else now) + nbytes
                    hashed = (hashed if hashed > now else now) + hashing * nbytes  # checksums overlap transfers
                    written.append(hashed if hashed > drive else drive)
                else:
                    free += 1
    return training - began
