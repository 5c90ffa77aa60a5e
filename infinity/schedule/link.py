"""Traffic of a step between host memory and the compute device. Pure, like the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from infinity.content.format import ITEMSIZE, MASTER, Role
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Event, EventKind, gather_accesses, is_gather
from infinity.schedule.update_schedule import UpdateSchedule

UPDATE_BYTES: Final = 24
"""Bytes per parameter that cross the link for an update on the device: the master and two moments, in both
directions.
"""


def share_that_stays(layout: Layout, room: int) -> float:
    """Return the fraction of the state that fits on the device, so that updates do not transfer it over the link.

    Args:
        layout: pages of this rank.
        room: free device memory before the first step, in bytes. It includes memory that activations will need.
    """
    return min(1.0, max(0, room) / max(1, layout.state_bytes))


class LinkTraffic(NamedTuple):
    """Bytes that cross the link in one step."""

    weights: int
    """Bytes to the device: gathered weights, and stored gradients to which further gradients are added."""
    gradients: int
    """Bytes of gradients from the device."""
    read: int = 0
    """Bytes to the device: pages that are updated on the device."""
    changed: int = 0
    """Bytes from the device: pages that have been updated on the device."""

    @property
    def to_device(self) -> int:
        """Total bytes to the device."""
        return self.weights + self.read

    @property
    def from_device(self) -> int:
        """Total bytes from the device."""
        return self.gradients + self.changed


def link_traffic(
    events: Sequence[Event],
    layout: Layout,
    update_schedule: UpdateSchedule,
    trace: Sequence[Access],
    *,
    update_on_device: bool,
) -> LinkTraffic:
    """Return the traffic of a step over the link.

    Args:
        events: events of one step.
        layout: pages of this rank.
        update_schedule: where updates run, and which pages stay on the device.
        trace: accesses of the step, as returned by `expand`.
        update_on_device: whether updates run on the device.
    """
    gathered = sum(
        count * _gathered_bytes(layout, fsdp_module) for fsdp_module, count in _gathers(trace, layout).items()
    )
    there, back = _stored_gradients(events, layout, update_schedule)
    if update_on_device:
        return LinkTraffic(gathered + there, back, *_updated_pages(trace, layout))
    at_once = sum(
        _gradient_bytes(layout, event.fsdp_module)
        for event in events
        if event.kind is EventKind.GRADIENTS and event.fsdp_module in update_schedule.in_backward
    )
    return LinkTraffic(gathered + there, back + at_once)


def _gathers(trace: Sequence[Access], layout: Layout) -> Counter[int]:
    """Return how many times each FSDP module is gathered from its pages."""
    pages = layout.pages
    reads = Counter(pages[access[0].page].fsdp_module for access in trace if is_gather(access, layout))
    return Counter(
        {
            fsdp_module: count // sum(1 for _ in gather_accesses(layout, fsdp_module))
            for fsdp_module, count in reads.items()
        }
    )


def _gathered_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the number of bytes of an FSDP module's weights, including the padding of shards."""
    shards = [layout.shards[index] for index in layout.fsdp_module_shards[fsdp_module]]
    return sum(shard.spec.padded * ITEMSIZE[layout.segments[shard.segment].format.param] for shard in shards)


def _gradient_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the number of bytes of an FSDP module's gradients in the dtype of the master."""
    shards = [
        layout.shards[index] for index in layout.fsdp_module_shards[fsdp_module] if layout.shards[index].spec.trainable
    ]
    return sum(shard.spec.numel * ITEMSIZE[layout.segments[shard.segment].format.dtypes[MASTER]] for shard in shards)


def _stored_gradients(events: Sequence[Event], layout: Layout, update_schedule: UpdateSchedule) -> tuple[int, int]:
    """Return the bytes of stored gradients that are copied to and from the device.

    Gradients are copied to the device again if the step adds further gradients to them.
    """
    there = back = 0
    stored: set[int] = set()
    not_stored = update_schedule.in_backward | update_schedule.gpu_resident
    for event in events:
        if event.kind is not EventKind.GRADIENTS or event.fsdp_module in not_stored:
            continue
        shards = [layout.shards[index] for index in layout.fsdp_module_shards[event.fsdp_module]]
        for shard in (shard for shard in shards if shard.spec.trainable):
            grads = layout.segments[shard.segment].format.grads[: event.components]
            back += shard.spec.numel * sum(ITEMSIZE[dtype] for dtype in grads)
        if event.fsdp_module in stored:
            there += _gradient_bytes(layout, event.fsdp_module)
        stored.add(event.fsdp_module)
    return there, back


def _updated_pages(trace: Sequence[Access], layout: Layout) -> tuple[int, int]:
    """Return the bytes that updates on the device copy to and from it.

    Each page of an FSDP module is copied to the device once, if its content is needed, and back once, if it is
    modified. If several batches use a page, each of them copies a part of it.
    """
    there = back = 0
    pages = layout.pages
    fetched: set[int] = set()
    changed: set[int] = set()
    fsdp_module = -1
    for access in [*trace, ()]:
        updates = any(use.mode.modifies and pages[use.page].role is not Role.GRAD for use in access)
        of = pages[access[0].page].fsdp_module if updates else -1
        if of != fsdp_module:
            there += sum(pages[page].nbytes for page in fetched)
            back += sum(pages[page].nbytes for page in changed)
            fetched, changed, fsdp_module = set(), set(), of
        if updates:
            seen = fetched | changed
            fetched |= {use.page for use in access if use.mode.fetches and use.page not in seen}
            changed |= {use.page for use in access if use.mode.modifies}
    return there, back
