"""The trace of a training step: its use of pages, in order.

There are two levels. *Events* are visible in the training loop: an FSDP module is gathered, its gradients arrive,
`step()` runs. They do not depend on where updates run. *Accesses* are visible to the pager: a few pages that are needed
in memory at the same time. `update_schedule.expand` turns events into accesses for a given update schedule, so a change
of the update schedule needs no new recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from infinity.content.layout import Layout, Segment, overlapping


class EventKind(Enum):
    """Kind of an event of an FSDP module or, for STEP, of all of them."""

    GATHER = "gather"
    GRADIENTS = "gradients"
    STEP = "step"


class Event(NamedTuple):
    """One event of the training loop."""

    kind: EventKind
    fsdp_module: int = -1
    """Index of the FSDP module; -1 for STEP."""
    components: int = 1
    """For GRADIENTS: number of stored components of each gradient of the FSDP module, unless it is updated at once."""


class Mode(Enum):
    """Effect of an access on a page."""

    READ = "read"
    WRITE = "write"  # replaced as a whole, by this access or together with the next ones, so the page is not read
    UPDATE = "update"  # read and modified
    CONSUME = "consume"  # read for the last time: the content is not needed afterwards

    @property
    def fetches(self) -> bool:
        """Return ``True`` if the previous content is needed."""
        return self is not Mode.WRITE

    @property
    def modifies(self) -> bool:
        """Return ``True`` if the access leaves new content that must be stored."""
        return self in (Mode.WRITE, Mode.UPDATE)


class Use(NamedTuple):
    """One page in one access."""

    page: int
    """Number of the page in the layout."""
    mode: Mode


Access = tuple[Use, ...]
"""Distinct pages that are needed in memory at the same time."""


def stored_components(events: Iterable[Event]) -> dict[int, int]:
    """Return the number of stored components of each FSDP module's gradient at the end of a step."""
    return {event.fsdp_module: event.components for event in events if event.kind is EventKind.GRADIENTS}


def update_order(arrived: Iterable[int]) -> tuple[int, ...]:
    """Return the order in which `step()` updates FSDP modules: latest gradients first, because they may still be in
    memory.
    """
    return tuple(reversed(tuple(arrived)))


def gather_accesses(layout: Layout, fsdp_module: int) -> Iterator[Access]:
    """Yield the PARAM pages of an FSDP module, shard by shard, in the order in which they are copied out."""
    for index in layout.fsdp_module_shards[fsdp_module]:
        shard = layout.shards[index]
        pages = layout.segments[shard.segment].param_pages
        for page, _, _ in overlapping(pages, shard.start, shard.start + shard.spec.padded):
            yield (Use(page.index, Mode.READ),)


def store_gradient_accesses(layout: Layout, fsdp_module: int, *, stored: int, components: int) -> Iterator[Access]:
    """Yield the GRAD pages that an arriving gradient is added to, or written to if no gradient is stored yet.

    Args:
        layout: pages of this rank.
        fsdp_module: index of the FSDP module.
        stored: number of components that are already stored.
        components: number of components that are stored afterwards.
    """
    for index in layout.fsdp_module_segments[fsdp_module]:
        for pages in zip(*layout.segments[index].grad_pages[:components], strict=True):
            yield tuple(Use(page.index, Mode.UPDATE if page.component < stored else Mode.WRITE) for page in pages)


def update_accesses(layout: Layout, fsdp_module: int, *, components: int = 0) -> Iterator[Access]:
    """Yield one access for each range of an FSDP module's update.

    Args:
        layout: pages of this rank.
        fsdp_module: index of the FSDP module.
        components: number of stored components of its gradient.
    """
    for segment, position in layout.fsdp_module_ranges[fsdp_module]:
        yield range_access(segment, position, components=components)


def range_access(segment: Segment, position: int, *, components: int = 0) -> Access:
    """Return the pages that the update of one range needs: stored gradients, master and moments, weights.

    Args:
        segment: segment of the range.
        position: index of the range in the segment.
        components: number of stored components of the gradient.
    """
    item = segment.ranges[position]
    uses: list[Use] = []
    # Ranges are updated in order, so the range that reaches the end of a page is the last one to read it.
    for pages in segment.grad_pages[:components]:
        for page, _, stop in overlapping(pages, item.start, item.stop):
            uses.append(Use(page.index, Mode.CONSUME if stop == page.stop else Mode.READ))
    if segment.whole:
        uses += [
            Use(page.index, Mode.UPDATE) for page, _, _ in overlapping(segment.update_pages, item.start, item.stop)
        ]
    elif segment.update_pages:
        uses.append(Use(segment.update_pages[position].index, Mode.UPDATE))
    # Each range replaces its part of a weight page. So the first range in a page does not need the previous content,
    # and later ranges need the parts that earlier ranges have written. The page is not read in between.
    for page, start, _ in overlapping(segment.param_pages, item.start, item.stop):
        replaced = segment.format.replaces_weights and start == page.start
        uses.append(Use(page.index, Mode.WRITE if replaced else Mode.UPDATE))
    return tuple(uses)
