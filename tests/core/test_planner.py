"""The planner, against a walk of its own plan that shares no code with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from core_layouts import layouts, steps, transformer, transformer_step
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.layout import Layout, Role
from infinity.schedule.planner import Plan, least_frames, make_plan
from infinity.schedule.trace import Access, Mode, Placement, eligible_for_backward, expand

KIB = 1 << 10
CYCLES = 5
STEADY = 3


@dataclass
class Walk:
    """What happened when a plan was walked, access by access; bytes by cycle."""

    most_frames: int = 0
    read: list[int] = field(default_factory=lambda: [0] * CYCLES)
    written: list[int] = field(default_factory=lambda: [0] * CYCLES)
    unfetched: list[tuple[int, int]] = field(default_factory=list)


def window(trace: Sequence[Access], resident: frozenset[int], streaming: int, position: int) -> list[int]:
    """Return the positions (unwrapped) ahead whose distinct pages fit the streaming frames: the discipline in words."""
    inside: set[int] = set()
    found = []
    for ahead in range(position, position + len(trace)):
        inside |= {use.page for use in trace[ahead % len(trace)]} - resident
        if len(inside) > streaming:
            break
        found.append(ahead)
    return found


def walk(plan: Plan, layout: Layout) -> Walk:
    """Walk some cycles from a cold start: a page is in memory while it is kept, or a use of it lies in the window."""
    trace, seen = plan.trace, Walk()
    waiting: set[int] = set()  # kept since a use that is over
    held: dict[int, bool] = {}  # page -> modified since its last write
    kept: dict[int, bool] = {}  # resident pages; never written in a steady step
    for position in range(CYCLES * len(trace)):
        cycle = position // len(trace)
        ahead = window(trace, plan.resident, plan.streaming_frames, position)
        wanted: dict[int, Mode] = {}
        for place in ahead:
            for use in trace[place % len(trace)]:
                if use.page not in plan.resident:
                    wanted.setdefault(use.page, use.mode)
        for page in [page for page in held if page not in wanted and page not in waiting]:
            if held.pop(page):
                seen.written[cycle] += layout.pages[page].nbytes
        for page, mode in wanted.items():
            if page not in held:
                held[page] = False
                if mode is not Mode.WRITE:
                    seen.read[cycle] += layout.pages[page].nbytes
        seen.most_frames = max(seen.most_frames, len(held) + len(plan.resident))
        for page, mode in trace[position % len(trace)]:
            frames = kept if page in plan.resident else held
            if frames is kept:
                kept.setdefault(page, False)
            if page not in frames:
                seen.unfetched.append((position, page))
                continue
            if mode in (Mode.WRITE, Mode.UPDATE):
                frames[page] = True
            elif mode is Mode.CONSUME:
                frames[page] = False
            waiting.discard(page)
            if (position % len(trace), page) in plan.kept.since:
                waiting.add(page)
    return seen


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Layout]:
    """Draw a layout, a step, a placement and an arena; plan it."""
    layout = draw(layouts(most=120_000))
    events = draw(steps(layout))
    in_backward = draw(st.booleans())
    placement = Placement(in_backward=eligible_for_backward(events)) if in_backward else Placement()
    trace = expand(events, layout, placement)
    assume(trace)
    least = least_frames(max(len(access) for access in trace))
    used = len({use.page for access in trace for use in access})
    frames = draw(st.integers(least, max(least, used)))  # mostly fewer than the pages
    return make_plan(trace, layout, frames), layout


@given(plans())
def test_a_plan_stays_within_its_frames(drawn: tuple[Plan, Layout]) -> None:
    """Resident pages, the window and the frames for writing fit the arena; no use finds its page missing."""
    plan, layout = drawn
    seen = walk(plan, layout) if plan.streaming_frames else None
    assert len(plan.resident) + plan.streaming_frames + plan.kept.frames + plan.writing_frames <= plan.frames
    assert len(plan.kept.since) == len(plan.kept.until)
    if seen is not None:
        assert seen.most_frames + plan.writing_frames <= plan.frames
        assert seen.unfetched == []
        assert plan.writing_frames >= 1


@given(plans())
def test_predicted_bytes_are_those_of_the_walk(drawn: tuple[Plan, Layout]) -> None:
    """In a steady step, byte for byte."""
    plan, layout = drawn
    if not plan.streaming_frames:
        assert plan.traffic.read_bytes == plan.traffic.written_bytes == 0
        return
    seen = walk(plan, layout)
    assert seen.read[STEADY] == plan.traffic.read_bytes
    assert seen.written[STEADY] == plan.traffic.written_bytes


@given(plans())
def test_the_reach_is_the_window(drawn: tuple[Plan, Layout]) -> None:
    """c(i) of the plan is the last position of the window, and covers the access itself."""
    plan, _ = drawn
    if plan.streaming_frames:
        ends = [
            window(plan.trace, plan.resident, plan.streaming_frames, position)[-1]
            for position in range(len(plan.trace))
        ]
        assert list(plan.reach) == ends


@given(plans())
def test_with_everything_in_the_arena_nothing_moves(drawn: tuple[Plan, Layout]) -> None:
    """As many frames as pages: no bytes at all."""
    plan, layout = drawn
    used = {use.page for access in plan.trace for use in access}
    whole = make_plan(plan.trace, layout, len(used))
    assert whole.resident == used
    assert whole.traffic.read_bytes == whole.traffic.written_bytes == 0


@given(plans())
def test_more_frames_never_cost_bytes(drawn: tuple[Plan, Layout]) -> None:
    """Twice the arena moves no more than the arena."""
    plan, layout = drawn
    twice = make_plan(plan.trace, layout, 2 * plan.frames)
    assert twice.traffic.read_bytes <= plan.traffic.read_bytes
    assert twice.traffic.written_bytes <= plan.traffic.written_bytes


@given(plans())
def test_too_few_frames_are_refused(drawn: tuple[Plan, Layout]) -> None:
    """One frame less than the least is an error that names the setting."""
    plan, layout = drawn
    used = {use.page for access in plan.trace for use in access}
    least = least_frames(max(len(access) for access in plan.trace))
    assume(len(used) >= least)
    with pytest.raises(BudgetError, match=r"memory\.host_bytes"):
        make_plan(plan.trace, layout, least - 1)


LAYERS, ELEMENTS, PAGE = 12, 16 * 5 * 1024, 64 * KIB


@pytest.mark.parametrize("key", ["mixed", "split", "8bit"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 0.95])
def test_a_transformer_reaches_the_closed_form(share: float, key: str) -> None:
    """Reads (2N - C)+ + (SN - C)+ and writes (SN - C)+, up to the frames that stream or keep one unit's weights."""
    layout = transformer(LAYERS, ELEMENTS, PAGE, key)
    events = transformer_step(LAYERS)
    trace = expand(events, layout, Placement(in_backward=eligible_for_backward(events)))
    streams = 24
    frames = streams + int(share * len(layout.pages))
    plan = make_plan(trace, layout, frames)
    weights, state = layout.bytes_of(Role.PARAM), layout.state_bytes
    cached = sum(layout.pages[page].nbytes for page in plan.resident)
    reserve = (plan.streaming_frames + plan.kept.frames + plan.writing_frames + 2) * PAGE
    assert plan.kept.frames <= len(layout.segments[0].param_pages)

    def law(cache: int) -> tuple[int, int]:
        return max(0, weights - cache) + max(0, state - cache), max(0, state - cache)

    read, written = plan.traffic.read_bytes, plan.traffic.written_bytes
    assert read <= law(cached)[0]
    assert written <= law(cached)[1]
    assert read >= law(cached)[0] - 2 * reserve
    assert written >= law(cached)[1] - reserve


def test_weights_are_kept_first() -> None:
    """A resident weight byte saves three transfers, any other byte two."""
    layout = transformer(LAYERS, ELEMENTS, PAGE)
    events = transformer_step(LAYERS)
    trace = expand(events, layout, Placement(in_backward=eligible_for_backward(events)))
    plan = make_plan(trace, layout, 40)
    assert plan.resident
    assert {layout.pages[page].role for page in plan.resident} == {Role.PARAM}


def test_a_unit_that_is_used_again_is_not_updated_in_backward() -> None:
    """Its weights would change while they are still needed, or its gradient be incomplete."""
    events = transformer_step(3)
    gather_again = (*events[:-1], events[0], events[-1])
    assert eligible_for_backward(events) == {0, 1, 2}
    assert eligible_for_backward(gather_again) == {1, 2}
    twice = (*events[:-1], *events)
    assert eligible_for_backward(twice) == frozenset()
