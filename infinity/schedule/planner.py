"""The planner, which turns a trace and a number of cache slots into a plan. Pure: no I/O, no torch, no clock.

[Note: why a fixed resident set] A training step uses its pages in a fixed cyclic order. On such a sweep, any recency
policy evicts each page just before it is needed again. Keeping a *fixed* set of pages is optimal, and the remaining
traffic has a closed form (docs/explanation/planning-and-traffic.md). The benefit of a page is the number of bytes per
step that are saved by keeping it. Every page costs one cache slot, so taking the most beneficial pages first is exact.
If pages have the same benefit, such as the masters and moments of all FSDP modules, the resident ones are spread over
the step.

[Note: the window] Pages that are not resident stream through the remaining cache slots. At position i of the trace, the
window is [i, c(i)]: it reaches as far ahead as its distinct pages fit into the streaming cache slots. A page is in
memory exactly while one of its uses is inside the window. When the page enters, it is fetched, unless the use replaces
its content. When it leaves, it is written if it was modified. c is monotone and does not depend on timing. Therefore
the bytes of a step are known before the step runs.

The number of streaming cache slots is a trade-off. A small number leaves room for resident pages. A large number lets
the window reach all pages that are needed until the FSDP module after the next one, so that the drive never idles. The
planner compares plans by their simulated step time (`timing`). Among plans of about the same speed, it takes the plan
that moves the fewest bytes, because drives wear out and every byte costs CPU time, hidden or not.

[Note: all pages resident] If every page has a cache slot, no page has to wait for a cache slot, and an access to a page
that is being updated waits for that page alone. Therefore the window spans a whole cycle, with one exception: as long
as an update has not ended, the training thread does not pass the end of the window that begins at this update. For an
update in backward, the window ends two FSDP modules later, because the gradients of the FSDP modules in between wait in
memory outside of the host cache.

[Note: kept pages] In backward, the weights of an FSDP module are copied out for the gather. If they are a part of the
master, the update of the FSDP module reads them again. The rest of the state of the FSDP module comes between the two
uses, so the window does not reach that far. Therefore a few cache slots keep pages from one use to the next while one
FSDP module is being processed. All FSDP modules share these cache slots, one after another: each slot saves one
transfer per FSDP module, whereas a cache slot for a resident page saves two or three transfers per step. The planner
chooses the alternative that moves fewer bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import BudgetError
from infinity.schedule.cycle import Cycle, Moves, Uses, windows, windows_of_all
from infinity.schedule.timing import NOTHING, OtherResources, StagedComputation, Timing
from infinity.schedule.trace import Access
from infinity.units import format_setting, format_size

LEAST_WRITING = 2
"""Minimum number of cache slots for pages that are being written."""
LEAST_STREAMING = 6
"""Minimum number of streaming cache slots."""
_WIDER = 2
"""Factor from one tried window to the next. Beyond `_TRIED`, windows are tried up to this factor times the best one."""
_TRIED = 48
"""Number of streaming cache slots up to which wider windows are always tried, or a quarter of the host cache if that is
less.
"""
_ABOUT = 1.02
"""Ratio of step times up to which two plans count as equally fast."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_WRITING = 6
"""Number of streaming cache slots per cache slot for pages that are being written."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """NVMe bytes of one step, by role of the page."""

    read: dict[Role, int]
    """Bytes read."""
    written: dict[Role, int]
    """Bytes written."""

    @property
    def read_bytes(self) -> int:
        """Bytes read per step."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written per step."""
        return sum(self.written.values())

    @property
    def total_bytes(self) -> int:
        """Bytes read and written per step."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class RetainedPages:
    """Pages that stay in memory from one use to the next although the window does not reach that far.

    For example, if page 7 is used at positions 3 and 9 and kept in between, (3, 7) is in `since` and (9, 7) is in
    `until`.
    """

    since: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of the uses after which the page stays."""
    until: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of the uses until which the page has stayed."""
    cache_slots: int = 0
    """Maximum number of pages that are kept at the same time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule that the pager executes. Immutable.

    Positions count the accesses of `prefix`, which runs once, and then the accesses of `trace`, which repeats. For
    example, with a prefix of 2 and a trace of 10 accesses, positions 2 and 12 are both the first access of the trace.

    Life cycle: `make_plan` creates a plan from the trace of a step. `prepend` adds a prefix if other accesses come
    before the next step. The plan is then installed in the pager, and replaced when steps change.
    """

    prefix: tuple[Access, ...]
    """Accesses before the first step."""
    trace: tuple[Access, ...]
    """Accesses of one step."""
    reach: tuple[int, ...]
    """c(i) for every position i of the prefix and of one cycle of the trace: the last position whose pages must be in
    memory, or on their way, when position i begins.
    """
    resident: frozenset[int]
    """Pages that always stay in memory."""
    kept: RetainedPages
    """Pages that stay from one use to the next."""
    cache_slots: int
    """Number of cache slots of the host cache. Slots that are not used for resident, streaming and kept pages hold
    pages that are being written.
    """
    streaming_cache_slots: int
    """Maximum number of distinct pages in the window, without resident pages. 0 if all pages are resident."""
    traffic: Traffic
    """Bytes of one step that follows a step of the same trace."""
    prefetched: StagedComputation | None = None
    """Computation of a step, if its weights are prefetched to the GPU."""

    @property
    def stores_gradients(self) -> bool:
        """Return ``True`` if steps write gradients to the drives."""
        return self.traffic.written[Role.GRAD] > 0

    def access(self, position: int) -> Access:
        """Return the access at a position."""
        lead = len(self.prefix)
        return self.prefix[position] if position < lead else self.trace[(position - lead) % len(self.trace)]

    def reach_at(self, position: int) -> int:
        """Return c(i) for a position."""
        cycles = max(0, position - len(self.prefix)) // len(self.trace)
        return self.reach[position - cycles * len(self.trace)] + cycles * len(self.trace)

    def keeps(self, position: int, page: int) -> bool:
        """Return ``True`` if a page stays in memory from its use at a position to its next use."""
        lead = len(self.prefix)
        return position >= lead and ((position - lead) % len(self.trace), page) in self.kept.since

    def has_kept(self, position: int, page: int) -> bool:
        """Return ``True`` if a page has stayed in memory from its previous use to its use at a position."""
        lead = len(self.prefix)
        return position >= lead and ((position - lead) % len(self.trace), page) in self.kept.until

    def ends_step(self, position: int) -> bool:
        """Return ``True`` if the next access is at a position between two steps, or before the first step."""
        lead = len(self.prefix)
        return position == 0 or (position >= lead and (position - lead) % len(self.trace) == 0)


def least_cache_slots(widest: int) -> int:
    """Return the minimum number of cache slots for accesses of up to `widest` pages."""
    # The window must have room for its first access. Otherwise this access waits until the window reaches it, and the
    # window waits until this access ends. Two more cache slots let the window reach pages of the next access too.
    return max(LEAST_STREAMING, widest + 2) + LEAST_WRITING


def make_plan(
    trace: Sequence[Access],
    layout: Layout,
    cache_slots: int,
    *,
    threaded: bool = False,
    prefetched: StagedComputation | None = None,
    quick: bool = False,
) -> Plan:
    """Return a plan for the accesses of one step.

    Args:
        trace: accesses of one step.
        layout: pages of this rank.
        cache_slots: number of cache slots of the host cache.
        threaded: whether updates run on a thread of their own.
        prefetched: computation of a step, if its weights are prefetched to the GPU.
        quick: whether to skip the search and return any valid plan, e.g. for a plan that is used for one step only.

    Raises:
        BudgetError: if `cache_slots` is less than `least_cache_slots`.
    """
    cycle = Cycle(trace, layout)
    widest = max((len(access) for access in trace), default=1)
    # The result depends only on the arguments, never on a clock, a measurement or the order of a set. Therefore the
    # bytes of a step are known before it runs, and a resumed run gets the plan that it had before.
    if len(cycle.used) <= cache_slots:
        return _plan(_all_resident(cycle, cache_slots), prefetched)
    fewest = least_cache_slots(widest)
    if cache_slots < fewest:
        raise BudgetError(
            f"the host cache holds {cache_slots} pages of {format_size(layout.page_bytes)}, but this step needs at "
            f"least {fewest}: set memory.host_bytes to {format_setting(fewest * layout.page_bytes)} or more, "
            "or decrease memory.page_bytes"
        )
    streaming, most = fewest - LEAST_WRITING, cache_slots - LEAST_WRITING
    if quick:
        streaming = min(max(streaming, min(cache_slots // 4, _TRIED)), most)
        return _plan(_draft(cycle, cache_slots, streaming, 0, cycle.windows(frozenset(), streaming)), prefetched)
    timing = Timing(cycle, threaded=threaded, prefetched=prefetched)
    drafts = _drafts(cycle, cache_slots, streaming)
    least = drafts[0].moves.total_bytes
    found: list[tuple[float, _Draft]] = []
    while True:
        found += [(_slowness(draft, timing, least), draft) for draft in drafts]
        _, quickest = min(found, key=lambda pair: pair[0])
        tried = max(min(cache_slots // 4, _TRIED), _WIDER * quickest.streaming)
        if streaming >= min(tried, most):
            draft = _preferred(found)
            refined = _refined(draft)
            best = refined if refined is draft else _most_preferred([refined, draft], [timing, timing])
            return _plan(best, prefetched)
        streaming = min(_WIDER * streaming, most)
        drafts = _drafts(cycle, cache_slots, streaming)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A candidate plan, with the values by which candidates are compared."""

    cycle: Cycle
    """The trace."""
    cache_slots: int
    """Number of cache slots of the host cache."""
    streaming: int
    """Maximum number of distinct pages in the window."""
    room: int
    """Number of cache slots for kept pages."""
    resident: frozenset[int]
    """Pages that always stay."""
    reach: Sequence[int]
    """c(i) for every position."""
    kept: frozenset[int]
    """Uses after which a page stays until its next use."""
    keeping: int
    """Maximum number of pages that are kept at the same time."""
    moves: Moves
    """Transfers of a steady step."""


def _drafts(cycle: Cycle, cache_slots: int, streaming: int) -> list[_Draft]:
    """Return candidates with a given number of streaming cache slots: one without kept pages and, if pages can be kept,
    one that keeps as many pages as possible.
    """
    reach = cycle.windows(frozenset(), streaming)
    _, most = cycle.between_uses(reach, frozenset(), cache_slots - streaming - _writing(cache_slots, streaming))
    return [_draft(cycle, cache_slots, streaming, keeping, reach) for keeping in sorted({0, most})]


def _writing(cache_slots: int, streaming: int) -> int:
    """Return the number of cache slots for pages that are being written."""
    return min(max(LEAST_WRITING, streaming // _WRITING), cache_slots - streaming)


def _draft(cycle: Cycle, cache_slots: int, streaming: int, room: int, reach: Sequence[int]) -> _Draft:
    """Return a candidate whose resident pages save the most bytes under the window `reach`.

    All cache slots without another purpose hold resident pages.

    Args:
        cycle: the trace.
        cache_slots: number of cache slots of the host cache.
        streaming: number of cache slots for pages in the window.
        room: number of cache slots for pages that are kept between uses.
        reach: window for which the resident pages are chosen.
    """
    number = cache_slots - streaming - room - _writing(cache_slots, streaming)
    resident: frozenset[int] = frozenset()
    if number:
        kept, _ = cycle.between_uses(reach, resident, room)
        resident = frozenset(_by_benefit(cycle.moves(reach, resident, kept), cycle)[:number])
    reach = cycle.windows(resident, streaming)
    kept, keeping = cycle.between_uses(reach, resident, room)
    return _Draft(
        cycle=cycle,
        cache_slots=cache_slots,
        streaming=streaming,
        room=room,
        reach=reach,
        resident=resident,
        kept=kept,
        keeping=keeping,
        moves=cycle.moves(reach, resident, kept),
    )


def _refined(draft: _Draft) -> _Draft:
    """Return a candidate with improved resident pages.

    The benefit of a page is the number of bytes that it would move if it streamed. It depends on the window, and the
    window depends on the resident pages. Therefore resident pages are chosen for the window without any resident page,
    then again for the window that results, and so on, as long as the number of moved bytes decreases. `draft` is the
    first choice. Its cache slots for kept pages that stay empty are used for resident pages.
    """
    cycle, cache_slots, streaming, room = draft.cycle, draft.cache_slots, draft.streaming, draft.keeping
    best = draft
    if room != draft.room:
        best = _draft(cycle, cache_slots, streaming, room, cycle.windows(frozenset(), streaming))
    while True:
        again = _draft(cycle, cache_slots, streaming, room, best.reach)
        if again.moves.total_bytes >= best.moves.total_bytes:
            return best
        best = again


def _all_resident(cycle: Cycle, cache_slots: int) -> _Draft:
    """Return the candidate in which all pages stay."""
    reach, none = cycle.windows_of_all(), frozenset[int]()
    return _Draft(
        cycle=cycle,
        cache_slots=cache_slots,
        streaming=0,
        room=0,
        reach=reach,
        resident=cycle.used,
        kept=none,
        keeping=0,
        moves=cycle.moves(reach, cycle.used, none),
    )


def _draft_of(plan: Plan, layout: Layout) -> _Draft:
    """Return the candidate that corresponds to a plan without a prefix."""
    cycle, since = Cycle(plan.trace, layout), plan.kept.since
    kept = frozenset(use for use, at in enumerate(zip(cycle.places, cycle.pages, strict=True)) if at in since)
    return _Draft(
        cycle=cycle,
        cache_slots=plan.cache_slots,
        streaming=plan.streaming_cache_slots,
        room=plan.kept.cache_slots,
        reach=plan.reach,
        resident=plan.resident,
        kept=kept,
        keeping=plan.kept.cache_slots,
        moves=cycle.moves(plan.reach, plan.resident, kept),
    )


def _plan(draft: _Draft, prefetched: StagedComputation | None) -> Plan:
    cycle = draft.cycle
    return Plan(
        prefix=(),
        trace=cycle.trace,
        reach=tuple(draft.reach),
        resident=draft.resident,
        kept=RetainedPages(
            since=frozenset((cycle.places[use], cycle.pages[use]) for use in draft.kept),
            until=frozenset((cycle.then[use], cycle.pages[use]) for use in draft.kept),
            cache_slots=draft.keeping,
        ),
        cache_slots=draft.cache_slots,
        streaming_cache_slots=draft.streaming,
        traffic=_traffic(draft),
        prefetched=prefetched,
    )


def _traffic(draft: _Draft) -> Traffic:
    cycle, moves = draft.cycle, draft.moves
    found = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for bytes_of, uses in zip(found, (moves.read, moves.written), strict=True):
        for use in uses:
            page = cycle.layout.pages[cycle.pages[use]]
            bytes_of[page.role] += page.nbytes
    return Traffic(read=found[0], written=found[1])


def preferred(plans: Sequence[Plan], layout: Layout, *, threaded: bool) -> Plan:
    """Return the plan with the shortest step time. Among plans of about the same speed, return the one that moves the
    fewest bytes.

    Args:
        plans: plans to compare, without prefixes.
        layout: pages of this rank.
        threaded: whether updates run on a thread of their own.
    """
    if len(plans) == 1:
        return plans[0]
    drafts = [_draft_of(plan, layout) for plan in plans]
    timings = [
        Timing(draft.cycle, threaded=threaded, prefetched=plan.prefetched)
        for draft, plan in zip(drafts, plans, strict=True)
    ]
    return plans[drafts.index(_most_preferred(drafts, timings))]


def _most_preferred(drafts: Sequence[_Draft], timings: Sequence[Timing]) -> _Draft:
    """Return the preferred candidate, as `preferred` does. Each candidate has its own timing."""
    least = min(draft.moves.total_bytes for draft in drafts)
    return _preferred([(_slowness(draft, timing, least), draft) for draft, timing in zip(drafts, timings, strict=True)])


def _preferred(found: Sequence[tuple[float, _Draft]]) -> _Draft:
    # Bytes decide between plans of about the same speed: drives wear out, and every byte costs CPU time.
    most = _ABOUT * min(slowness for slowness, _ in found)
    about = [(slowness, draft) for slowness, draft in found if slowness <= most]
    return min(about, key=lambda pair: (pair[1].moves.total_bytes, pair[0]))[1]


def _slowness(draft: _Draft, timing: Timing, least: float) -> float:
    """Return the mean relative step time of a candidate over four kinds of steps. Less is better.

    The kinds differ in the time of their computation: no time, so that only bytes count; as long as moving `least`
    bytes; twice as long; and longer than all possible transfers, so that only waits count. The step times are relative
    to values that are the same for all candidates.

    Args:
        draft: the candidate.
        timing: simulation of its trace.
        least: bytes per step that some plan with few streaming cache slots moves, as the unit of time.
    """
    least = max(1, least)  # avoid a division by zero if no page moves
    each = 2 * sum(draft.cycle.nbytes[page] for page in draft.cycle.used)  # to read and write every page once
    works = (least, 2 * least, 2 * each)
    found = timing.lengths(draft.reach, draft.moves, _moving(draft), works)
    ratios = [length / work for length, work in zip(found, works, strict=True)]
    return mean([draft.moves.total_bytes / least, *ratios])


def _moving(draft: _Draft) -> int:
    """Return the number of cache slots for pages that do not always stay."""
    return draft.cache_slots - len(draft.resident) - len(draft.moves.staying)


def lengths(
    plan: Plan, layout: Layout, works: Sequence[float], *, beside: OtherResources = NOTHING, threaded: bool
) -> list[float]:
    """Return the time of a steady step for each of several computation times. See `Timing.lengths`.

    Args:
        plan: a plan without a prefix.
        layout: pages of this rank.
        works: time that all computation of a step takes, in bytes that the drive could move meanwhile.
        beside: other resources that take time.
        threaded: whether updates run on a thread of their own.
    """
    if not plan.trace:  # all FSDP modules are GPU-resident
        return list(works)
    draft = _draft_of(plan, layout)
    timing = Timing(draft.cycle, threaded=threaded, prefetched=plan.prefetched)
    return timing.lengths(draft.reach, draft.moves, _moving(draft), works, beside)


def predict_seconds(
    plan: Plan,
    layout: Layout,
    *,
    bandwidth: float,
    computation: float,
    beside: OtherResources = NOTHING,
    activations: float = 0.0,
    threaded: bool,
) -> float:
    """Return the predicted time of a steady step, in seconds.

    Args:
        plan: a plan without a prefix.
        layout: pages of this rank.
        bandwidth: bandwidth of the drives for reads and writes together, in bytes per second.
        computation: time that the training thread computes per step without waiting, in seconds.
        beside: other resources that take time, in seconds.
        activations: bytes of activations that the drives read and write per step in addition to the plan. They are
            spread over the step as its computation is, so each transfer of the plan takes longer in proportion.
        threaded: whether updates run on a thread of their own.
    """
    total = plan.traffic.total_bytes
    if activations:
        least = (total + activations) / bandwidth
        bandwidth *= total / (total + activations) if total else 1.0
    else:
        least = 0.0
    (length,) = lengths(plan, layout, [computation * bandwidth], beside=beside.times(bandwidth), threaded=threaded)
    return max(max(length, total) / bandwidth, least, beside.longest)


def prepend(prefix: Sequence[Access], plan: Plan, layout: Layout) -> Plan:
    """Return a plan that runs a prefix once before the trace of `plan`.

    Args:
        prefix: accesses of the same pages.
        plan: a plan.
        layout: pages of this rank.
    """
    accesses, length = (*prefix, *plan.trace, *plan.trace), len(plan.trace)
    if plan.streaming_cache_slots:
        reach = windows(Uses(accesses), length, plan.resident, plan.streaming_cache_slots)
    else:
        reach = windows_of_all(accesses, length, layout)
    return replace(plan, prefix=tuple(prefix), reach=tuple(reach))


def _by_benefit(moves: Moves, cycle: Cycle) -> list[int]:
    """Return pages in the order of the bytes that they save by staying, largest first.

    Weights with the same benefit are ordered by FSDP module, because a gather that has to read one page waits about as
    long as one that reads all pages. So whole FSDP modules are spared the wait. Other pages with the same benefit are
    ordered so that the first n are spread evenly over the step for every n. Then the remaining transfers overlap the
    computation of every FSDP module, not only of a few.

    Args:
        moves: transfers of a step in which no page is resident.
        cycle: the trace.
    """
    saved = dict.fromkeys(sorted(cycle.used), 0)
    for use in itertools.chain(moves.read, moves.written):
        page = cycle.pages[use]
        saved[page] += cycle.nbytes[page]
    pages = cycle.layout.pages
    alike: dict[tuple[int, bool], list[int]] = {}
    for page, nbytes in saved.items():
        alike.setdefault((-nbytes, pages[page].role is not Role.PARAM), []).append(page)
    found: list[int] = []
    for (_, spread), group in sorted(alike.items()):
        found += [group[n] for n in _spread(len(group))] if spread else group
    return found


def evenly(number: int) -> float:
    """Return a place between 0 and 1 for a number, so that the places of the first n numbers are spread evenly for
    every n.

    The places are the multiples of the golden ratio modulo 1 (Knuth, TAOCP 3, section 6.4).
    """
    return number * _GOLDEN_RATIO % 1


@lru_cache(maxsize=16)
def _spread(number: int) -> list[int]:
    """Return the integers below `number` in an order in which the first n are spread evenly for every n."""
    return sorted(range(number), key=evenly)
