"""The trace: what one training step does with pages, in order.

Two levels. *Events* are what the training loop shows (an FSDP module is gathered, its gradients arrive, `step()`
runs); they do not depend on where updates run. *Accesses* are what the pager sees: a few pages that are needed
in memory at the same moment. `update_schedule.expand` turns the first into the second for one choice of update update
schedule, so
changing the update schedule needs no new recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from infinity.content.layout import Layout, Segment, overlapping


class EventKind(Enum):
    """What happened to an FSDP module (or, for STEP, to all of them)."""

    GATHER = "gather"
    GRADIENTS = "gradients"
    STEP = "step"


class Event(NamedTuple):
    """One thing the training loop did."""

    kind: EventKind
    fsdp_module: int = -1
    """Number of the FSDP module; -1 for STEP."""
    components: int = 1
    """GRADIENTS: how many components of each gradient of the FSDP module are stored, unless it is updated at once."""


class Mode(Enum):
    """How an access uses a page."""

    READ = "read"
    WRITE = "write"  # the whole content is replaced, by this access or with those that follow: nothing is fetched
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
    """Number of the page in the layout."""
    mode: Mode


Access = tuple[Use, ...]
"""Distinct pages that are needed in memory at the same moment."""


def stored_components(events: Iterable[Event]) -> dict[int, int]:
    """Return how many components of each FSDP module's gradient are stored at the end of a step."""
    return {event.fsdp_module: event.components for event in events if event.kind is EventKind.GRADIENTS}


def update_order(arrived: Iterable[int]) -> tuple[int, ...]:
    """Return the order in which `step()` updates FSDP modules:

    latest gradients first, while they are in the host cache.
    """
    return tuple(reversed(tuple(arrived)))


def gather_accesses(layout: Layout, fsdp_module: int) -> Iterator[Access]:
    """Yield the PARAM pages of an FSDP module shard by shard, in the order in which they are copied out."""
    for index in layout.fsdp_module_shards[fsdp_module]:
        shard = layout.shards[index]
        pages = layout.segments[shard.segment].param_pages
        for page, _, _ in overlapping(pages, shard.start, shard.start + shard.spec.padded):
            yield (Use(page.index, Mode.READ),)


def store_gradient_accesses(layout: Layout, fsdp_module: int, *, stored: int, components: int) -> Iterator[Access]:
    """Yield the GRAD pages that an arriving gradient is added to, or written to where none is stored.

    Args:
        stored: how many components of it are stored already.
        components: how many are stored then.
    """
    for index in layout.fsdp_module_segments[fsdp_module]:
        for pages in zip(*layout.segments[index].grad_pages[:components], strict=True):
            yield tuple(Use(page.index, Mode.UPDATE if page.component < stored else Mode.WRITE) for page in pages)


def update_accesses(layout: Layout, fsdp_module: int, *, components: int = 0) -> Iterator[Access]:
    """Yield one access for each range of an FSDP module's update, with so many components of its gradient."""
    for segment, position in layout.fsdp_module_ranges[fsdp_module]:
        yield range_access(segment, position, components=components)


def range_access(segment: Segment, position: int, *, components: int = 0) -> Access:
    """Return the pages that the update of one range needs: stored gradients, master and moments, weights."""
    item = segment.ranges[position]
    uses: list[Use] = []
    # Ranges are updated in order, so the one that reaches the end of a page is the last to read it.
    for pages in segment.grad_pages[:components]:
        for page, _, stop in overlapping(pages, item.start, item.stop):
            uses.append(Use(page.index, Mode.CONSUME if stop == page.stop else Mode.READ))
    if segment.whole:
        uses += [
            Use(page.index, Mode.UPDATE) for page, _, _ in overlapping(segment.update_pages, item.start, item.stop)
        ]
    elif segment.update_pages:
        uses.append(Use(segment.update_pages[position].index, Mode.UPDATE))
    # Each replaces its part of a page. So the first one in a page needs nothing of the old content, and those behind it
    # what the ones before have written. Nothing reads the page in between.
    for page, start, _ in overlapping(segment.param_pages, item.start, item.stop):
        replaced = segment.format.replaces_weights and start == page.start
        uses.append(Use(page.index, Mode.WRITE if replaced else Mode.UPDATE))
    return tuple(uses)
