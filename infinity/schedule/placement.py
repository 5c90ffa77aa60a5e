"""Where in a step units are updated, and what the pager sees of a step for a choice of that."""

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
class Placement:
    """Where units are updated: in backward, ahead of their use in the next forward, or in `step()`; immutable."""

    in_backward: frozenset[int] = frozenset()
    """Units that are updated in backward."""
    in_forward: frozenset[int] = frozenset()
    """Units that are updated in the next forward; those that are in neither are updated in `step()`."""
    overlapped: bool = True
    """Whether updates run beside the computation of another unit. In backward, a unit is updated when the next one has
    been gathered; in forward, when the one before it has been gathered (the first unit is updated in `step()`). Else a
    unit is updated as soon as its gradients are there, or just before it is gathered: that needs fewer frames."""
    staged: bool = False
    """Whether the pages of a unit are read behind the gather before its own, and copied to the device from there; but
    for the first gather of a step."""
    kept: frozenset[int] = frozenset()
    """Units whose weights stay on the device from their first gather that is staged until the step ends, or they are
    updated."""
    at_home: frozenset[int] = frozenset()
    """Units that live on the device, weights and all of their state: nothing of them is paged."""

    @classmethod
    def of(cls, name: str, events: Sequence[Event], *, forward: bool = True) -> Placement:
        """Return the placement of a setting, for a step that looks like `events`.

        What cannot be updated in backward is updated in the next forward, or, without `forward`, in `step()`.
        """
        if name == "after_backward":
            return cls()
        early = eligible_for_backward(events) if name == "in_backward" else frozenset()
        gathered, trained = (
            {event.unit for event in events if event.kind is kind} for kind in (EventKind.GATHER, EventKind.GRADIENTS)
        )
        return cls(in_backward=early, in_forward=frozenset(gathered & trained - early) if forward else frozenset())

    def due(self, events: Iterable[Event]) -> dict[int, int]:
        """Return which unit is to be updated when a unit is first gathered; those updated in `step()` are not there."""
        order = tuple(dict.fromkeys(event.unit for event in events if event.kind is EventKind.GATHER))
        pairs = itertools.pairwise(order) if self.overlapped else zip(order, order, strict=True)
        return {gathered: unit for gathered, unit in pairs if unit in self.in_forward}


def eligible_for_backward(events: Sequence[Event]) -> frozenset[int]:
    """Return the units whose gradients arrive once per step, with no use of the weights after that.

    Updating any other unit in backward would change weights that are still to be used in this step, or would
    miss a part of the gradient.
    """
    arrivals = Counter(event.unit for event in events if event.kind is EventKind.GRADIENTS)
    once = {unit for unit, count in arrivals.items() if count == 1}
    seen: set[int] = set()
    for event in events:
        if event.kind is EventKind.GRADIENTS:
            seen.add(event.unit)
        elif event.kind is EventKind.GATHER and event.unit in seen:
            once.discard(event.unit)
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
    staged: frozenset[int]
    """Positions of accesses that copy weights to the device ahead of their gather."""
    awaited: frozenset[int]
    """Gathers, by their number among the events, of weights that have been copied so, or that have stayed there."""


def expand(
    events: Sequence[Event], layout: Layout, placement: Placement, *, pending: bool = True
) -> tuple[Access, ...]:
    """Return the accesses of one step; see `expand_events`."""
    return expand_events(events, layout, placement, pending=pending).accesses


def expand_events(events: Sequence[Event], layout: Layout, placement: Placement, *, pending: bool = True) -> Expansion:
    """Return the accesses of one step, by event: but for those of units that are at home.

    Args:
        events: one step, ending with STEP.
        layout: pages of this rank.
        placement: where updates run.
        pending: whether the units that are updated in forward come with gradients of the step before.
    """
    accesses: list[Access] = []
    starts: list[int] = []
    staged: set[int] = set()
    awaited: set[int] = set()
    arrived: dict[int, int] = {}  # unit -> components of its gradient that are stored
    components = stored_components(events)
    due = placement.due(events)
    later = set(due.values())
    waiting = dict(due) if pending else {}
    reduced: list[int] = []  # to be updated in backward, behind the next gather
    there: set[int] = set()  # units whose weights are on the device, or on their way

    def add(unit: int, found: Iterable[Access]) -> None:
        if unit not in placement.at_home:  # nothing of those is paged
            accesses.extend(found)

    def update_reduced() -> None:
        for unit in reduced:
            there.discard(unit)
            add(unit, update_accesses(layout, unit))
        reduced.clear()

    def update_waiting(gathered: int) -> None:
        unit = waiting.pop(gathered, None)
        if unit is not None:
            there.discard(unit)
            add(unit, update_accesses(layout, unit, components=components.get(unit, 1)))

    for position, event in enumerate(events):
        starts.append(len(accesses))
        if event.kind is EventKind.GATHER:
            if not placement.overlapped:
                update_waiting(event.unit)
            if event.unit in there:
                awaited.add(position)
            else:
                add(event.unit, gather_accesses(layout, event.unit))
            if event.unit not in placement.kept:
                there.discard(event.unit)
            update_reduced()
            update_waiting(event.unit)
            following = next_gather(events, position) if placement.staged else -1
            if following >= 0 and (unit := events[following].unit) not in there | placement.at_home:
                for gathered in [gathered for gathered, of in waiting.items() if of == unit]:
                    update_waiting(gathered)
                begin = len(accesses)
                accesses.extend(gather_accesses(layout, unit))
                staged.update(range(begin, len(accesses)))
                there.add(unit)
        elif event.kind is EventKind.GRADIENTS:
            update_reduced()
            if event.unit in placement.in_backward:
                reduced.append(event.unit)
                if not placement.overlapped:
                    update_reduced()
            else:
                stored = arrived.pop(event.unit, 0)
                arrived[event.unit] = event.components  # at the end: arrival order
                found = store_gradient_accesses(layout, event.unit, stored=stored, components=event.components)
                add(event.unit, found)
        else:
            update_reduced()
            for unit in update_order(arrived):
                if unit not in later:
                    add(unit, update_accesses(layout, unit, components=arrived[unit]))
    return Expansion(tuple(accesses), tuple(starts), frozenset(staged), frozenset(awaited))


def expand_pending(events: Sequence[Event], layout: Layout, placement: Placement) -> tuple[Access, ...]:
    """Return the accesses of all updates that wait for the next forward, when they are not to wait any longer."""
    components = stored_components(events)
    return tuple(
        access
        for unit in placement.due(events).values()
        if unit not in placement.at_home
        for access in update_accesses(layout, unit, components=components[unit])
    )
