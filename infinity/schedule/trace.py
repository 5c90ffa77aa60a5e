"""The trace: what one training step does with pages, in order.

Two levels. *Events* are what the training loop shows (a unit is gathered, its gradients arrive, `step()`
runs); they do not depend on where updates run. *Accesses* are what the pager sees: a few pages that are needed
in memory at the same moment. `expand` turns the first into the second for one choice of update placement, so
changing the placement needs no new recording.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from infinity.layout import Layout, Segment, overlapping


class EventKind(Enum):
    """What happened to a unit (or, for STEP, to all of them)."""

    GATHER = "gather"
    GRADIENTS = "gradients"
    STEP = "step"


class Event(NamedTuple):
    """One thing the training loop did.

    `rows` is how many rows of each gradient of the unit are stored from then on, unless it is updated at once.
    """

    kind: EventKind
    unit: int = -1
    rows: int = 1


class Mode(Enum):
    """How an access uses a page."""

    READ = "read"
    WRITE = "write"  # the whole content is replaced: nothing needs to be fetched
    UPDATE = "update"  # read and modified
    CONSUME = "consume"  # read for the last time: the content is dead afterwards

    @property
    def fetches(self) -> bool:
        """Whether the old content is needed."""
        return self is not Mode.WRITE

    @property
    def modifies(self) -> bool:
        """Whether there is new content to be stored afterwards."""
        return self in (Mode.WRITE, Mode.UPDATE)


class Use(NamedTuple):
    """One page in one access."""

    page: int
    mode: Mode


Access = tuple[Use, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where units are updated: in backward, ahead of their use in the next forward, or (all others) in `step()`.

    `beside` says whether updates come behind the gather of another unit, to run beside its computation: in backward of
    the unit that is gathered next; in forward of the unit before (the first unit is updated in `step()`). Else a unit
    is updated as soon as its gradients are there, or just before it is gathered: that needs fewer frames.
    """

    in_backward: frozenset[int] = frozenset()
    in_forward: frozenset[int] = frozenset()
    beside: bool = True

    @classmethod
    def of(cls, name: str, events: Sequence[Event]) -> Placement:
        """Return the placement of a setting, for a step that looks like `events`.

        What cannot be updated in backward is updated in the next forward.
        """
        if name == "after_backward":
            return cls()
        early = eligible_for_backward(events) if name == "in_backward" else frozenset()
        gathered, trained = (
            {event.unit for event in events if event.kind is kind} for kind in (EventKind.GATHER, EventKind.GRADIENTS)
        )
        return cls(in_backward=early, in_forward=frozenset(gathered & trained - early))

    def due(self, events: Iterable[Event]) -> dict[int, int]:
        """Return which unit is to be updated when a unit is first gathered; those updated in `step()` are not there."""
        gathered = dict.fromkeys(event.unit for event in events if event.kind is EventKind.GATHER)
        order = [unit for unit in gathered if unit in self.in_forward]
        return dict(itertools.pairwise(order)) if self.beside else {unit: unit for unit in order}


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
    arrived: dict[int, int] = {}  # unit -> rows of its gradient that are stored
    rows = stored_rows(events)
    due = placement.due(events)
    later = set(due.values())
    waiting = dict(due) if pending else {}
    reduced: list[int] = []  # to be updated in backward, behind the next gather

    def update_reduced() -> None:
        for unit in reduced:
            accesses.extend(update_accesses(layout, unit))
        reduced.clear()

    def update_waiting(gathered: int) -> None:
        unit = waiting.pop(gathered, None)
        if unit is not None:
            accesses.extend(update_accesses(layout, unit, rows=rows.get(unit, 1)))

    for event in events:
        if event.kind is EventKind.GATHER:
            if not placement.beside:
                update_waiting(event.unit)
            accesses.extend(gather_accesses(layout, event.unit))
            update_reduced()
            update_waiting(event.unit)
        elif event.kind is EventKind.GRADIENTS:
            update_reduced()
            if event.unit in placement.in_backward:
                reduced.append(event.unit)
                if not placement.beside:
                    update_reduced()
            else:
                stored = arrived.pop(event.unit, 0)
                arrived[event.unit] = event.rows  # at the end: arrival order
                accesses.extend(store_gradient_accesses(layout, event.unit, stored=stored, rows=event.rows))
        else:
            update_reduced()
            for unit in update_order(arrived):
                if unit not in later:
                    accesses.extend(update_accesses(layout, unit, rows=arrived[unit]))
    return tuple(accesses)


def stored_rows(events: Iterable[Event]) -> dict[int, int]:
    """Return how many rows of each unit's gradient are stored at the end of a step."""
    return {event.unit: event.rows for event in events if event.kind is EventKind.GRADIENTS}


def expand_pending(events: Sequence[Event], layout: Layout, placement: Placement) -> tuple[Access, ...]:
    """Return the accesses of all updates that wait for the next forward, when they are not to wait any longer."""
    rows = stored_rows(events)
    return tuple(
        access for unit in placement.due(events).values() for access in update_accesses(layout, unit, rows=rows[unit])
    )


def update_order(arrived: Iterable[int]) -> tuple[int, ...]:
    """Return the order in which `step()` updates units: latest gradients first, while they are in the arena."""
    return tuple(reversed(tuple(arrived)))


def gather_accesses(layout: Layout, unit: int) -> Iterator[Access]:
    """Yield the PARAM pages of a unit shard by shard, in the order in which they are copied out."""
    for index in layout.unit_shards[unit]:
        shard = layout.shards[index]
        pages = layout.segments[shard.segment].param_pages
        for page, _, _ in overlapping(pages, shard.start, shard.start + shard.spec.padded):
            yield (Use(page.index, Mode.READ),)


def store_gradient_accesses(layout: Layout, unit: int, *, stored: int, rows: int) -> Iterator[Access]:
    """Yield the GRAD pages of `rows` rows to which an arriving gradient is added, or written where none is `stored`."""
    for index in layout.unit_segments[unit]:
        for pages in zip(*layout.segments[index].grad_pages[:rows], strict=True):
            yield tuple(Use(page.index, Mode.UPDATE if page.row < stored else Mode.WRITE) for page in pages)


def update_accesses(layout: Layout, unit: int, *, rows: int = 0) -> Iterator[Access]:
    """Yield one access for each range of a unit's update, for which `rows` rows of its gradient are stored."""
    for index in layout.unit_segments[unit]:
        segment = layout.segments[index]
        for position in range(len(segment.ranges)):
            yield range_access(segment, position, rows=rows)


def range_access(segment: Segment, position: int, *, rows: int = 0) -> Access:
    """Return the pages that the update of one range needs: stored gradients, master and moments, weights."""
    item = segment.ranges[position]
    uses: list[Use] = []
    for pages in segment.grad_pages[:rows]:
        for page, _, stop in overlapping(pages, item.start, item.stop):
            uses.append(Use(page.index, Mode.CONSUME if stop == page.stop else Mode.READ))
    if segment.update_pages:
        uses.append(Use(item.index, Mode.UPDATE))
    for page, start, _ in overlapping(segment.param_pages, item.start, item.stop):
        replaced = segment.format.replaces_weights and start == page.start
        uses.append(Use(page.index, Mode.WRITE if replaced else Mode.UPDATE))
    return tuple(uses)
