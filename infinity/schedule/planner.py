"""The planner, which computes a plan from a trace and a number of cache slots. Pure: no I/O, no torch, no clock.

A *trace* is the sequence of accesses of one training step; each *access* uses a few pages at the same time. A page is
*resident* if the plan keeps it permanently in the host cache. All other pages *stream*: they enter the host cache
before a use and leave it afterwards.

[Note: why a fixed resident set] A training step uses its pages in a fixed cyclic order. In such a cycle, any policy
based on recency evicts each page just before it is needed again. Keeping a *fixed* set of pages is optimal, and the
remaining traffic has a closed form (docs/explanation/planning-and-traffic.md). The benefit of a page is the number of
bytes per step that keeping it saves. Every page occupies one cache slot, so choosing pages in order of decreasing
benefit is optimal. Among pages of equal benefit, such as the masters and moments of all FSDP modules, the resident ones
are spread evenly over the step.

[Note: the window] Pages that are not resident stream through the remaining cache slots. At position i of the trace, the
window is the range of accesses [i, c(i)], where c(i) is the last position for which the distinct streaming pages of the
range fit into the streaming cache slots. A streaming page is in memory exactly while one of its uses is inside the
window. When the page enters the window, it is read, unless the use replaces its content. When it leaves the window, it
is written if it was modified. c is monotone and does not depend on timing. Therefore the number of bytes that a step
transfers is known before the step runs.

The number of streaming cache slots is a trade-off between resident pages and the reach of the window. The planner
compares plans by their simulated step time (`timing`). Among plans of similar speed, it chooses the plan that transfers
the fewest bytes, because writes wear out drives, and because every byte costs CPU time even if its transfer overlaps
computation.

[Note: all pages resident] If every page has its own cache slot, no page has to wait for one, and an access to a page
that is being updated waits only for that page. Therefore the window spans a whole cycle, with one exception. The
training thread cannot pass the end of a window that begins at an unfinished update. The window of an update in backward
ends only two FSDP modules later, because the gradients of the FSDP modules in between wait in memory outside the host
cache.

[Note: kept pages] In backward, the weights of an FSDP module are copied out for the gather. If the weights are a part
of the master, the update of the FSDP module reads them again. The rest of the module's state is used between these two
uses, so the window is too short to contain both. Therefore a few cache slots keep pages from one use to the next while
one FSDP module is being processed. All FSDP modules share these cache slots, one after another, so each slot saves one
transfer per FSDP module, whereas a cache slot for a resident page saves two or three transfers per step. The planner
chooses the alternative that transfers fewer bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import mean

import numpy as np
import numpy.typing as npt

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import BudgetError
from infinity.schedule.cycle import Cycle, Moves, Uses, windows, windows_of_all
from infinity.schedule.timing import NOTHING, OtherResources, SimulatedTransfers, StagedComputation, Timing
from infinity.schedule.trace import Access
from infinity.units import format_setting, format_size

LEAST_WRITING = 2
"""Minimum number of cache slots that are reserved for pages that are being written."""
LEAST_STREAMING = 6
"""Minimum number of streaming cache slots."""
_WIDER = 2
"""Ratio between the sizes of successive windows that the planner tries. Beyond `_TRIED`, it tries windows up to this
factor times the best size found so far.
"""
_TRIED = 48
"""Number of streaming cache slots up to which the planner always tries wider windows. In a small host cache, the limit
is a quarter of the cache slots.
"""
_ABOUT = 1.02
"""Maximum ratio of the step times of two plans that count as equally fast."""
_ROUNDING = 1e-9
"""Relative margin of lower bounds for rounding errors."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_NO_PAGES: AbstractSet[int] = frozenset()
_WRITING = 6
"""Number of streaming cache slots for each cache slot that is reserved for pages that are being written."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """NVMe traffic of one step in bytes, by page role."""

    read: dict[Role, int]
    """Bytes read per step, by role."""
    written: dict[Role, int]
    """Bytes written per step, by role."""

    @property
    def read_bytes(self) -> int:
        """Total bytes read per step."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """Total bytes written per step."""
        return sum(self.written.values())

    @property
    def total_bytes(self) -> int:
        """Total bytes read and written per step."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Immutable decision on which pages are resident, and when the pager reads, keeps and evicts all other pages.

    Positions count the accesses of `prefix`, which runs once, and then the accesses of `trace`, which repeats. For
    example, if the prefix has 2 accesses and the trace has 10, positions 2 and 12 both refer to the first access of the
    trace.

    Life cycle: `make_simulation` creates a plan from the trace of a step. `prepend` adds a prefix if other accesses
    precede the next step. The pager then follows the plan until the trace of the steps changes and another plan
    replaces it.
    """

    prefix: tuple[Access, ...]
    """Accesses that run once, before the first step."""
    trace: tuple[Access, ...]
    """Accesses of one step."""
    reach: tuple[int, ...]
    """End c(i) of the window for every position i of the prefix and of one cycle of the trace. When the access at
    position i begins, all pages up to position c(i) must be in memory or have been requested.
    """
    resident: frozenset[int]
    """Pages that stay in the host cache permanently."""
    kept: Mapping[int, AbstractSet[int]]
    """By position in the trace, the pages that stay in memory until their next use although the window does not contain
    both uses. [Note: kept pages]
    """
    kept_cache_slots: int
    """Maximum number of pages that are kept in this way at the same time."""
    cache_slots: int
    """Number of cache slots of the host cache. Slots that are not assigned to resident, streaming or kept pages hold
    pages that are being written.
    """
    streaming_cache_slots: int
    """Maximum number of distinct non-resident pages in the window. 0 if all pages are resident."""
    traffic: Traffic
    """NVMe traffic of a steady step, which follows another step with the same trace."""
    prefetched: StagedComputation | None = None
    """Position of the computation in a step whose weights are prefetched to the GPU; otherwise ``None``."""

    @property
    def stores_gradients(self) -> bool:
        """``True`` if steps write gradients to the drives."""
        return self.traffic.written[Role.GRAD] > 0

    def access(self, position: int) -> Access:
        """Return the access at a position of the plan."""
        lead = len(self.prefix)
        return self.prefix[position] if position < lead else self.trace[(position - lead) % len(self.trace)]

    def reach_at(self, position: int) -> int:
        """Return the last position of the window that begins at a position."""
        cycles = max(0, position - len(self.prefix)) // len(self.trace)
        return self.reach[position - cycles * len(self.trace)] + cycles * len(self.trace)

    def keeps(self, position: int) -> AbstractSet[int]:
        """Return the pages that the plan keeps in memory from their use at a position until their next use."""
        lead = len(self.prefix)
        return self.kept.get((position - lead) % len(self.trace), _NO_PAGES) if position >= lead else _NO_PAGES

    def ends_step(self, position: int) -> bool:
        """Return ``True`` if a position is the first one of a step, or of the prefix."""
        lead = len(self.prefix)
        return position == 0 or (position >= lead and (position - lead) % len(self.trace) == 0)


def least_cache_slots(widest: int) -> int:
    """Return the minimum number of cache slots for a trace whose accesses use up to `widest` pages each."""
    # The window must have room for its first access. Otherwise there would be a deadlock: the access waits until the
    # window reaches it, and the window waits until the access ends. Two more cache slots let the window also include
    # pages of the next access.
    return max(LEAST_STREAMING, widest + 2) + LEAST_WRITING


def make_simulation(
    trace: Sequence[Access],
    layout: Layout,
    cache_slots: int,
    *,
    threaded: bool = False,
    prefetched: StagedComputation | None = None,
    quick: bool = False,
) -> Simulation:
    """Return a plan for the accesses of a step, together with its simulation.

    Args:
        prefetched: position of the computation in the step, if weights are prefetched to the GPU.
        quick: whether to skip the search and return any valid plan, for example because it is used for only one step.

    Raises:
        BudgetError: if `cache_slots` is less than `least_cache_slots`.
    """
    timing = Timing(Cycle(trace, layout), threaded=threaded, prefetched=prefetched)
    cycle, widest = timing.cycle, max(map(len, trace), default=1)
    # The result depends only on the arguments, never on a clock, a measurement or the iteration order of a set.
    # Therefore the traffic of a step is known before the step runs, and a resumed run gets the same plan as before.
    if len(cycle.used) <= cache_slots:
        reach = cycle.windows_of_all()
        return Simulation(timing=timing, cache_slots=cache_slots, streaming=0, resident=cycle.used, reach=reach)
    fewest = least_cache_slots(widest)
    if cache_slots < fewest:
        raise BudgetError(
            f"the host cache holds {cache_slots} pages of {format_size(layout.page_bytes)}, but this step needs at "
            f"least {fewest}; set memory.host_bytes to {format_setting(fewest * layout.page_bytes)} or more, "
            "or decrease memory.page_bytes"
        )
    streaming, most, always = fewest - LEAST_WRITING, cache_slots - LEAST_WRITING, min(cache_slots // 4, _TRIED)
    if quick:
        streaming = min(max(streaming, always), most)
        return _simulation(timing, cache_slots, streaming, 0, cycle.windows(frozenset(), streaming))
    found = _simulations(timing, cache_slots, streaming)
    least = found[0].moves.total_bytes
    while True:
        # The quickest candidate is determined as late as possible, because each new candidate may make simulations of
        # the previous ones unnecessary.
        if streaming >= most or (streaming >= always and streaming >= _WIDER * _quickest(found, least).streaming):
            best = _preferred(found, least)
            refined = _refined(best)
            return best if refined is best else preferred([refined, best])
        streaming = min(_WIDER * streaming, most)
        found += _simulations(timing, cache_slots, streaming)


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """A plan without a prefix, and its simulation with different speeds.

    All values that do not depend on speeds are computed once.
    """

    timing: Timing
    """Simulator of the trace that is planned."""
    cache_slots: int
    """Number of cache slots of the host cache."""
    streaming: int
    """Maximum number of distinct non-resident pages in the window."""
    resident: frozenset[int]
    """Pages that stay in the host cache permanently."""
    reach: Sequence[int]
    """Last position of the window, for every position."""
    kept: frozenset[int] = frozenset()
    """Uses after which the page stays in memory until its next use."""
    keeping: int = 0
    """Maximum number of pages that are kept at the same time."""
    room: int = 0
    """Number of cache slots that are set aside for kept pages."""
    _lengths: dict[float, float] = field(default_factory=dict)  # by computation time, without other resources

    @classmethod
    def of(cls, plan: Plan, layout: Layout, *, threaded: bool) -> Simulation:
        """Return the simulation of an existing plan without a prefix."""
        cycle = Cycle(plan.trace, layout)
        uses = enumerate(zip(cycle.places.tolist(), cycle.pages.tolist(), strict=True))
        return cls(
            timing=Timing(cycle, threaded=threaded, prefetched=plan.prefetched),
            cache_slots=plan.cache_slots,
            streaming=plan.streaming_cache_slots,
            resident=plan.resident,
            reach=plan.reach,
            kept=frozenset(use for use, (position, page) in uses if page in plan.keeps(position)),
            keeping=plan.kept_cache_slots,
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        cycle, kept = self.timing.cycle, defaultdict[int, set[int]](set)
        for use in self.kept:
            kept[int(cycle.places[use])].add(int(cycle.pages[use]))
        return Plan(
            prefix=(),
            trace=cycle.trace,
            reach=tuple(self.reach),
            resident=self.resident,
            kept=dict(kept),
            kept_cache_slots=self.keeping,
            cache_slots=self.cache_slots,
            streaming_cache_slots=self.streaming,
            traffic=Traffic(
                read=_bytes_by_role(cycle, self.moves.entering[self.moves.read]),
                written=_bytes_by_role(cycle, self.moves.leaving[self.moves.written]),
            ),
            prefetched=self.timing.prefetched,
        )

    @cached_property
    def moves(self) -> Moves:
        """Transfers of a steady step."""
        return self.timing.cycle.moves(self.reach, self.resident, self.kept)

    @cached_property
    def _transfers(self) -> SimulatedTransfers:
        # Cache slots for pages that do not stay in memory permanently.
        moving = self.cache_slots - len(self.resident) - self.moves.staying
        return self.timing.transfers(self.reach, self.moves, moving)

    def slowness(self, least: float) -> tuple[float, bool]:
        """Return the mean relative step time in four cases, and whether it is exact. Otherwise, it is a lower bound.

        The cases differ in the computation time of a step: zero, so that only the traffic matters; the time to transfer
        `least` bytes; twice that time; and longer than all possible transfers, so that only waits matter. Step times
        are divided by reference values that are the same for all candidates.

        Each case takes a simulation, but a comparison is often decided by a lower bound: a step takes at least as long
        as its computation. Therefore the cases are simulated only as far as a comparison requires.

        Args:
            least: traffic per step of a plan with few streaming cache slots, in bytes. It serves as the unit of time.
        """
        works = self._works(least)
        ratios = [self._lengths[work] / work for work in works if work in self._lengths]
        ratios.insert(0, self.moves.total_bytes / works[0])
        unknown = len(works) + 1 - len(ratios)
        if not unknown:
            return mean(ratios), True
        return (sum(ratios) + unknown) / (len(works) + 1) * (1 - _ROUNDING), False

    def simulate(self, least: float) -> None:
        """Simulate the next case of `slowness`."""
        self.length(next(work for work in self._works(least) if work not in self._lengths))

    def _works(self, least: float) -> tuple[float, ...]:
        least = max(1, least)  # avoid a division by zero if no page is transferred
        return least, 2 * least, 4 * self.timing.cycle.used_bytes  # the last one reads and writes all pages twice

    def length(self, work: float, resources: OtherResources = NOTHING) -> float:
        """Return the duration of a steady step. See `Timing.length`.

        Args:
            work: computation time of a step, expressed as the number of bytes that the drive transfers in that time.
            resources: other resources that take time.
        """
        if not self.timing.cycle.trace:  # all is GPU-resident
            return max(work, resources.launching, resources.gathering + resources.reducing)
        if resources != NOTHING:
            return self.timing.length(self._transfers, work, resources)
        if work not in self._lengths:
            self._lengths[work] = self.timing.length(self._transfers, work)
        return self._lengths[work]

    def least_seconds(
        self, *, bandwidth: float, resources: OtherResources = NOTHING, activations: float = 0.0
    ) -> float:
        """Return a lower bound on `seconds` without running a simulation."""
        return max((self.moves.total_bytes + activations) / bandwidth, resources.longest)

    def seconds(
        self, *, bandwidth: float, computation: float, resources: OtherResources = NOTHING, activations: float = 0.0
    ) -> float:
        """Return the predicted duration of a steady step, in seconds.

        Args:
            bandwidth: bandwidth of the drives for reads and writes together, in bytes per second.
            computation: computation time of the training thread per step, excluding waits, in seconds.
            resources: other resources that take time, in seconds.
            activations: bytes of activations that the drives read and write per step, in addition to the traffic of the
                plan. They are assumed to be distributed over the step like its computation, so each transfer of the
                plan slows down in proportion.
        """
        total = self.moves.total_bytes
        least = self.least_seconds(bandwidth=bandwidth, resources=resources, activations=activations)
        if activations:
            bandwidth *= total / (total + activations) if total else 1.0
        length = self.length(computation * bandwidth, resources.times(bandwidth))
        return max(max(length, total) / bandwidth, least)


def _simulations(timing: Timing, cache_slots: int, streaming: int) -> list[Simulation]:
    """Return the candidates for a given number of streaming cache slots.

    One candidate keeps no pages between uses. If there are pages to keep, a second candidate keeps as many as possible.
    """
    reach = timing.cycle.windows(frozenset(), streaming)
    _, most = timing.cycle.between_uses(reach, frozenset(), cache_slots - streaming - _writing(cache_slots, streaming))
    return [_simulation(timing, cache_slots, streaming, keeping, reach) for keeping in sorted({0, most})]


def _writing(cache_slots: int, streaming: int) -> int:
    return min(max(LEAST_WRITING, streaming // _WRITING), cache_slots - streaming)


def _simulation(timing: Timing, cache_slots: int, streaming: int, room: int, reach: Sequence[int]) -> Simulation:
    """Return a candidate whose resident pages save the most bytes under the window `reach`.

    All cache slots that serve no other purpose hold resident pages.

    Args:
        streaming: number of cache slots for pages in the window.
        room: number of cache slots for pages that are kept between uses.
        reach: last position of the window for every position, used to choose the resident pages.
    """
    cycle, number = timing.cycle, cache_slots - streaming - room - _writing(cache_slots, streaming)
    kept, _ = cycle.between_uses(reach, frozenset(), room)
    resident = frozenset(_by_benefit(cycle.moves(reach, frozenset(), kept), cycle)[:number])
    reach = cycle.windows(resident, streaming)
    kept, keeping = cycle.between_uses(reach, resident, room)
    return Simulation(
        timing=timing,
        cache_slots=cache_slots,
        streaming=streaming,
        resident=resident,
        reach=reach,
        kept=kept,
        keeping=keeping,
        room=room,
    )


def _refined(simulation: Simulation) -> Simulation:
    """Return a candidate with a better choice of resident pages.

    The benefit of a page is the number of bytes that would be transferred if the page streamed. It depends on the
    window, and the window depends on the resident pages. Therefore resident pages are first chosen for the window that
    results if no page is resident, as in `simulation`, then for the resulting window, and so on, as long as the traffic
    decreases. Cache slots that `simulation` sets aside for kept pages but never fills become available to resident
    pages.
    """
    best, timing = simulation, simulation.timing
    cache_slots, streaming, room = best.cache_slots, best.streaming, best.keeping
    if room != best.room:
        best = _simulation(timing, cache_slots, streaming, room, timing.cycle.windows(frozenset(), streaming))
    while True:
        again = _simulation(timing, cache_slots, streaming, room, best.reach)
        if again.moves.total_bytes >= best.moves.total_bytes:
            return best
        best = again


def _bytes_by_role(cycle: Cycle, uses: npt.NDArray[np.int64]) -> dict[Role, int]:
    pages = cycle.pages[uses]
    return {role: int(cycle.nbytes[pages[cycle.roles[pages] == role.value]].sum()) for role in Role}


def preferred(simulations: Sequence[Simulation]) -> Simulation:
    """Return the simulation of the fastest plan or, among plans of similar speed, of the one with the fewest bytes."""
    if len(simulations) == 1:
        return simulations[0]
    return _preferred(simulations, min(simulation.moves.total_bytes for simulation in simulations))


def _quickest(found: Sequence[Simulation], least: float) -> Simulation:
    """Return the candidate with the smallest slowness, which is exact afterwards."""
    while True:
        quickest = min(found, key=lambda simulation: simulation.slowness(least))
        if quickest.slowness(least)[1]:
            return quickest
        quickest.simulate(least)


def _preferred(found: Sequence[Simulation], least: float) -> Simulation:
    most = _ABOUT * _quickest(found, least).slowness(least)[0]
    best: Simulation | None = None
    for candidate in sorted(found, key=lambda simulation: simulation.moves.total_bytes):
        if best is not None and candidate.moves.total_bytes > best.moves.total_bytes:
            break
        while not (slowness := candidate.slowness(least))[1] and slowness[0] <= most:
            candidate.simulate(least)
        if slowness[0] <= most and (best is None or slowness < best.slowness(least)):
            best = candidate
    assert best is not None
    return best


def prepend(prefix: Sequence[Access], plan: Plan, layout: Layout) -> Plan:
    """Return a copy of `plan` that once runs a prefix, which uses pages of the trace, before the trace."""
    accesses, length = (*prefix, *plan.trace, *plan.trace), len(plan.trace)
    if plan.streaming_cache_slots:
        reach = windows(Uses(accesses), length, plan.resident, plan.streaming_cache_slots)
    else:
        reach = windows_of_all(accesses, length, layout)
    return replace(plan, prefix=tuple(prefix), reach=tuple(reach))


def _by_benefit(moves: Moves, cycle: Cycle) -> list[int]:
    """Return the pages, ordered by the number of bytes that each saves if it is resident, largest first.

    Weights of equal benefit are ordered by FSDP module, because a gather that has to read one page waits about as long
    as a gather that reads all of its pages. In this order, some FSDP modules have no wait at all. Other pages of equal
    benefit are ordered such that, for every n, the first n pages are spread evenly over the step. The remaining
    transfers then overlap the computation of all FSDP modules, not just of a few.

    Args:
        moves: transfers of a step in which no page is resident.
    """
    moved, used = np.concatenate((moves.entering[moves.read], moves.leaving[moves.written])), cycle.used_in_order
    saved = (np.bincount(cycle.pages[moved], minlength=len(cycle.nbytes)) * cycle.nbytes)[used]
    weights = cycle.roles[used] == Role.PARAM.value
    order = np.lexsort((used, ~weights, -saved))
    ends = np.flatnonzero(np.diff(saved[order]) | np.diff(weights[order])) + 1
    found: list[int] = []
    for group in np.split(order, ends):
        found += used[group if weights[group[0]] else group[_spread(len(group))]].tolist()
    return found


def evenly(number: int) -> float:
    """Map an integer to [0, 1) such that, for every n, the values of the first n integers are spread evenly.

    The values are the multiples of the golden ratio modulo 1 (Knuth, TAOCP 3, section 6.4).
    """
    return number * _GOLDEN_RATIO % 1


@lru_cache(maxsize=16)
def _spread(number: int) -> list[int]:
    """Return the integers below `number`, ordered such that, for every n, the first n are spread evenly."""
    return sorted(range(number), key=evenly)
