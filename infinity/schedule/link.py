"""Traffic of a step between host memory and the compute device. Pure, like the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from infinity.content.format import ITEMSIZE, MASTER, Role, StateFormat
from infinity.content.layout import Layout
from infinity.schedule.trace import Access, Event, EventKind, is_gather
from infinity.schedule.update_schedule import UpdateSchedule

UPDATE_BYTES: Final = 24
"""Bytes per parameter that cross the link for an update on the device: the master and two moments, in both
directions.
"""


def share_that_stays(layout: Layout, room: int) -> float:
    """Return the fraction of the state that fits on the device, so that updates do not transfer it over the link.

    Args:
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
    """Return the traffic of a step over the link."""
    pages = layout.pages
    gathers = Counter(pages[access[0].page].fsdp_module for access in trace if is_gather(access, layout))
    gathered = sum(
        count // len(layout.fsdp_module_gathers[fsdp_module]) * _weight_bytes(layout, fsdp_module)
        for fsdp_module, count in gathers.items()
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


def _weight_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the number of bytes of an FSDP module's weights, including the padding of shards."""
    shards = layout.fsdp_module_shards[fsdp_module]
    return sum(layout.shards[shard].spec.padded * ITEMSIZE[layout.format_of(shard).param] for shard in shards)


def _trained(layout: Layout, fsdp_module: int) -> Iterator[tuple[int, StateFormat]]:
    """Yield the number of elements and the state format of each trained shard of an FSDP module."""
    for shard in layout.fsdp_module_shards[fsdp_module]:
        if (spec := layout.shards[shard].spec).trainable:
            yield spec.numel, layout.format_of(shard)


def _gradient_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the number of bytes of an FSDP module's gradients in the dtype of the master."""
    return sum(numel * ITEMSIZE[of.dtypes[MASTER]] for numel, of in _trained(layout, fsdp_module))


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
        for numel, of in _trained(layout, event.fsdp_module):
            back += numel * sum(ITEMSIZE[dtype] for dtype in of.grads[: event.components])
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

    def updated(access: Access) -> int:
        updates = any(use.mode.modifies and pages[use.page].role is not Role.GRAD for use in access)
        return pages[access[0].page].fsdp_module if updates else -1

    for fsdp_module, accesses in groupby(trace, updated):
        fetched: set[int] = set()
        changed: set[int] = set()
        for access in accesses if fsdp_module >= 0 else ():
            fetched |= {use.page for use in access if use.mode.fetches and use.page not in changed}
            changed |= {use.page for use in access if use.mode.modifies}
        there += sum(pages[page].nbytes for page in fetched)
        back += sum(pages[page].nbytes for page in changed)
    return there, back
