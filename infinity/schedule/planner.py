"""The planner: from a trace and a budget of cache slots to a plan. Pure: no I/O, no torch, no clock.

[Note: why a fixed resident set] A training step uses its pages in a fixed cyclic order. On such a sweep any
recency policy evicts each page just before it is needed again; keeping a *fixed* set of pages is optimal, and
the traffic that is left is a closed form (docs/explanation/architecture.md). A page's benefit is the bytes per step that
keeping it saves; every page costs one cache slot, so taking the most beneficial pages first is exact. Of those that
save
the same, such as the master and moments of all FSDP modules, residents are spread over the step.

[Note: the window] Pages that are not resident stream through the remaining cache slots. At position i of the
trace the window is [i, c(i)], as far ahead as its distinct pages fit into the streaming cache slots. A page is in
memory exactly while a use of it lies in the window: entering means a fetch (unless the use replaces the
content), leaving means a write if it was modified. c is monotone and does not depend on timing, therefore the
bytes of a step are known before it runs.

How many cache slots stream is a trade. Few of them leave room for residents. Many of them let the window reach over all
that is needed until the FSDP module after next, so that the drive always has something to do. Plans are compared by the
clock
(`timing`). Of those that are about as quick, the one that moves least is taken: drives wear out, and every byte costs
the CPU some time, hidden or not.

[Note: nothing streams] Where every page has a cache slot, nothing has to be held back for cache slots, and who needs a
page that
is being updated waits for that page alone. So the window reaches over a turn, with one exception. As long as an update
has not ended, the training thread goes no further than the window from there reaches; behind an update in backward that
is two FSDP modules, as the gradients of all FSDP modules that it goes ahead wait in memory, outside of the host cache.

[Note: kept pages] An FSDP module's weights are copied out in backward. Where they are a part of the master, the update
of the
FSDP module reads them once more. The rest of the FSDP module's state comes between the two, so the window does not
reach that far. So
a few cache slots keep pages from one use to the next while one FSDP module is worked on. All FSDP modules take turns in
these cache slots:
each saves one transfer per FSDP module, a cache slot for a resident page two or three per step. Whichever moves less is
done.
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
from infinity.schedule.timing import NOTHING, Beside, StagedComputation, Timing
from infinity.schedule.trace import Access
from infinity.units import format_setting, format_size

LEAST_WRITING = 2
"""Cache slots for pages that are being written, at least."""
LEAST_STREAMING = 6
"""Cache slots that stream, at least."""
_WIDER = 2
"""Factor from one window that is tried to the next. Beyond `_TRIED`, they are tried up to this factor of the best."""
_TRIED = 48
"""Streaming cache slots up to which wider windows are tried in any case, or a quarter of the host cache if that is
less.
"""
_ABOUT = 1.02
"""How much longer, by the clock, a plan may take that is about as quick as another one."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_WRITING = 6
"""Streaming cache slots to each cache slot that is being written."""


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
    """Pages that stay in memory from one use to the next, though the window does not reach so far.

    For example, page 7 is used at positions 3 and 9 and kept between: (3, 7) is in `since`, (9, 7) in `until`.
    """

    since: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of uses after which the page stays."""
    until: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of uses until which it has stayed."""
    cache_slots: int = 0
    """How many pages are kept at once at most."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the pager executes; immutable.

    Positions count the accesses of `prefix`, which is executed once, and then those of `trace`, over and over. For
    example, with a prefix of 2 and a trace of 10 accesses, positions 2 and 12 are both the first access of the trace.

    Life cycle: made by `make_plan` from the trace of a step, given a prefix by `prepend` where something comes before
    the next step, installed in the pager, and replaced when steps look otherwise.
    """

    prefix: tuple[Access, ...]
    """Accesses before the first step."""
    trace: tuple[Access, ...]
    """Accesses of one step."""
    reach: tuple[int, ...]
    """c(i) for every position i of the prefix and one turn of the trace: the last position whose pages are to be in
    memory or on their way when position i begins."""
    resident: frozenset[int]
    """Pages that always stay."""
    kept: RetainedPages
    """Pages that stay from one use to the next."""
    cache_slots: int
    """Cache slots of the host cache.

    Those that are not for resident, streaming and kept pages are for pages being written.
    """
    streaming_cache_slots: int
    """Distinct pages that the window may reach over, residents not counted; 0 where all pages are resident."""
    traffic: Traffic
    """Bytes of one step, when a step like it came before."""
    prefetched: StagedComputation | None = None
    """When a step computes, if its weights are staged."""

    @property
    def stores_gradients(self) -> bool:
        """Whether steps write gradients to the drives."""
        return self.traffic.written[Role.GRAD] > 0

    def access(self, position: int) -> Access:
        """Return the access at a position."""
        lead = len(self.prefix)
        return self.prefix[position] if position < lead else self.trace[(position - lead) % len(self.trace)]

    def reach_at(self, position: int) -> int:
        """Return c of a position."""
        turns = max(0, position - len(self.prefix)) // len(self.trace)
        return self.reach[position - turns * len(self.trace)] + turns * len(self.trace)

    def keeps(self, position: int, page: int) -> bool:
        """Whether a page stays in memory from its use at a position to its next one."""
        lead = len(self.prefix)
        return position >= lead and ((position - lead) % len(self.trace), page) in self.kept.since

    def has_kept(self, position: int, page: int) -> bool:
        """Whether a page has stayed in memory from its last use to that at a position."""
        lead = len(self.prefix)
        return position >= lead and ((position - lead) % len(self.trace), page) in self.kept.until

    def ends_step(self, position: int) -> bool:
        """Whether a step has ended, or none has begun, when this position comes next."""
        lead = len(self.prefix)
        return position == 0 or (position >= lead and (position - lead) % len(self.trace) == 0)


def least_cache_slots(widest: int) -> int:
    """Return the smallest number of cache slots that can serve accesses of up to `widest` pages."""
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
    """Return the plan for a trace, the accesses of one step, and a host cache of `cache_slots` cache slots.

    Args:
        threaded: whether updates are waited for on a thread of their own.
        staged: when a step computes, if its weights are staged.
        quick: whether any plan will do, since it is not followed for long.

    Raises:
        BudgetError: there are fewer cache slots than `least_cache_slots`.
    """
    turn = Cycle(trace, layout)
    widest = max((len(access) for access in trace), default=1)
    if len(turn.used) <= cache_slots:
        return _plan(_all_resident(turn, cache_slots), prefetched)
    fewest = least_cache_slots(widest)
    if cache_slots < fewest:
        raise BudgetError(
            f"the host cache holds {cache_slots} pages of {format_size(layout.page_bytes)}; this step needs at least "
            f"{fewest}: set memory.host_bytes to {format_setting(fewest * layout.page_bytes)} or more, "
            "or memory.page_bytes lower"
        )
    streaming, most = fewest - LEAST_WRITING, cache_slots - LEAST_WRITING
    if quick:
        streaming = min(max(streaming, min(cache_slots // 4, _TRIED)), most)
        return _plan(_draft(turn, cache_slots, streaming, 0, turn.windows(frozenset(), streaming)), prefetched)
    timing = Timing(turn, threaded=threaded, prefetched=prefetched)
    drafts = _drafts(turn, cache_slots, streaming)
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
        drafts = _drafts(turn, cache_slots, streaming)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """What there is to compare of a plan."""

    turn: Cycle
    """The trace that it is for."""
    cache_slots: int
    """Cache slots of the host cache."""
    streaming: int
    """Distinct pages that the window may reach over."""
    room: int
    """Cache slots for pages that are kept."""
    resident: frozenset[int]
    """Pages that always stay."""
    reach: Sequence[int]
    """c(i) for every position."""
    kept: frozenset[int]
    """Uses after which a page stays until its next one."""
    keeping: int
    """How many pages are kept at once at most."""
    moves: Moves
    """What a steady step moves."""


def _drafts(turn: Cycle, cache_slots: int, streaming: int) -> list[_Draft]:
    """Return two drafts of plans with so many streaming cache slots:

    with no kept pages, and with as many as possible.
    """
    reach = turn.windows(frozenset(), streaming)
    _, most = turn.between_uses(reach, frozenset(), cache_slots - streaming - _writing(cache_slots, streaming))
    return [_draft(turn, cache_slots, streaming, keeping, reach) for keeping in sorted({0, most})]


def _writing(cache_slots: int, streaming: int) -> int:
    """Return how many cache slots are for pages that are being written while others stream."""
    return min(max(LEAST_WRITING, streaming // _WRITING), cache_slots - streaming)


def _draft(turn: Cycle, cache_slots: int, streaming: int, room: int, reach: Sequence[int]) -> _Draft:
    """Return a draft whose residents are those that save most bytes under the window `reach`.

    Cache slots that nothing else needs are for residents.

    Args:
        streaming: cache slots for pages in the window.
        room: cache slots for pages that are kept between uses.
    """
    number = cache_slots - streaming - room - _writing(cache_slots, streaming)
    resident: frozenset[int] = frozenset()
    if number:
        kept, _ = turn.between_uses(reach, resident, room)
        resident = frozenset(_by_benefit(turn.moves(reach, resident, kept), turn)[:number])
    reach = turn.windows(resident, streaming)
    kept, keeping = turn.between_uses(reach, resident, room)
    return _Draft(
        turn=turn,
        cache_slots=cache_slots,
        streaming=streaming,
        room=room,
        reach=reach,
        resident=resident,
        kept=kept,
        keeping=keeping,
        moves=turn.moves(reach, resident, kept),
    )


def _refined(draft: _Draft) -> _Draft:
    """Return what a draft becomes when its residents are chosen again, as long as fewer bytes are moved.

    What a page saves is what it would move if it streamed. That depends on the window, and how far the window reaches
    depends on which pages are resident. So residents are chosen for the window that there is without any, then chosen
    again for the window that this leads to, and so on. A draft is the first choice; cache slots that keep nothing in it
    are
    for residents.
    """
    turn, cache_slots, streaming, room = draft.turn, draft.cache_slots, draft.streaming, draft.keeping
    best = draft
    if room != draft.room:
        best = _draft(turn, cache_slots, streaming, room, turn.windows(frozenset(), streaming))
    while True:
        again = _draft(turn, cache_slots, streaming, room, best.reach)
        if again.moves.total_bytes >= best.moves.total_bytes:
            return best
        best = again


def _all_resident(turn: Cycle, cache_slots: int) -> _Draft:
    """Return the draft where all pages stay."""
    reach, none = turn.windows_of_all(), frozenset[int]()
    return _Draft(
        turn=turn,
        cache_slots=cache_slots,
        streaming=0,
        room=0,
        reach=reach,
        resident=turn.used,
        kept=none,
        keeping=0,
        moves=turn.moves(reach, turn.used, none),
    )


def _draft_of(plan: Plan, layout: Layout) -> _Draft:
    """Return what there is to compare of a plan that has no prefix."""
    turn, since = Cycle(plan.trace, layout), plan.kept.since
    kept = frozenset(use for use, at in enumerate(zip(turn.places, turn.pages, strict=True)) if at in since)
    return _Draft(
        turn=turn,
        cache_slots=plan.cache_slots,
        streaming=plan.streaming_cache_slots,
        room=plan.kept.cache_slots,
        reach=plan.reach,
        resident=plan.resident,
        kept=kept,
        keeping=plan.kept.cache_slots,
        moves=turn.moves(plan.reach, plan.resident, kept),
    )


def _plan(draft: _Draft, prefetched: StagedComputation | None) -> Plan:
    """Return the plan that a draft stands for."""
    turn = draft.turn
    return Plan(
        prefix=(),
        trace=turn.trace,
        reach=tuple(draft.reach),
        resident=draft.resident,
        kept=RetainedPages(
            since=frozenset((turn.places[use], turn.pages[use]) for use in draft.kept),
            until=frozenset((turn.then[use], turn.pages[use]) for use in draft.kept),
            cache_slots=draft.keeping,
        ),
        cache_slots=draft.cache_slots,
        streaming_cache_slots=draft.streaming,
        traffic=_traffic(draft),
        prefetched=prefetched,
    )


def _traffic(draft: _Draft) -> Traffic:
    """Return the bytes of one steady step."""
    turn, moves = draft.turn, draft.moves
    found = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for bytes_of, uses in zip(found, (moves.read, moves.written), strict=True):
        for use in uses:
            page = turn.layout.pages[turn.pages[use]]
            bytes_of[page.role] += page.nbytes
    return Traffic(read=found[0], written=found[1])


def preferred(plans: Sequence[Plan], layout: Layout, *, threaded: bool) -> Plan:
    """Return the plan under which steps take least time; of those that are about as quick, the one that moves least.

    Args:
        threaded: whether updates are waited for on a thread of their own.
    """
    if len(plans) == 1:
        return plans[0]
    drafts = [_draft_of(plan, layout) for plan in plans]
    timings = [
        Timing(draft.turn, threaded=threaded, prefetched=plan.prefetched)
        for draft, plan in zip(drafts, plans, strict=True)
    ]
    return plans[drafts.index(_most_preferred(drafts, timings))]


def _most_preferred(drafts: Sequence[_Draft], timings: Sequence[Timing]) -> _Draft:
    """Return the draft under which steps take least time, as `preferred` does; each has its timing."""
    least = min(draft.moves.total_bytes for draft in drafts)
    return _preferred([(_slowness(draft, timing, least), draft) for draft, timing in zip(drafts, timings, strict=True)])


def _preferred(found: Sequence[tuple[float, _Draft]]) -> _Draft:
    most = _ABOUT * min(slowness for slowness, _ in found)
    about = [(slowness, draft) for slowness, draft in found if slowness <= most]
    return min(about, key=lambda pair: (pair[1].moves.total_bytes, pair[0]))[1]


def _slowness(draft: _Draft, timing: Timing, least: float) -> float:
    """Return how long steps take, over a measure that is the same for all drafts compared. Less is better.

    It is the mean over four kinds of steps.

    They differ in how long their computation takes: no time, so that only bytes count; as long as moving `least` bytes;
    twice that; or longer than all transfers there can be, so that only waits count.

    Args:
        least: the measure: bytes per step that some plan with few streaming cache slots moves.
    """
    least = max(1, least)  # it may be that nothing moves
    each = 2 * sum(draft.turn.nbytes[page] for page in draft.turn.used)  # to read and write every page once
    works = (least, 2 * least, 2 * each)
    found = timing.lengths(draft.reach, draft.moves, _moving(draft), works)
    ratios = [length / work for length, work in zip(found, works, strict=True)]
    return mean([draft.moves.total_bytes / least, *ratios])


def _moving(draft: _Draft) -> int:
    """Return how many cache slots there are for pages that do not always stay."""
    return draft.cache_slots - len(draft.resident) - len(draft.moves.staying)


def lengths(
    plan: Plan, layout: Layout, works: Sequence[float], *, beside: Beside = NOTHING, threaded: bool
) -> list[float]:
    """Return how long a steady step takes for each time that its computation may take: see `Timing.lengths`.

    Args:
        beside: what else takes time.
        threaded: whether updates are waited for on a thread of their own.
    """
    if not plan.trace:  # all FSDP modules live on the device
        return list(works)
    draft = _draft_of(plan, layout)
    timing = Timing(draft.turn, threaded=threaded, prefetched=plan.prefetched)
    return timing.lengths(draft.reach, draft.moves, _moving(draft), works, beside)


def predict_seconds(
    plan: Plan,
    layout: Layout,
    *,
    bandwidth: float,
    computation: float,
    beside: Beside = NOTHING,
    activations: float = 0.0,
    threaded: bool,
) -> float:
    """Return how many seconds a steady step takes.

    Args:
        activations: bytes of these that the drives read and write beside the plan. They are spread over the step as its
            computation is, and are counted as if each transfer of the plan took longer by its share of them.
        bandwidth: of the drives, bytes per second of reads and writes together.
        computation: seconds that the training thread takes where it waits for nothing.
        beside: what else takes seconds.
        threaded: whether updates are waited for on a thread of their own.
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
    """Return a plan that executes a prefix, accesses of the same pages, once before the trace of `plan`."""
    accesses, length = (*prefix, *plan.trace, *plan.trace), len(plan.trace)
    if plan.streaming_cache_slots:
        reach = windows(Uses(accesses), length, plan.resident, plan.streaming_cache_slots)
    else:
        reach = windows_of_all(accesses, length, layout)
    return replace(plan, prefix=tuple(prefix), reach=tuple(reach))


def _by_benefit(moves: Moves, turn: Cycle) -> list[int]:
    """Return pages, those first that save most bytes by staying.

    Of weights that save the same, those of one FSDP module come together: a gather that has to read one page waits
    about as
    long as one that reads all, so whole FSDP modules are spared their wait. Of other pages that save the same, the
    first n are
    spread evenly over the step for every n, so that what still moves hides behind the computation of every FSDP module,
    not of
    a few.

    Args:
        moves: of a step in which no page is resident.
    """
    saved = dict.fromkeys(sorted(turn.used), 0)
    for use in itertools.chain(moves.read, moves.written):
        page = turn.pages[use]
        saved[page] += turn.nbytes[page]
    pages = turn.layout.pages
    alike: dict[tuple[int, bool], list[int]] = {}
    for page, nbytes in saved.items():
        alike.setdefault((-nbytes, pages[page].role is not Role.PARAM), []).append(page)
    found: list[int] = []
    for (_, spread), group in sorted(alike.items()):
        found += [group[n] for n in _spread(len(group))] if spread else group
    return found


def evenly(number: int) -> float:
    """Return a place between 0 and 1 for a number: those of the first n numbers are spread evenly for every n.

    The multiples of the golden ratio, taken modulo 1 (Knuth, TAOCP 3, section 6.4).
    """
    return number * _GOLDEN_RATIO % 1


@lru_cache(maxsize=16)
def _spread(number: int) -> list[int]:
    """Return the numbers up to one, in an order in which the first n are spread evenly for every n."""
    return sorted(range(number), key=evenly)
