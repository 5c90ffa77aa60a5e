"""Update schedules, which determine when in a step each FSDP module is updated, and the resulting accesses of
the step.
"""

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
    """Immutable choice of the phase in which each FSDP module is updated: backward, the next forward, or `step()`."""

    in_backward: frozenset[int] = frozenset()
    """FSDP modules that are updated in backward."""
    in_forward: frozenset[int] = frozenset()
    """FSDP modules that are updated in the next forward, before their weights are used. FSDP modules that are in
    neither `in_backward` nor `in_forward` are updated in `step()`.
    """
    overlapped: bool = True
    """``True`` if updates overlap the computation of another FSDP module. In this case, an FSDP module is updated in
    backward when the next module has been gathered, or in forward when the previous module has been gathered (the first
    FSDP module is updated in `step()`). Otherwise an FSDP module is updated in backward as soon as its gradients have
    arrived, or in forward just before it is gathered, which needs fewer cache slots.
    """
    prefetched: bool = False
    """``True`` if weights are prefetched to the GPU. After each gather, the pages of the FSDP module that is gathered
    next are read and copied to the device. The weights for the first gather of a step are not prefetched.
    """
    kept: frozenset[int] = frozenset()
    """FSDP modules whose weights stay on the device from their first prefetch in a step until they are updated or the
    step ends.
    """
    gpu_resident: frozenset[int] = frozenset()
    """FSDP modules whose weights and optimizer state are stored entirely on the device. They are not paged."""

    @classmethod
    def of(cls, name: str, events: Sequence[Event], *, forward: bool = True) -> UpdateSchedule:
        """Return the update schedule for a step, given the name of a schedule.

        FSDP modules that cannot be updated in backward are updated in the next forward or, if `forward` is ``False``,
        in `step()`.

        Args:
            name: ``in_backward``, ``in_forward`` or ``after_backward``.
            forward: whether updates may run in the next forward.
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
        """Return which FSDP module to update when another one is first gathered in forward.

        The keys are gathered FSDP modules, and the values are FSDP modules in `in_forward`. Without overlap, the two
        are equal.
        """
        order = tuple(dict.fromkeys(event.fsdp_module for event in events if event.kind is EventKind.GATHER))
        pairs = itertools.pairwise(order) if self.overlapped else zip(order, order, strict=True)
        return {gathered: fsdp_module for gathered, fsdp_module in pairs if fsdp_module in self.in_forward}


def eligible_for_backward(events: Sequence[Event]) -> frozenset[int]:
    """Return the FSDP modules that can be updated in backward.

    These are the FSDP modules whose gradients arrive once per step and whose weights the step does not use afterwards.
    Updating any other FSDP module in backward would change weights that the step still uses, or would miss a part of
    the gradient.
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
    """Return the position of the first gather after `position`, or -1 if the step contains no further gather."""
    for index in range(position + 1, len(events)):
        if events[index].kind is EventKind.GATHER:
            return index
    return -1


class Expansion(NamedTuple):
    """Accesses of one step, and their relation to the events of the step."""

    accesses: tuple[Access, ...]
    """Accesses of the step, in the order of their positions in the plan."""
    starts: tuple[int, ...]
    """For each event, the position of its first access. For an event without accesses, the position of the
    next access.
    """
    prefetched: frozenset[int]
    """Positions of accesses that copy weights to the device before their gather."""
    awaited: frozenset[int]
    """Indices of the gather events whose weights have been prefetched or have stayed on the device."""


def expand(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> tuple[Access, ...]:
    """Return only the accesses of one step. See `expand_events`."""
    return expand_events(events, layout, update_schedule, pending=pending).accesses


def expand_events(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> Expansion:
    """Return the accesses of one step, with the events that cause them. GPU-resident FSDP modules have no accesses.

    Args:
        pending: whether the updates in forward have gradients from a previous step to apply.
    """
    accesses: list[Access] = []
    starts: list[int] = []
    prefetched: set[int] = set()
    awaited: set[int] = set()
    arrived: dict[int, int] = {}  # FSDP module -> number of stored components of its gradient
    components = stored_components(events)
    due = update_schedule.due(events)
    later = set(due.values())
    waiting = dict(due) if pending else {}
    reduced: list[int] = []  # FSDP modules to update in backward, after the next gather
    there: set[int] = set()  # FSDP modules whose weights are on the device or being copied to it

    def add(fsdp_module: int, found: Iterable[Access]) -> None:
        if fsdp_module not in update_schedule.gpu_resident:  # GPU-resident FSDP modules are not paged
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
                # A pending update must precede the prefetch to the GPU. Otherwise forward would use the weights of the
                # previous step.
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
                arrived[event.fsdp_module] = event.components  # moves to the end: `arrived` is in order of arrival
                found = store_gradient_accesses(layout, event.fsdp_module, stored=stored, components=event.components)
                add(event.fsdp_module, found)
        else:
            update_reduced()
            for fsdp_module in update_order(arrived):
                if fsdp_module not in later:
                    add(fsdp_module, update_accesses(layout, fsdp_module, components=arrived[fsdp_module]))
    return Expansion(tuple(accesses), tuple(starts), frozenset(prefetched), frozenset(awaited))


def expand_pending(events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule) -> tuple[Access, ...]:
    """Return the accesses for running all updates immediately that are otherwise deferred to the next forward.

    The gradients have been stored by a step with the given events.
    """
    components = stored_components(events)
    return tuple(
        access
        for fsdp_module in update_schedule.due(events).values()
        if fsdp_module not in update_schedule.gpu_resident
        for access in update_accesses(layout, fsdp_module, components=components[fsdp_module])
    )
