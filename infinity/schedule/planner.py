"""The planner: from a trace and a budget of frames to a plan. Pure: no I/O, no torch, no clock.

[Note: why a fixed resident set] A training step uses its pages in a fixed cyclic order. On such a sweep any
recency policy evicts each page just before it is needed again; keeping a *fixed* set of pages is optimal, and
the traffic that is left is a closed form (docs/architecture.md). A page's benefit is the bytes per step that
keeping it saves; every page costs one frame, so taking the most beneficial pages first is exact. Of those that save
the same, such as the master and moments of all units, residents are spread over the step.

[Note: the window] Pages that are not resident stream through the remaining frames. At position i of the
trace the window is [i, c(i)], as far ahead as its distinct pages fit into the streaming frames. A page is in
memory exactly while a use of it lies in the window: entering means a fetch (unless the use replaces the
content), leaving means a write if it was modified. c is monotone and does not depend on timing, therefore the
bytes of a step are known before it runs.

How many frames stream is a trade. Few of them leave room for residents. Many of them let the window reach over all
that is needed until the unit after next, so that the drive always has something to do. Plans are compared by the clock
(`timing`). Of those that are about as quick, the one that moves least is taken: drives wear out, and every byte costs
the CPU some time, hidden or not.

[Note: kept pages] A unit's weights are copied out in backward. Where they are a part of the master, the update of the
unit reads them once more. The rest of the unit's state comes between the two, so the window does not reach that far. So
a few frames keep pages from one use to the next while one unit is worked on. All units take turns in these frames:
each saves one transfer per unit, a frame for a resident page two or three per step. Whichever moves less is done.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import BudgetError
from infinity.schedule.timing import Moves, computation, step_length, updating
from infinity.schedule.trace import Access, Mode
from infinity.units import format_setting, format_size

LEAST_WRITING = 2
"""Frames for pages that are being written, at least."""
LEAST_STREAMING = 6
"""Frames that stream, at least."""
_WIDER = 2
"""Factor from one window that is tried to the next. Beyond `_TRIED`, they are tried up to this factor of the best."""
_TRIED = 48
"""Streaming frames up to which wider windows are tried in any case, or a quarter of the arena if that is less."""
_ABOUT = 1.02
"""How much longer, by the clock, a plan may take that is about as quick as another one."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_WRITING = 6
"""Streaming frames to each frame that is being written."""


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
class Kept:
    """Pages that stay in memory from one use to the next, though the window does not reach so far.

    For example, page 7 is used at positions 3 and 9 and kept between: (3, 7) is in `since`, (9, 7) in `until`.
    """

    since: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of uses after which the page stays."""
    until: frozenset[tuple[int, int]] = frozenset()
    """(position in the trace, page) of uses until which it has stayed."""
    frames: int = 0
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
    kept: Kept
    """Pages that stay from one use to the next."""
    frames: int
    """Frames of the arena. Those that are not for resident, streaming and kept pages are for pages being written."""
    streaming_frames: int
    """Distinct pages that the window may reach over, residents not counted; 0 where all pages are resident."""
    traffic: Traffic
    """Bytes of one step, when a step like it came before."""

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
        """Whether a step has ended when this position comes next."""
        return position >= len(self.prefix) and (position - len(self.prefix)) % len(self.trace) == 0


def least_frames(widest: int) -> int:
    """Return the smallest number of frames that can serve accesses of up to `widest` pages."""
    return max(LEAST_STREAMING, widest + 2) + LEAST_WRITING


def make_plan(trace: Sequence[Access], layout: Layout, frames: int, *, threaded: bool = False) -> Plan:
    """Return the plan for a trace, the accesses of one step, and an arena of `frames` frames.

    Args:
        threaded: whether updates are waited for on a thread of their own.

    Raises:
        BudgetError: there are fewer frames than `least_frames`.
    """
    trace = tuple(trace)
    used = Counter(use.page for access in trace for use in access)
    widest = max((len(access) for access in trace), default=1)
    if len(used) <= frames:
        return _plan(trace, layout, frames, 0, 0)
    fewest = least_frames(widest)
    if frames < fewest:
        raise BudgetError(
            f"the host arena holds {frames} pages of {format_size(layout.page_bytes)}; this step needs at least "
            f"{fewest}: set memory.host_bytes to {format_setting(fewest * layout.page_bytes)} or more, "
            "or memory.page_bytes lower"
        )
    streaming, most = fewest - LEAST_WRITING, frames - LEAST_WRITING
    drafts = _drafts(trace, layout, frames, streaming)
    least = drafts[0].traffic.total_bytes
    found: list[tuple[float, Plan]] = []
    while True:
        found += [(_slowness(draft, layout, least, threaded=threaded), draft) for draft in drafts]
        _, quickest = min(found, key=lambda pair: pair[0])
        tried = max(min(frames // 4, _TRIED), _WIDER * quickest.streaming_frames)
        if streaming >= min(tried, most):
            draft = _preferred(found)
            plan = _plan(trace, layout, frames, draft.streaming_frames, draft.kept.frames)
            return preferred([plan, draft], layout, threaded=threaded)
        streaming = min(_WIDER * streaming, most)
        drafts = _drafts(trace, layout, frames, streaming)


def _drafts(trace: tuple[Access, ...], layout: Layout, frames: int, streaming: int) -> list[Plan]:
    """Return two drafts of plans with so many streaming frames: with no kept pages, and with as many as possible."""
    left = frames - streaming - _writing(frames, streaming)
    most = _between_uses(trace, _windows((), trace, frozenset(), streaming), layout, left).frames
    return [_plan(trace, layout, frames, streaming, keeping, draft=True) for keeping in sorted({0, most})]


def _writing(frames: int, streaming: int) -> int:
    """Return how many frames are for pages that are being written while others stream."""
    return min(max(LEAST_WRITING, streaming // _WRITING), frames - streaming)


def preferred(plans: Sequence[Plan], layout: Layout, *, threaded: bool) -> Plan:
    """Return the plan under which steps take least time; of those that are about as quick, the one that moves least.

    Args:
        threaded: whether updates are waited for on a thread of their own.
    """
    least = min(plan.traffic.total_bytes for plan in plans)
    return _preferred([(_slowness(plan, layout, least, threaded=threaded), plan) for plan in plans])


def _preferred(found: Sequence[tuple[float, Plan]]) -> Plan:
    most = _ABOUT * min(slowness for slowness, _ in found)
    about = [(slowness, plan) for slowness, plan in found if slowness <= most]
    return min(about, key=lambda pair: (pair[1].traffic.total_bytes, pair[0]))[1]


def _slowness(plan: Plan, layout: Layout, least: float, *, threaded: bool) -> float:
    """Return how long steps take, over a measure that is the same for all plans compared. Less is better.

    It is the mean over four kinds of steps.

    They differ in how long their computation takes: no time, so that only bytes count; as long as moving `least` bytes;
    twice that; or longer than all transfers there can be, so that only waits count.

    Args:
        least: the measure: bytes per step that some plan with few streaming frames moves.
    """
    least = max(1, least)  # it may be that nothing moves
    works = (least, 2 * least, 2 * _read_and_written(plan, layout))
    found = lengths(plan, layout, works, threaded=threaded)
    ratios = [length / work for length, work in zip(found, works, strict=True)]
    return mean([plan.traffic.total_bytes / least, *ratios])


def _read_and_written(plan: Plan, layout: Layout) -> int:
    """Return the bytes of a step that reads and writes every page once."""
    return 2 * sum(layout.pages[page].nbytes for page in {use.page for access in plan.trace for use in access})


def lengths(plan: Plan, layout: Layout, works: Sequence[float], *, updates: float = 0.0, threaded: bool) -> list[float]:
    """Return how long a steady step takes for each time that its computation may take: see `step_length`.

    Args:
        updates: how long all updates of a step take, beside their transfers.
    """
    moves = _moves(plan.trace, plan.reach, plan.resident, plan.kept)
    frames = plan.frames - len(plan.resident) - len(moves.staying)
    shares = computation(plan.trace, layout)
    each = [share * updates for share in updating(plan.trace, layout)]
    return [
        step_length(
            plan.trace, plan.reach, moves, layout, frames, [share * work for share in shares], each, threaded=threaded
        )
        for work in works
    ]


def predict_seconds(
    plan: Plan, layout: Layout, *, bandwidth: float, computation: float, updates: float = 0.0, threaded: bool
) -> float:
    """Return how many seconds a steady step takes.

    Args:
        bandwidth: of the drives, bytes per second of reads and writes together.
        computation: seconds that the training thread takes where it waits for no page.
        updates: seconds that updates take beside that: on a thread of their own if they are `threaded`.
        threaded: whether updates are waited for on a thread of their own.
    """
    (length,) = lengths(plan, layout, [computation * bandwidth], updates=updates * bandwidth, threaded=threaded)
    return max(length, plan.traffic.total_bytes) / bandwidth


def prepend(prefix: Sequence[Access], plan: Plan) -> Plan:
    """Return a plan that executes a prefix, accesses of the same pages, once before the trace of `plan`."""
    if plan.streaming_frames:
        reach = _windows(prefix, plan.trace, plan.resident, plan.streaming_frames)
    else:
        reach = tuple(range(len(prefix) + len(plan.trace)))
    return replace(plan, prefix=tuple(prefix), reach=reach)


def _plan(
    trace: tuple[Access, ...],
    layout: Layout,
    frames: int,
    streaming: int,
    keeping: int,
    *,
    draft: bool = False,
) -> Plan:
    """Return the plan of an arena of `frames` frames, those that nothing else needs being for resident pages.

    Args:
        streaming: frames for pages in the window; 0 if all pages fit the arena.
        keeping: frames for pages that are kept between uses.
        draft: whether residents are chosen once only, see `_most_useful`.
    """
    if streaming:
        staying = frames - streaming - keeping - _writing(frames, streaming)
        resident, kept = _most_useful(trace, layout, staying, streaming, keeping, draft=draft)
        reach = _windows((), trace, resident, streaming)
    else:
        resident, kept = frozenset(use.page for access in trace for use in access), Kept()
        reach = tuple(range(len(trace)))
    return Plan(
        prefix=(),
        trace=trace,
        reach=reach,
        resident=resident,
        kept=kept,
        frames=frames,
        streaming_frames=streaming,
        traffic=predict(trace, reach, resident, kept, layout),
    )


def _most_useful(
    trace: Sequence[Access], layout: Layout, number: int, streaming: int, keeping: int, *, draft: bool
) -> tuple[frozenset[int], Kept]:
    """Return the resident pages, those that save most bytes, and which of the others are kept between uses.

    What a page saves is what it would move if it streamed. That depends on the window, and how far the window reaches
    depends on which pages are resident. So residents are chosen for the window that there is without any, then chosen
    again for the window that this leads to, and so on as long as fewer bytes are moved. A draft is the first choice.

    Args:
        number: how many pages can be resident.
        keeping: how many can be kept at once.
    """
    found: dict[frozenset[int], tuple[int, Kept]] = {}
    chosen: frozenset[int] = frozenset()
    least = float("inf")
    while True:
        reach = _windows((), trace, chosen, streaming)
        if chosen or not number:
            kept = _between_uses(trace, reach, layout, keeping, chosen)
            total = predict(trace, reach, chosen, kept, layout).total_bytes
            found[chosen] = (total, kept)
            if draft or total >= least:
                break
            least = total
        moved = _transfers(trace, reach, frozenset(), _between_uses(trace, reach, layout, keeping))
        chosen = frozenset(_by_benefit(moved, layout)[:number])
    best = min(found, key=lambda chosen: found[chosen][0])
    return best, found[best][1]


def _by_benefit(moved: Mapping[int, tuple[int, int]], layout: Layout) -> list[int]:
    """Return pages, those first that save most bytes by staying.

    Of weights that save the same, those of one unit come together: a gather that has to read one page waits about as
    long as one that reads all, so whole units are spared their wait. Of other pages that save the same, the first n are
    spread evenly over the step for every n, so that what still moves hides behind the computation of every unit, not of
    a few. The multiples of the golden ratio, taken modulo 1, are spread so (Knuth, TAOCP 3, section 6.4).

    Args:
        moved: how often each page is read and written in a step.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for page, (reads, writes) in sorted(moved.items()):
        saved = (reads + writes) * layout.pages[page].nbytes
        alike.setdefault((-saved, layout.pages[page].role is not Role.PARAM), []).append(page)
    found: list[int] = []
    for key in sorted(alike):
        pages = alike[key]
        if layout.pages[pages[0]].role is not Role.PARAM:
            pages = [page for _, page in sorted((n * _GOLDEN_RATIO % 1, page) for n, page in enumerate(pages))]
        found += pages
    return found


def _between_uses(
    trace: Sequence[Access], reach: Sequence[int], layout: Layout, most: int, resident: frozenset[int] = frozenset()
) -> Kept:
    """Return which pages at most `most` frames keep from one use to the next: as many as possible.

    Only between uses that are near: with no other unit's accesses in between or, where the next use is an update, with
    at most two turns of other units. For example, unit 5 is gathered, 6 is updated, 4 is gathered, then 5 is updated.
    Where frames are too few, the page whose next use is last is not kept: so the largest number of intervals finds room
    (Carlisle and Lloyd, "On the k-coloring of intervals", 1995).
    """
    units = [layout.pages[access[0].page].unit for access in trace]
    turns = list(itertools.accumulate((a != b for a, b in itertools.pairwise(units)), initial=0))
    following: dict[tuple[int, int], int] = {}  # (position, page) -> next use, if it is near
    upcoming: dict[int, tuple[int, Mode]] = {}
    for position in reversed(range(len(trace))):
        for use in trace[position]:
            if use.page in upcoming and use.mode is not Mode.CONSUME and use.page not in resident:
                then, mode = upcoming[use.page]
                if turns[then] - turns[position] <= (3 if mode.modifies else 0):
                    following[position, use.page] = then
            upcoming[use.page] = (position, use.mode)
    chosen: dict[int, tuple[int, int]] = {}  # page -> (next use, use) of what is kept at this position
    since: set[tuple[int, int]] = set()
    until: set[tuple[int, int]] = set()
    frames = 0
    for position, access in enumerate(trace):
        for use in access:
            if use.page in chosen:
                then, before = chosen.pop(use.page)
                since.add((before, use.page))
                until.add((then, use.page))
        for use in access:
            then = following.get((position, use.page), -1)
            if then > _reach_after(position, reach, len(trace)):
                chosen[use.page] = (then, position)
        while len(chosen) > most:
            del chosen[max(chosen, key=chosen.__getitem__)]
        frames = max(frames, len(chosen))
    return Kept(since=frozenset(since), until=frozenset(until), frames=frames)


def _windows(
    prefix: Sequence[Access], trace: Sequence[Access], resident: frozenset[int], streaming: int
) -> tuple[int, ...]:
    """Return c(i) for every position i of the prefix and one turn of the trace. [Note: the window]"""
    length = len(trace)
    accesses = (*prefix, *trace, *trace)
    inside: Counter[int] = Counter()
    reach: list[int] = []
    cursor = -1
    for position in range(len(prefix) + length):
        while cursor + 1 < position + length:
            entering = {use.page for use in accesses[cursor + 1] if use.page not in resident}
            if len(inside) + sum(page not in inside for page in entering) > streaming:
                break
            cursor += 1
            inside.update(entering)
        reach.append(cursor)
        for page in {use.page for use in accesses[position] if use.page not in resident}:
            inside[page] -= 1
            if not inside[page]:
                del inside[page]
    return tuple(reach)


def predict(
    trace: Sequence[Access], reach: Sequence[int], resident: frozenset[int], kept: Kept, layout: Layout
) -> Traffic:
    """Return the bytes of one steady step of a plan."""
    read = dict.fromkeys(Role, 0)
    written = dict.fromkeys(Role, 0)
    for page, (reads, writes) in _transfers(trace, reach, resident, kept).items():
        role, nbytes = layout.pages[page].role, layout.pages[page].nbytes
        read[role] += reads * nbytes
        written[role] += writes * nbytes
    return Traffic(read=read, written=written)


def _moves(trace: Sequence[Access], reach: Sequence[int], resident: frozenset[int], kept: Kept) -> Moves:
    """Return what one steady step moves."""
    length = len(trace)
    uses: dict[int, list[tuple[int, Mode]]] = {}
    for position, access in enumerate(trace):
        for use in access:
            if use.page not in resident:
                uses.setdefault(use.page, []).append((position, use.mode))
    entering: list[list[tuple[int, bool]]] = [[] for _ in trace]
    leaving: list[list[tuple[int, bool]]] = [[] for _ in trace]
    staying: set[int] = set()
    for page, used in uses.items():
        # Whether the page is still in the window, or kept, when its next use comes.
        stays = [
            (used[(k + 1) % len(used)][0] + (length if k + 1 == len(used) else 0))
            <= _reach_after(position, reach, length)
            or (position, page) in kept.since
            for k, (position, _) in enumerate(used)
        ]
        if all(stays):
            staying.add(page)
            continue
        modified = False
        start = stays.index(False) + 1  # behind a use after which the page leaves
        for k in (*range(start, len(used)), *range(start)):
            position, mode = used[k]
            if not stays[k - 1]:
                entering[position].append((page, mode.fetches))
            modified = mode.modifies or (modified and mode is not Mode.CONSUME)
            if not stays[k]:
                leaving[position].append((page, modified))
                modified = False
    return Moves(entering=entering, leaving=leaving, staying=frozenset(staying))


def _transfers(
    trace: Sequence[Access], reach: Sequence[int], resident: frozenset[int], kept: Kept
) -> dict[int, tuple[int, int]]:
    """Return how often each page that is not resident is read and written in one steady step."""
    moves = _moves(trace, reach, resident, kept)
    reads, writes = (
        Counter(page for moved in places for page, transferred in moved if transferred)
        for places in (moves.entering, moves.leaving)
    )
    moving = {page for entering in moves.entering for page, _ in entering}
    return {page: (reads[page], writes[page]) for page in moves.staying | moving}


def _reach_after(position: int, reach: Sequence[int], length: int) -> int:
    """Return the last position whose pages are in memory once `position` is done: the window of the next one."""
    return reach[position + 1] if position + 1 < length else reach[0] + length
