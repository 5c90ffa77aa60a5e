"""Which update schedule of updates and which plan a step gets. Pure, as the planner is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinity.content.layout import Layout
from infinity.schedule.planner import Plan, make_plan, preferred
from infinity.schedule.tier import with_device
from infinity.schedule.timing import staged_computation
from infinity.schedule.trace import Access, Event
from infinity.schedule.update_schedule import UpdateSchedule, eligible_for_backward, expand


def placed(wanted: str, events: Sequence[Event], *, late: bool = False, exchanges: bool = False) -> str:
    """Return where updates run: the name of an update schedule, as the setting `update.schedule` has it, but never
    ``auto``.

    Args:
        wanted: the setting. Updates in backward, wanted or by ``auto``, are possible only where the step allows them.
        events: one step.
        late: updates in backward would be too early: something needs all gradients, or weights, before `step()`.
        exchanges: whether ranks exchange what they have in updates; then none is left to the next forward.
    """
    if wanted in ("in_forward", "after_backward"):
        return wanted
    if not late and eligible_for_backward(events):
        return "in_backward"
    return "after_backward" if exchanges else "in_forward"


def choose_plan(
    name: str,
    events: Sequence[Event],
    layout: Layout,
    cache_slots: int,
    *,
    threaded: bool,
    device_bytes: int = 0,
    update_on_device: bool = False,
    exchanges: bool = False,
) -> tuple[UpdateSchedule, Plan]:
    """Return the update schedule and the plan of steps that look like `events`.

    Args:
        name: from `placed`.
        cache slots: of the host cache.
        threaded: whether updates have a thread of their own.
        device_bytes: memory of a device for weights ahead of their gather, for those that stay, and for FSDP modules
            that live
            there; 0 on the CPU.
        update_on_device: whether pages are updated there.
        exchanges: whether ranks exchange what they have in updates, which all run in the same order then: as soon as
            gradients are there, or in `step()`.

    Raises:
        BudgetError: there are too few cache slots.
    """
    # Updates beside computation are worth a try only where they have a thread.
    choices: dict[tuple[Access, ...], UpdateSchedule] = {}
    for overlapped in (True, False) if threaded and not exchanges else (False,):
        choice = replace(UpdateSchedule.of(name, events, forward=not exchanges), overlapped=overlapped)
        choice = with_device(
            choice,
            events,
            layout,
            device_bytes,
            host_bytes=cache_slots * layout.page_bytes,
            update_on_device=update_on_device,
        )
        choices.setdefault(expand(events, layout, choice), choice)
    plans = [
        make_plan(
            trace, layout, cache_slots, threaded=threaded, prefetched=staged_computation(events, layout, choices[trace])
        )
        for trace in choices
    ]
    plan = preferred(plans, layout, threaded=threaded)
    return choices[plan.trace], plan
