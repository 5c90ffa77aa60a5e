"""The trace of a training step, which lists the uses of pages in order.

A trace exists at two levels. *Events* describe the training loop: an FSDP module is gathered, its gradients arrive, or
`step()` runs. Events do not depend on when updates run. *Accesses* describe the uses of pages: each access needs a few
pages in memory at the same time. `update_schedule.expand` converts events into accesses for a given update schedule, so
a step need not be recorded again when the update schedule changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from infinity.content.format import Role
from infinity.content.layout import Layout, RangeBatch, Segment, overlapping


class EventKind(Enum):
    """Kind of an event. STEP concerns all FSDP modules; any other kind concerns one FSDP module."""

    GATHER = "gather"
    GRADIENTS = "gradients"
    STEP = "step"


class Event(NamedTuple):
    """One event in the training loop."""

    kind: EventKind
    fsdp_module: int = -1
    """Index of the FSDP module; -1 for STEP."""
    components: int = 1
    """For GRADIENTS, the number of components in which each gradient is stored if the FSDP module is not updated
    immediately.
    """


class Mode(Enum):
    """The way in which an access uses a page."""

    READ = "read"
    WRITE = "write"  # fully replaced by this access or by the next ones, so not read first
    UPDATE = "update"  # read and modified
    CONSUME = "consume"  # read for the last time, because the content is not needed afterwards

    fetches: bool
    """``True`` if the access needs the previous content of the page."""
    modifies: bool
    """``True`` if the access produces new content that must be stored."""

    def __init__(self, value: str) -> None:
        self.fetches, self.modifies = value != "write", value in ("write", "update")  # quicker to read than properties


class Use(NamedTuple):
    """Use of one page in an access."""

    page: int
    """Index of the page in the layout."""
    mode: Mode


Access = tuple[Use, ...]
"""Distinct pages that are needed in memory at the same time, with the mode of each."""


def stored_components(events: Iterable[Event]) -> dict[int, int]:
    """Return, for each FSDP module, the number of components in which its gradients are stored at the end of a step."""
    return {event.fsdp_module: event.components for event in events if event.kind is EventKind.GRADIENTS}


def update_order(arrived: Iterable[int]) -> tuple[int, ...]:
    """Return the order in which `step()` updates FSDP modules.

    The FSDP modules whose gradients arrived last come first, because these gradients may still be in memory.
    """
    return tuple(reversed(tuple(arrived)))


def gather_accesses(layout: Layout, fsdp_module: int) -> Iterator[Access]:
    """Yield one access for each batch of an FSDP module's weights, in all-gather order."""
    for batch in layout.fsdp_module_gathers[fsdp_module]:
        yield tuple(Use(page, Mode.READ) for page in dict.fromkeys(part.page for part in batch))


def is_gather(access: Access, layout: Layout) -> bool:
    """Return whether an access belongs to a gather, which only reads PARAM pages. Other accesses modify weights."""
    page, mode = access[0]
    return mode is Mode.READ and layout.pages[page].role is Role.PARAM


def store_gradient_accesses(layout: Layout, fsdp_module: int, *, stored: int, components: int) -> Iterator[Access]:
    """Yield the accesses that store a gradient of an FSDP module, or add it to the gradient that is already stored.

    An access contains consecutive pages of a segment, with all components of each.

    Args:
        stored: number of gradient components that are already stored.
        components: number of gradient components that are stored afterwards.
    """
    most = max(1, layout.batch_pages // max(1, components))
    for index in layout.fsdp_module_segments[fsdp_module]:
        pages = [*zip(*layout.segments[index].grad_pages[:components], strict=True)]
        for first in range(0, len(pages), most):
            yield tuple(
                Use(page.index, Mode.UPDATE if page.component < stored else Mode.WRITE)
                for together in pages[first : first + most]
                for page in together
            )


def update_accesses(layout: Layout, fsdp_module: int, *, components: int = 0) -> Iterator[Access]:
    """Yield one access for each batch of an FSDP module's update."""
    for batch in layout.fsdp_module_batches[fsdp_module]:
        yield batch_access(batch, components=components)


def batch_access(batch: RangeBatch, *, components: int = 0) -> Access:
    """Return the access to the pages that the update of a batch needs."""
    if len(batch) == 1:
        return range_access(*batch[0], components=components)
    modes: dict[int, Mode] = {}
    for segment, position in batch:
        for page, mode in range_access(segment, position, components=components):
            # The first range of a page decides whether its content is read, and the last one whether it is dropped.
            modes[page] = mode if page not in modes or mode is Mode.CONSUME else modes[page]
    return tuple(map(Use, modes, modes.values()))


def range_access(segment: Segment, position: int, *, components: int = 0) -> Access:
    """Return the access to the pages that the update of one range needs: stored gradients, master and moments, and
    weights.
    """
    item = segment.ranges[position]
    uses: list[Use] = []
    # Ranges are updated in order, so the range that includes the end of a page is the last one that reads the page.
    for pages in segment.grad_pages[:components]:
        for page, _, stop in overlapping(pages, item.start, item.stop):
            uses.append(Use(page.index, Mode.CONSUME if stop == page.stop else Mode.READ))
    if segment.whole:
        uses += [
            Use(page.index, Mode.UPDATE) for page, _, _ in overlapping(segment.update_pages, item.start, item.stop)
        ]
    elif segment.update_pages:
        uses.append(Use(segment.update_pages[position].index, Mode.UPDATE))
    # Each range replaces its part of a weight page. Therefore the first range of a page does not need the previous
    # content, and later ranges only need the parts that earlier ranges have written. The page is not read from the
    # store.
    for page, start, _ in overlapping(segment.param_pages, item.start, item.stop):
        replaced = segment.format.replaces_weights and start == page.start
        uses.append(Use(page.index, Mode.WRITE if replaced else Mode.UPDATE))
    return tuple(uses)
