"""Plans, and a Hypothesis strategy for them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from infinity.content.layout import Layout
from infinity.schedule.planner import Plan, least_cache_slots, make_simulation, prepend
from infinity.schedule.trace import Access
from infinity.schedule.update_schedule import expand, expand_pending
from support.layouts import layouts, steps, update_schedules


def make_plan(trace: Sequence[Access], layout: Layout, cache_slots: int, *, threaded: bool = False) -> Plan:
    """Return the planner's plan for the accesses of a step."""
    return make_simulation(trace, layout, cache_slots, threaded=threaded).plan


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Layout]:
    """Draw a layout, a step, an update schedule, a prefix and a number of cache slots; return plan and layout."""
    layout = draw(layouts(most=120_000))
    events = draw(steps(layout))
    update_schedule = draw(update_schedules(layout, events))
    trace = expand(events, layout, update_schedule)
    assume(trace)
    before = draw(st.sampled_from(["pending", "nothing", "flushing"]))  # the cases that occur in the optimizer
    prefix = expand_pending(events, layout, update_schedule) if before == "flushing" else ()
    if before != "pending":
        prefix += expand(events, layout, update_schedule, pending=False)
    least = least_cache_slots(max(len(access) for access in trace))
    used = len({use.page for access in trace for use in access})
    cache_slots = draw(st.integers(least, max(least, used)))  # usually fewer than pages
    return prepend(prefix, make_plan(trace, layout, cache_slots), layout), layout
