"""Tests of the planner against an independent walk of its plans, closed-form traffic, and an exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import BudgetError
from infinity.schedule.planner import LEAST_WRITING, Plan, least_cache_slots, prepend
from infinity.schedule.trace import Access, Event, Mode
from infinity.schedule.update_schedule import UpdateSchedule, eligible_for_backward, expand
from support.layouts import transformer, transformer_step, update_schedules
from support.plans import make_plan, plans
from support.tables import alternate

KIB = 1 << 10
CYCLES = 5
STEADY = 3


@dataclass
class Walk:
    """Result of walking a plan access by access; bytes are counted by cycle."""

    most_cache_slots: int = 0
    read: list[int] = field(default_factory=lambda: [0] * CYCLES)
    written: list[int] = field(default_factory=lambda: [0] * CYCLES)
    unfetched: list[tuple[int, int]] = field(default_factory=list)


def window(plan: Plan, position: int) -> list[int]:
    """Return the unwrapped positions ahead whose distinct pages fit the streaming cache slots."""
    inside: set[int] = set()
    found = []
    for ahead in range(position, position + len(plan.trace)):
        inside |= {use.page for use in plan.access(ahead)} - plan.resident
        if len(inside) > plan.streaming_cache_slots:
            break
        found.append(ahead)
    return found


def walk(plan: Plan, layout: Layout) -> Walk:
    """Walk the prefix and several cycles from an empty cache; a page is cached while kept or used within the window."""
    lead, seen = len(plan.prefix), Walk()
    kept_pages: set[int] = set()  # kept since an earlier use
    held: dict[int, bool] = {}  # page -> modified since its last write
    resident: dict[int, bool] = {}  # never written in a steady step
    for position in range(lead + CYCLES * len(plan.trace)):
        cycle = max(0, position - lead) // len(plan.trace)  # transfers of the prefix count in the first cycle
        wanted: dict[int, Mode] = {}
        for place in window(plan, position):
            for use in plan.access(place):
                if use.page not in plan.resident:
                    wanted.setdefault(use.page, use.mode)
        for page in [page for page in held if page not in wanted and page not in kept_pages]:
            if held.pop(page):
                seen.written[cycle] += layout.pages[page].nbytes
        for page, mode in wanted.items():
            if page not in held:
                held[page] = False
                if mode is not Mode.WRITE:
                    seen.read[cycle] += layout.pages[page].nbytes
        seen.most_cache_slots = max(seen.most_cache_slots, len(held) + len(plan.resident))
        for page, mode in plan.access(position):
            cache_slots = resident if page in plan.resident else held
            if cache_slots is resident:
                resident.setdefault(page, False)
            if page not in cache_slots:
                seen.unfetched.append((position, page))
                continue
            if mode in (Mode.WRITE, Mode.UPDATE):
                cache_slots[page] = True
            elif mode is Mode.CONSUME:
                cache_slots[page] = False
            kept_pages.discard(page)
            if page in plan.keeps(position):
                kept_pages.add(page)
    return seen


@settings(max_examples=40)
@given(plans())
def test_plan_fits_its_cache_slots_and_moves_the_predicted_bytes(drawn: tuple[Plan, Layout]) -> None:
    """Every used page is available, and a steady step matches exactly."""
    plan, layout = drawn
    staying = len(plan.resident) + plan.streaming_cache_slots + plan.kept_cache_slots
    assert staying <= plan.cache_slots
    if not plan.streaming_cache_slots:
        assert plan.traffic.read_bytes == plan.traffic.written_bytes == 0
        return
    seen = walk(plan, layout)
    assert seen.most_cache_slots <= staying <= plan.cache_slots - LEAST_WRITING
    assert seen.unfetched == []
    assert seen.read[STEADY] == plan.traffic.read_bytes
    assert seen.written[STEADY] == plan.traffic.written_bytes


@settings(max_examples=40)
@given(plans())
def test_reach_is_the_last_position_of_the_window(drawn: tuple[Plan, Layout]) -> None:
    """This holds in the prefix and in every cycle. With all pages in the host cache, the window ends with the second
    FSDP module after the first update in backward, or after one cycle.
    """
    plan, layout = drawn
    positions = range(len(plan.prefix) + 2 * len(plan.trace))
    if plan.streaming_cache_slots:
        assert [plan.reach_at(position) for position in positions] == [
            window(plan, position)[-1] for position in positions
        ]
    used = {use.page for access in plan.trace for use in access}
    plan = prepend(plan.prefix, make_plan(plan.trace, layout, len(used)), layout)
    for position in positions:
        changes = 0
        bounded = False
        last = position - 1
        while changes <= 2 and last + 1 < position + len(plan.trace):
            last += 1
            pages = [layout.pages[use.page] for use in plan.access(last)]
            modifies = any(use.mode.modifies for use in plan.access(last))
            bounded |= modifies and all(page.role is not Role.GRAD for page in pages)
            changes += bounded and layout.pages[plan.access(last + 1)[0].page].fsdp_module != pages[0].fsdp_module
        assert plan.reach_at(position) == last


@settings(max_examples=40)
@given(plans())
def test_larger_host_cache_never_moves_more_bytes(drawn: tuple[Plan, Layout]) -> None:
    """A host cache for all pages moves none, and one with too few cache slots raises an error."""
    plan, layout = drawn
    twice = make_plan(plan.trace, layout, 2 * plan.cache_slots)
    assert twice.traffic.read_bytes <= plan.traffic.read_bytes
    assert twice.traffic.written_bytes <= plan.traffic.written_bytes
    used = {use.page for access in plan.trace for use in access}
    full = make_plan(plan.trace, layout, len(used))
    assert full.resident == used
    assert full.traffic.read_bytes == full.traffic.written_bytes == 0
    least = least_cache_slots(max(len(access) for access in plan.trace))
    if len(used) >= least:
        with pytest.raises(BudgetError, match=r"memory\.host_bytes"):
            make_plan(plan.trace, layout, least - 1)


LAYERS, ELEMENTS, PAGE = 12, 4 * 32 * 1024, 64 * KIB
"""A layer fills four pages of weights, eight pages of gradients, and 26 pages of master and moments."""
TRANSFERS = {
    "in_backward": ({Role.PARAM: 2, Role.UPDATE: 1, Role.GRAD: 0}, {Role.PARAM: 1, Role.UPDATE: 1, Role.GRAD: 0}),
    "in_forward": ({Role.PARAM: 1, Role.UPDATE: 1, Role.GRAD: 1}, {Role.PARAM: 1, Role.UPDATE: 1, Role.GRAD: 1}),
    "after_backward": ({Role.PARAM: 2, Role.UPDATE: 1, Role.GRAD: 1}, {Role.PARAM: 1, Role.UPDATE: 1, Role.GRAD: 1}),
}
"""Number of times that a non-resident byte is read and written per step, by role."""


def bytes_reused_within_the_window(
    plan: Plan, layout: Layout, events: Sequence[Event], update_schedule: UpdateSchedule, role: Role
) -> int:
    """Return the bytes of a role that are used again within the window where a step changes direction."""
    ends = [len(expand(events[: number + 1], layout, update_schedule)) for number in range(len(events))]
    event_of = [number for number, end in enumerate(ends) for _ in range(end - (ends[number - 1] if number else 0))]
    streams = [frozenset(use.page for use in access) - plan.resident for access in plan.trace] * 2
    last: dict[int, int] = {}
    found = 0
    for position, access in enumerate(plan.trace * 2):
        event = event_of[position % len(plan.trace)]
        for page, mode in access:
            before = last.get(page, -1)
            last[page] = position
            if page in plan.resident or layout.pages[page].role is not role or mode is Mode.WRITE:
                continue
            if position >= len(plan.trace):
                here = len(frozenset().union(*streams[before + 1 : position + 1])) <= plan.streaming_cache_slots
                again = before >= len(plan.trace) and event_of[before - len(plan.trace)] == event
                found += (here and not again) * layout.pages[page].nbytes
    return found


@pytest.mark.parametrize(("share", "update_schedule"), alternate([0.1, 0.25, 0.5, 0.75, 0.9], TRANSFERS))
def test_transformer_traffic_matches_the_closed_form(share: float, update_schedule: str) -> None:
    """Resident bytes save all of their transfers and bytes reused within the window save one, to within one page."""
    layout = transformer(LAYERS, ELEMENTS, PAGE)
    events = transformer_step(LAYERS)
    schedule = replace(
        UpdateSchedule.of(update_schedule, events), overlapped=False
    )  # overlapping costs bytes where cache slots are few
    plan = make_plan(expand(events, layout, schedule), layout, int(share * layout.state_bytes) // PAGE)
    for role in TRANSFERS[update_schedule][0]:
        moving = sum(page.nbytes for page in layout.pages if page.role is role and page.index not in plan.resident)
        read, written = (transfers[role] * moving for transfers in TRANSFERS[update_schedule])
        saved = bytes_reused_within_the_window(plan, layout, events, schedule, role)
        assert saved <= 2 * plan.streaming_cache_slots * PAGE
        assert abs(plan.traffic.read[role] - (read - saved)) <= PAGE, role
        if role is Role.GRAD:  # consumed before they are ever written
            written -= saved
        assert abs(plan.traffic.written[role] - written) <= PAGE, role


@st.composite
def small_steps(draw: st.DrawFn) -> tuple[Layout, tuple[Access, ...]]:
    """Draw a transformer with few pages and the accesses of its step. With five layers, the optimum takes minutes."""
    layers = 4
    layout = transformer(
        layers, 1024 * draw(st.sampled_from([1, 4, 5])), PAGE, draw(st.sampled_from(["mixed", "plain"]))
    )
    events = transformer_step(layers)
    return layout, expand(events, layout, draw(update_schedules(layout, events)))


def residences(trace: Sequence[Access], page: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (transfers, occupied cache slots by position) for every way to keep or evict a page after each use."""
    uses = [(position, mode) for position, access in enumerate(trace) for p, mode in access if p == page]
    found = []
    for kept in product((False, True), repeat=len(uses)):
        occupied = [0] * len(trace)
        transfers = 0
        dirty = False
        for cycle in (0, 1):  # the first cycle determines which pages are dirty when a step begins
            for number, (position, mode) in enumerate(uses):
                transfers += cycle and mode.fetches and not kept[number - 1]
                dirty = (dirty or mode.modifies) and mode is not Mode.CONSUME
                again = uses[(number + 1) % len(uses)][0] + len(trace) * (number + 1 == len(uses))
                for place in range(position, again + 1 if kept[number] else position + 1):
                    occupied[place % len(trace)] = 1
                transfers += cycle and dirty and not kept[number]
                dirty = dirty and kept[number]
        found.append((transfers, tuple(occupied)))
    return found


def optimum(trace: Sequence[Access], layout: Layout, cache_slots: int) -> int:
    """Return the exact minimum of bytes per step over all replacement strategies, by dynamic programming."""
    pages = sorted({use.page for access in trace for use in access})
    ways = {page: residences(trace, page) for page in pages}
    needed = {page: tuple(map(min, zip(*(row for _, row in ways[page]), strict=True))) for page in pages}
    costs = {tuple([0] * len(trace)): 0}
    for done, page in enumerate(pages, start=1):
        room = [cache_slots - sum(needed[later][place] for later in pages[done:]) for place in range(len(trace))]
        extended: dict[tuple[int, ...], int] = {}
        for taken, cost in costs.items():
            for transfers, row in ways[page]:
                both = tuple(a + b for a, b in zip(taken, row, strict=True))
                if all(a <= b for a, b in zip(both, room, strict=True)):
                    new = cost + transfers * layout.pages[page].nbytes
                    extended[both] = min(new, extended.get(both, new))
        costs = extended
    return min(costs.values())


@settings(max_examples=10, deadline=None)
@given(small_steps(), st.integers(0, 3))
def test_plan_is_optimal_without_its_reserve_slots(drawn: tuple[Layout, tuple[Access, ...]], more: int) -> None:
    """A plan moves no more than the optimum without the slots that it reserves for reading ahead and writing back."""
    layout, trace = drawn
    widest = max(len(access) for access in trace)
    plan = make_plan(trace, layout, least_cache_slots(widest) + more)
    assume(plan.streaming_cache_slots)
    cache_slots = len(plan.resident) + widest - 1
    assume(cache_slots >= widest)
    moved = plan.traffic.read_bytes + plan.traffic.written_bytes
    assert moved <= optimum(trace, layout, cache_slots)


@pytest.mark.parametrize(
    ("share", "key"), alternate([0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 0.95], ["mixed", "split", "8bit"])
)
def test_state_format_traffic_matches_the_closed_form(share: float, key: str) -> None:
    """Reads are (2N - C)+ + (SN - C)+ and writes (SN - C)+, less the savings of streaming slots and kept weights."""
    layers = 12
    layout = transformer(layers, 16 * 5 * 1024, PAGE, key)
    events = transformer_step(layers)
    trace = expand(events, layout, replace(UpdateSchedule.of("in_backward", events), overlapped=False))
    plan = make_plan(trace, layout, 24 + int(share * len(layout.pages)))
    weights, state = layout.bytes_of(Role.PARAM), layout.state_bytes
    cached = sum(layout.pages[page].nbytes for page in plan.resident)
    reserve = (plan.cache_slots - len(plan.resident) + 2) * PAGE
    assert plan.kept_cache_slots <= len(layout.segments[0].param_pages)

    def expected(cache: int) -> tuple[int, int]:
        return max(0, weights - cache) + max(0, state - cache), max(0, state - cache)

    read, written = plan.traffic.read_bytes, plan.traffic.written_bytes
    assert read <= expected(cached)[0] + PAGE
    assert written <= expected(cached)[1]
    assert read >= expected(cached)[0] - 2 * reserve
    assert written >= expected(cached)[1] - reserve


@pytest.mark.parametrize("key", ["plain", "8bit"])
def test_kept_pages_are_not_transferred_between_their_uses(key: str) -> None:
    """In a small host cache, updates in backward find the weights that the gather of the FSDP module has read."""
    layout, events = transformer(12, 16 * 5 * 1024, PAGE, key), transformer_step(12)
    plan = make_plan(expand(events, layout, UpdateSchedule.of("in_backward", events)), layout, 24)
    assert plan.kept_cache_slots
    seen = walk(plan, layout)
    assert seen.unfetched == []
    assert seen.read[STEADY] == plan.traffic.read_bytes
    assert seen.written[STEADY] == plan.traffic.written_bytes


def test_weights_are_resident_first() -> None:
    """A resident byte of weights saves three transfers; any other resident byte saves two."""
    layout = transformer(LAYERS, ELEMENTS, PAGE)
    events = transformer_step(LAYERS)
    trace = expand(events, layout, UpdateSchedule.of("in_backward", events))
    plan = make_plan(trace, layout, 60)
    assert plan.resident
    assert {layout.pages[page].role for page in plan.resident} == {Role.PARAM}


def test_reused_fsdp_module_is_not_updated_in_backward() -> None:
    """Its weights would change while they are still needed, or its gradient would be incomplete."""
    events = transformer_step(3)
    gather_again = (*events[:-1], events[0], events[-1])
    assert eligible_for_backward(events) == {0, 1, 2}
    assert eligible_for_backward(gather_again) == {1, 2}
    twice = (*events[:-1], *events)
    assert eligible_for_backward(twice) == frozenset()
