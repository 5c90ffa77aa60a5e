"""Where in a step units are updated, and what the pager sees of a step for a choice of that."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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

BACKWARD = 2.5
"""Computation of a unit in backward, over that in forward: between 2, and 3 where backward computes forward again."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where units are updated: in backward, ahead of their use in the next forward, or in `step()`; immutable.

    For example, of a unit of 10 ranges with `in_backward` 8, ranges 0 to 7 are updated in backward, and 8 and 9 in the
    next forward if `in_forward` has the unit, else in `step()`.
    """

    in_backward: Mapping[int, int] = field(default_factory=dict)
    """Unit -> how many of its ranges, the first ones, are updated in backward; those that are not there have none."""
    in_forward: frozenset[int] = frozenset()
    """Units of which the other ranges are updated in the next forward; of the others that is done in `step()`."""
    overlapped: bool = True
    """Whether updates run beside the computation of another unit. In backward, a unit is updated when the next one has
    been gathered; in forward, when the one before it has been gathered (the first unit is updated in `step()`). Else a
    unit is updated as soon as its gradients are there, or just before it is gathered: that needs fewer frames."""

    @classmethod
    def of(cls, name: str, events: Sequence[Event], layout: Layout) -> Placement:
        """Return the placement of a setting, for a step that looks like `events`.

        What cannot be updated in backward is updated in the next forward.
        """
        if name == "after_backward":
            return cls()
        early = eligible_for_backward(events) if name in ("in_backward", "in_both") else frozenset()
        gathered, trained = (
            {event.unit for event in events if event.kind is kind} for kind in (EventKind.GATHER, EventKind.GRADIENTS)
        )
        placement = cls(
            in_backward={unit: len(layout.unit_ranges[unit]) for unit in early},
            in_forward=frozenset(gathered & trained - early),
        )
        return placement._balanced(events, layout) if name == "in_both" else placement

    def _balanced(self, events: Sequence[Event], layout: Layout) -> Placement:
        """Return this placement with a part of every unit's update in backward left to the next forward.

        So large a part that each pass moves a share of the bytes that is its share of the computation; without it,
        forward moves weights only. With P bytes of weights, U bytes that updates move, G bytes of gradients, and
        nothing that stays in memory, forward moves P + f (U + G) of the 2 P + U + 2 f G bytes of a step, where f is the
        fraction of updates that are left to it: solved for f. The unit that is gathered first leaves nothing, as there
        is no computation to hide it behind. A unit is divided between pages; what is too much or too little of one
        unit, the next one makes up for.
        """
        components = stored_components(events)
        order = list(dict.fromkeys(event.unit for event in events if event.kind is EventKind.GATHER))
        weights = updates = gradients = whole = 0
        for segment in (layout.segments[index] for unit in order for index in layout.unit_segments[unit]):
            size = sum(page.nbytes for page in segment.param_pages)
            weights += size
            if segment.unit in self.in_backward:
                updates += 2 * sum(page.nbytes for page in segment.update_pages) + size
                stored = segment.grad_pages[: components[segment.unit]]
                gradients += sum(page.nbytes for pages in stored for page in pages)
                whole += segment.numel
        divisible = [unit for unit in order[1:] if unit in self.in_backward]
        share = 1 / (1 + BACKWARD)
        fraction = (share * (2 * weights + updates) - weights) / max(1, updates + (1 - 2 * share) * gradients)
        passed = sum(layout.segments[index].numel for unit in divisible for index in layout.unit_segments[unit])
        fraction *= whole / max(1, passed)
        in_backward, wanted = dict(self.in_backward), 0.0
        for unit in divisible:
            sizes = [segment.ranges[position].count for segment, position in layout.unit_ranges[unit]]
            wanted += fraction * sum(sizes)
            left = {place: sum(sizes[place:]) for place in divisions(layout, unit)}
            place = min(left, key=lambda place: abs(wanted - left[place]))
            wanted -= left[place]
            in_backward[unit] = place
        later = frozenset(unit for unit in divisible if in_backward[unit] < len(layout.unit_ranges[unit]))
        return replace(
            self,
            in_backward={unit: number for unit, number in in_backward.items() if number},
            in_forward=self.in_forward | later,
        )

    def division(self, unit: int) -> int:
        """Return how many of a unit's ranges, the first ones, are updated in backward; the others are later."""
        return self.in_backward.get(unit, 0)

    def due(self, events: Iterable[Event]) -> dict[int, int]:
        """Return which unit is to be updated when a unit is first gathered; those updated in `step()` are not there."""
        order = tuple(dict.fromkeys(event.unit for event in events if event.kind is EventKind.GATHER))
        pairs = itertools.pairwise(order) if self.overlapped else zip(order, order, strict=True)
        return {gathered: unit for gathered, unit in pairs if unit in self.in_forward}


def divisions(layout: Layout, unit: int) -> Iterator[int]:
    """Yield the numbers of ranges after which the update of a unit can be divided: no page is on both sides."""
    number = 0
    for index in layout.unit_segments[unit]:
        segment = layout.segments[index]
        cuts = [{page.start for page in pages} for pages in (segment.param_pages, *segment.grad_pages)]
        starts = set.intersection(*cuts)
        for item in segment.ranges:
            if item.start in starts:
                yield number
            number += 1
    yield number


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


def expand(
    events: Sequence[Event], layout: Layout, placement: Placement, *, pending: bool = True
) -> tuple[Access, ...]:
    """Return the accesses of one step.

    Args:
        events: one step, ending with STEP.
        layout: pages of this rank.
        placement: where updates run.
        pending: whether the units that are updated in forward come with gradients of the step before.
    """
    accesses: list[Access] = []
    arrived: dict[int, int] = {}  # unit -> components of its gradient that are stored
    components = stored_components(events)
    due = placement.due(events)
    later = set(due.values())
    waiting = dict(due) if pending else {}
    reduced: list[int] = []  # to be updated in backward, behind the next gather

    def update_reduced() -> None:
        for unit in reduced:
            accesses.extend(update_accesses(layout, unit, stop=placement.division(unit)))
        reduced.clear()

    def update_waiting(gathered: int) -> None:
        unit = waiting.pop(gathered, None)
        if unit is not None:
            accesses.extend(
                update_accesses(layout, unit, start=placement.division(unit), components=components.get(unit, 1))
            )

    for event in events:
        if event.kind is EventKind.GATHER:
            if not placement.overlapped:
                update_waiting(event.unit)
            accesses.extend(gather_accesses(layout, event.unit))
            update_reduced()
            update_waiting(event.unit)
        elif event.kind is EventKind.GRADIENTS:
            update_reduced()
            first = placement.division(event.unit)
            if first < len(layout.unit_ranges[event.unit]):
                stored = arrived.pop(event.unit, 0)
                arrived[event.unit] = event.components  # at the end: arrival order
                accesses.extend(
                    store_gradient_accesses(layout, event.unit, start=first, stored=stored, components=event.components)
                )
            if first:
                reduced.append(event.unit)
                if not placement.overlapped:
                    update_reduced()
        else:
            update_reduced()
            for unit in update_order(arrived):
                if unit not in later:
                    accesses.extend(
                        update_accesses(layout, unit, start=placement.division(unit), components=arrived[unit])
                    )
    return tuple(accesses)


def expand_pending(events: Sequence[Event], layout: Layout, placement: Placement) -> tuple[Access, ...]:
    """Return the accesses of all updates that wait for the next forward, when they are not to wait any longer."""
    components = stored_components(events)
    return tuple(
        access
        for unit in placement.due(events).values()
        for access in update_accesses(layout, unit, start=placement.division(unit), components=components[unit])
    )
