"""Random plans."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from infinity.content.layout import Layout
from infinity.schedule.placement import expand, expand_pending
from infinity.schedule.planner import Plan, least_frames, make_plan, prepend
from support.layouts import layouts, placements, steps


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Layout]:
    """Draw a layout, a step, a placement, what comes before the first such step, and an arena; plan it."""
    layout = draw(layouts(most=120_000))
    events = draw(steps(layout))
    placement = draw(placements(layout, events))
    trace = expand(events, layout, placement)
    assume(trace)
    before = draw(st.sampled_from(["pending", "nothing", "settling"]))  # as the optimizer does it
    prefix = expand_pending(events, layout, placement) if before == "settling" else ()
    if before != "pending":
        prefix += expand(events, layout, placement, pending=False)
    least = least_frames(max(len(access) for access in trace))
    used = len({use.page for access in trace for use in access})
    frames = draw(st.integers(least, max(least, used)))  # mostly fewer than the pages
    return prepend(prefix, make_plan(trace, layout, frames), layout), layout
