"""Choice of the update schedule and the plan for a step. Pure, like the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinity.content.layout import Layout
from infinity.schedule.planner import Simulation, make_simulation, preferred
from infinity.schedule.tier import with_device
from infinity.schedule.timing import staged_computation
from infinity.schedule.trace import Access, Event
from infinity.schedule.update_schedule import UpdateSchedule, eligible_for_backward, expand_events


def resolve_schedule(wanted: str, events: Sequence[Event], *, late: bool = False, exchanges: bool = False) -> str:
    """Return the name of the update schedule for a step, which is a value of `update.schedule` other than ``auto``.

    Args:
        wanted: value of `update.schedule`. Both ``in_backward`` and ``auto`` select updates in backward only if the
            step allows them.
        late: whether updates in backward would be too early, because all gradients or the old weights are needed until
            `step()`.
    """
    if wanted in ("in_forward", "after_backward"):
        return wanted
    if not late and eligible_for_backward(events):
        return "in_backward"
    return "after_backward" if exchanges else "in_forward"


def choose_simulation(
    name: str,
    events: Sequence[Event],
    layout: Layout,
    cache_slots: int,
    *,
    threaded: bool,
    device_bytes: int = 0,
    update_on_device: bool = False,
    exchanges: bool = False,
) -> tuple[UpdateSchedule, Simulation]:
    """Return the best update schedule for a step, and the simulation of the corresponding plan.

    Args:
        name: name of an update schedule, as returned by `resolve_schedule`.
        device_bytes: device memory, in bytes, for the GPU prefetch buffer, for weights that stay on the device, and for
            GPU-resident FSDP modules. 0 on the CPU.

    Raises:
        BudgetError: if there are too few cache slots.
    """
    # Updates can overlap computation only if they run on their own thread.
    found: dict[tuple[Access, ...], tuple[UpdateSchedule, Simulation]] = {}  # by trace
    host_bytes = cache_slots * layout.page_bytes
    for overlapped in (True, False) if threaded and not exchanges else (False,):
        choice = replace(UpdateSchedule.of(name, events, forward=not exchanges), overlapped=overlapped)
        choice = with_device(
            choice, events, layout, device_bytes, host_bytes=host_bytes, update_on_device=update_on_device
        )
        expansion = expand_events(events, layout, choice)
        trace = expansion.accesses
        if trace not in found:
            staged = staged_computation(events, layout, choice, expansion)
            simulation = make_simulation(trace, layout, cache_slots, threaded=threaded, prefetched=staged)
            found[trace] = choice, simulation
    simulation = preferred([simulation for _, simulation in found.values()])
    return found[simulation.plan.trace][0], simulation
