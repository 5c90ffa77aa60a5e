"""Update schedules: where in a step each FSDP module is updated, and the accesses of a step that result."""

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
    """Place of each FSDP module's update: in backward, in the next forward, or in `step()`. Immutable."""

    in_backward: frozenset[int] = frozenset()
    """FSDP modules that are updated in backward."""
    in_forward: frozenset[int] = frozenset()
    """FSDP modules that are updated in the next forward, before their weights are used. FSDP modules that are in
    neither set are updated in `step()`.
    """
    overlapped: bool = True
    """``True`` if updates overlap the computation of another FSDP module. In backward, an FSDP module is updated when
    the next one has been gathered; in forward, when the previous one has been gathered (the first FSDP module is
    updated in `step()`). Otherwise an FSDP module is updated as soon as its gradients have arrived, or just before it
    is gathered, which needs fewer cache slots.
    """
    prefetched: bool = False
    """``True`` if weights are prefetched to the GPU: the pages of an FSDP module are read after the previous gather,
    and copied to the device from then on. The first gather of a step is an exception.
    """
    kept: frozenset[int] = frozenset()
    """FSDP modules whose weights stay on the device from their first prefetch to the GPU until the step ends or they
    are updated.
    """
    gpu_resident: frozenset[int] = frozenset()
    """FSDP modules whose weights and state all live on the device. They are not paged."""

    @classmethod
    def of(cls, name: str, events: Sequence[Event], *, forward: bool = True) -> UpdateSchedule:
        """Return the update schedule of a setting for a step.

        FSDP modules that cannot be updated in backward are updated in the next forward or, if `forward` is ``False``,
        in `step()`.

        Args:
            name: ``in_backward``, ``in_forward`` or ``after_backward``.
            events: one step.
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
        """Return the FSDP module to update when an FSDP module is first gathered in forward, by gathered FSDP module.

        FSDP modules that are updated in `step()` are not included.
        """
        order = tuple(dict.fromkeys(event.fsdp_module for event in events if event.kind is EventKind.GATHER))
        pairs = itertools.pairwise(order) if self.overlapped else zip(order, order, strict=True)
        return {gathered: fsdp_module for gathered, fsdp_module in pairs if fsdp_module in self.in_forward}


def eligible_for_backward(events: Sequence[Event]) -> frozenset[int]:
    """Return the FSDP modules whose gradients arrive once per step, and whose weights are not used afterwards in the
    step.

    An update of any other FSDP module in backward would change weights that the step still uses, or would miss a part
    of the gradient.
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
    """Return the position of the first gather after a position in the same step, or -1."""
    for index in range(position + 1, len(events)):
        if events[index].kind is EventKind.GATHER:
            return index
    return -1


class Expansion(NamedTuple):
    """Accesses of one step, with their relation to its events."""

    accesses: tuple[Access, ...]
    """Accesses in the order in which they take their places in the plan."""
    starts: tuple[int, ...]
    """Position of the first access of each event. For an event without accesses, the position of the next access."""
    prefetched: frozenset[int]
    """Positions of accesses that copy weights to the device ahead of their gather."""
    awaited: frozenset[int]
    """Indices of the gather events whose weights have been copied that way or have stayed on the device."""


def expand(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> tuple[Access, ...]:
    """Return the accesses of one step. See `expand_events`."""
    return expand_events(events, layout, update_schedule, pending=pending).accesses


def expand_events(
    events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule, *, pending: bool = True
) -> Expansion:
    """Return the accesses of one step, by event. GPU-resident FSDP modules have no accesses.

    Args:
        events: one step, ending with STEP.
        layout: pages of this rank.
        update_schedule: where updates run.
        pending: whether the FSDP modules that are updated in forward have gradients from the previous step.
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
    reduced: list[int] = []  # FSDP modules to be updated in backward, after the next gather
    there: set[int] = set()  # FSDP modules whose weights are on the device, or being copied there

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
                # A pending update must come before the prefetch to the GPU. Otherwise the forward would compute with
                # weights of the previous step.
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
                arrived[event.fsdp_module] = event.components  # moves to the end, so `arrived` is in arrival order
                found = store_gradient_accesses(layout, event.fsdp_module, stored=stored, components=event.components)
                add(event.fsdp_module, found)
        else:
            update_reduced()
            for fsdp_module in update_order(arrived):
                if fsdp_module not in later:
                    add(fsdp_module, update_accesses(layout, fsdp_module, components=arrived[fsdp_module]))
    return Expansion(tuple(accesses), tuple(starts), frozenset(prefetched), frozenset(awaited))


def expand_pending(events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule) -> tuple[Access, ...]:
    """Return the accesses of all updates that wait for the next forward, for running them now.

    Args:
        events: the step that stored the gradients.
        layout: pages of this rank.
        update_schedule: where updates run.
    """
    components = stored_components(events)
    return tuple(
        access
        for fsdp_module in update_schedule.due(events).values()
        if fsdp_module not in update_schedule.gpu_resident
        for access in update_accesses(layout, fsdp_module, components=components[fsdp_module])
    )
