"""Where in a step FSDP modules are updated, and what the pager sees of a step for a choice of that."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.content.layout import Layout
from infinity.schedule.trace import (
    Access,
    Event,
    EventKind,
    gather_accesses,
    store_gradient_accesses,
    stored_components,
    update_accesses,
    update_order,
)


@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """Where FSDP modules are updated:

    in backward, ahead of their use in the next forward, or in `step()`; immutable.
    """

    in_backward: frozenset[int] = frozenset()
    """FSDP modules that are updated in backward."""
    in_forward: frozenset[int] = frozenset()
    """FSDP modules that are updated in the next forward; those that are in neither are updated in `step()`."""
    overlapped: bool = True
    """Whether updates run beside the computation of another FSDP module. In backward, an FSDP module is updated when
    the next one has
    been gathered; in forward, when the one before it has been gathered (the first FSDP module is updated in `step()`).
    Else a
    FSDP module is updated as soon as its gradients are there, or just before it is gathered: that needs fewer cache
    slots."""
    prefetched: bool = False
    """Whether the pages of an FSDP module are read behind the gather before its own, and copied to the device from
    there; but
    for the first gather of a step."""
    kept: frozenset[int] = frozenset()
    """FSDP modules whose weights stay on the device from their first gather that is staged until the step ends, or they
    are
    updated."""
    gpu_resident: frozenset[int] = frozenset()
    """FSDP modules that live on the device, weights and all of their state: nothing of them is paged."""

    @classmethod
    def of(cls, name: str, events: Sequence[Event], *, forward: bool = True) -> UpdateSchedule:
        """Return the update schedule of a setting, for a step that looks like `events`.

        What cannot be updated in backward is updated in the next forward, or, without `forward`, in `step()`.
        """
        if name == "after_backward":
            return cls()
        early = eligible_for_backward(events) if name == "in_backward" else frozenset()
        gathered, trained = (
            {event.fsdp_module for event in events if event.kind is kind}
            for kind in (EventKind.GATHER, EventKind.GRADIENTS)
        )
        return cls(in_backward=early, in_forward=frozenset(gathered & trained - early) if forward else frozenset())

    def due(self, events: Iterable[Event]) -> dict[int, int]:
        """Return which FSDP module is to be updated when an FSDP module is first gathered;

        those updated in `step()` are not there.
        """
        order = tuple(dict.fromkeys(event.fsdp_module for event in events if event.kind is EventKind.GATHER))
        pairs = itertools.pairwise(order) if self.overlapped else zip(order, order, strict=True)
        return {gathered: fsdp_module for gathered, fsdp_module in pairs if fsdp_module in self.in_forward}


def eligible_for_backward(events: Sequence[Event]) -> frozenset[int]:
    """Return the FSDP modules whose gradients arrive once per step, with no use of the weights after that.

    Updating any other FSDP module in backward would change weights that are still to be used in this step, or would
    miss a part of the gradient.
    """
    arrivals = Counter(event.fsdp_module for event in events if event.kind is EventKind.GRADIENTS)
    once = {fsdp_module for fsdp_module, count in arrivals.items() if count == 1}
    seen: set[int] = set()
    for event in events:
        if event.kind is EventKind.GRADIENTS:
            seen.add(event.fsdp_module)
        elif event.kind is EventKind.GATHER and event.fsdp_module in seen:
            once.discard(event.fsdp_module)
    return frozenset(once)


def next_gather(events: Sequence[Event], position: int) -> int:
    """Return the position of the gather that comes behind a position in the same step, or -1."""
    for index in range(position + 1, len(events)):
        if events[index].kind is EventKind.GATHER:
            return index
    return -1


class Expansion(NamedTuple):
    """The accesses of one step, and which event each belongs to."""

    accesses: tuple[Access, ...]
    """In the order in which their places in the plan are taken."""
    starts: tuple[int, ...]
    """By event, the position of its first access; of an event without any, that of the next access."""
    prefetched: frozenset[int]
    """Positions of accesses that copy weights to the device ahead of their gather."""
    awaited: frozenset[int]
    """Gathers, by their number among the events, of weights that have been copied so, or that have stayed there."""


def expand(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> tuple[Access, ...]:
    """Return the accesses of one step; see `expand_events`."""
    return expand_events(events, layout, update_schedule, pending=pending).accesses


def expand_events(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> Expansion:
    """Return the accesses of one step, by event: but for those of FSDP modules that are GPU-resident.

    Args:
        events: one step, ending with STEP.
        layout: pages of this rank.
        update schedule: where updates run.
        pending: whether the FSDP modules that are updated in forward come with gradients of the step before.
    """
    accesses: list[Access] = []
    starts: list[int] = []
    prefetched: set[int] = set()
    awaited: set[int] = set()
    arrived: dict[int, int] = {}  # FSDP module -> components of its gradient that are stored
    components = stored_components(events)
    due = update_schedule.due(events)
    later = set(due.values())
    waiting = dict(due) if pending else {}
    reduced: list[int] = []  # to be updated in backward, behind the next gather
    there: set[int] = set()  # FSDP modules whose weights are on the device, or on their way

    def add(fsdp_module: int, found: Iterable[Access]) -> None:
        if fsdp_module not in update_schedule.gpu_resident:  # nothing of those is paged
            accesses.extend(found)

    def update_reduced() -> None:
        for fsdp_module in reduced:
            there.discard(fsdp_module)
            add(fsdp_module, update_accesses(layout, fsdp_module))
        reduced.clear()

    def update_waiting(gathered: int) -> None:
        fsdp_module = waiting.pop(gathered, None)
        if fsdp_module is not None:
            there.discard(fsdp_module)
            add(fsdp_module, update_accesses(layout, fsdp_module, components=components.get(fsdp_module, 1)))

    for position, event in enumerate(events):
        starts.append(len(accesses))
        if event.kind is EventKind.GATHER:
            if not update_schedule.overlapped:
                update_waiting(event.fsdp_module)
            if event.fsdp_module in there:
                awaited.add(position)
            else:
                add(event.fsdp_module, gather_accesses(layout, event.fsdp_module))
            if event.fsdp_module not in update_schedule.kept:
                there.discard(event.fsdp_module)
            update_reduced()
            update_waiting(event.fsdp_module)
            following = next_gather(events, position) if update_schedule.prefetched else -1
            if (
                following >= 0
                and (fsdp_module := events[following].fsdp_module) not in there | update_schedule.gpu_resident
            ):
                for gathered in [gathered for gathered, of in waiting.items() if of == fsdp_module]:
                    update_waiting(gathered)
                begin = len(accesses)
                accesses.extend(gather_accesses(layout, fsdp_module))
                prefetched.update(range(begin, len(accesses)))
                there.add(fsdp_module)
        elif event.kind is EventKind.GRADIENTS:
            update_reduced()
            if event.fsdp_module in update_schedule.in_backward:
                reduced.append(event.fsdp_module)
                if not update_schedule.overlapped:
                    update_reduced()
            else:
                stored = arrived.pop(event.fsdp_module, 0)
                arrived[event.fsdp_module] = event.components  # at the end: arrival order
                found = store_gradient_accesses(layout, event.fsdp_module, stored=stored, components=event.components)
                add(event.fsdp_module, found)
        else:
            update_reduced()
            for fsdp_module in update_order(arrived):
                if fsdp_module not in later:
                    add(fsdp_module, update_accesses(layout, fsdp_module, components=arrived[fsdp_module]))
    return Expansion(tuple(accesses), tuple(starts), frozenset(prefetched), frozenset(awaited))


def expand_pending(events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule) -> tuple[Access, ...]:
    """Return the accesses of all updates that wait for the next forward, when they are not to wait any longer."""
    components = stored_components(events)
    return tuple(
        access
        for fsdp_module in update_schedule.due(events).values()
        if fsdp_module not in update_schedule.gpu_resident
        for access in update_accesses(layout, fsdp_module, components=components[fsdp_module])
    )
