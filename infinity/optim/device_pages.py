"""Pages that are updated on the GPU, and their copies to and from cache slots.

[Note: updates on the device] The pages of a batch are copied to the GPU, updated there by the same code as in host
memory, and copied back. Each of these operations has its own stream, so that one batch is copied while the previous one
is updated. On the GPU, consecutive pages of the same kind are joined into one page, so that the optimizer updates each
parameter of the batch in one piece. A page reservation ends with the event after the copies back, so that a cache slot
is not used before it holds the result of the update. Pages of GPU-resident FSDP modules are updated in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from infinity.budget import BATCHES
from infinity.content.format import ITEMSIZE, Component, Role
from infinity.content.layout import Batch, Layout, Page, Range, Segment
from infinity.content.views import Content
from infinity.memory.device import Device, DeviceEvent
from infinity.optim.fetch import Slices
from infinity.optim.update import RangePages
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access, Mode, Use
from infinity.units import align_up

_ALIGNMENT = 256
"""Alignment of joined pages in bytes, as in PyTorch's CUDA allocator."""


class _Array(NamedTuple):
    """Contiguous items of one kind in a page."""

    use: Use
    offset: int
    """Offset in the page, in bytes."""
    nbytes: int
    """Length in bytes."""


class _JoinedRange(NamedTuple):
    """Consecutive ranges of a segment as one range."""

    segment: Segment
    item: Range
    pages: tuple[tuple[Page, int, int], ...]
    """Joined pages, each with its first byte and the byte after its last one in the memory of the batch."""


class JoinedBatch:
    """Arrangement of the pages of a batch on the GPU.

    Attributes:
        arrays: content of the pages, in the order in which the GPU memory of the batch contains it; ``None`` for a gap.
        sizes: lengths of `arrays`, in bytes.
        nbytes: total length, in bytes.
        ranges: joined ranges, one per segment.
    """

    def __init__(self, layout: Layout, batch: Batch, access: Access) -> None:
        self.arrays: list[_Array | None] = []
        self.sizes: list[int] = []
        self.ranges: list[_JoinedRange] = []
        by_kind: dict[tuple[int, Role, int], list[tuple[Use, Page]]] = {}
        for use in access:
            page = layout.pages[use.page]
            by_kind.setdefault((page.segment, page.role, page.component), []).append((use, page))
        for number, members in groupby(batch, lambda member: member[0].param_pages[0].segment):
            ranges = list(members)
            segment = layout.segments[number]
            items = [segment.ranges[position] for _, position in ranges]
            shards = tuple(dict.fromkeys(shard for item in items for shard in item.shards))
            joined = tuple(self._join(segment, used) for kind, used in by_kind.items() if kind[0] == number)
            item = Range(start=items[0].start, stop=items[-1].stop, shards=shards)
            self.ranges.append(_JoinedRange(segment, item, joined))
        self.nbytes = sum(self.sizes)

    def _join(self, segment: Segment, used: Sequence[tuple[Use, Page]]) -> tuple[Page, int, int]:
        """Append consecutive pages of one kind, array by array."""
        begin = sum(self.sizes)
        _, first = used[0]
        for component in _components(segment, first):
            for use, page in used:
                nbytes = page.count // component.each * ITEMSIZE[component.dtype]
                self.arrays.append(_Array(use, int(component.offset * page.count), nbytes))
                self.sizes.append(nbytes)
        end = sum(self.sizes)
        self.arrays.append(None)
        self.sizes.append(align_up(end, _ALIGNMENT) - end)
        return replace(first, count=sum(page.count for _, page in used), nbytes=end - begin), begin, end


def _components(segment: Segment, page: Page) -> Sequence[Component]:
    """Return the arrays in a page, in order."""
    fmt = segment.format
    if page.role is Role.PARAM:
        return (fmt.weights,)
    if page.role is Role.GRAD:
        return (Component(Role.GRAD, fmt.grads[page.component], 1, 0.0),)
    found = {component for part in fmt.components.values() for component in part if component.role is Role.UPDATE}
    return sorted(found, key=lambda component: component.offset)


class DevicePages:
    """GPU copies of the pages of batches that are being updated. The update thread calls all methods.

    Args:
        device: GPU that updates the pages.
        pager: waits for the GPU.
    """

    def __init__(self, layout: Layout, device: Device, pager: Pager) -> None:
        self._layout, self._device, self._pager = layout, device, pager
        # Cache slots and GPU bytes of the arrays that `leave` copies back
        self._back: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._batches: deque[DeviceEvent] = deque()  # events after batches that may be unfinished
        # Event after all work so far, set from `leave` until the next batch; all reservations of a batch share it
        self._left: DeviceEvent | None = None

    def begin(self, grads: Mapping[int, torch.Tensor] | None, arrived: Sequence[DeviceEvent]) -> Slices | None:
        """Begin the update of an FSDP module.

        Args:
            grads: flat gradients by shard; ``None`` if they are in pages.
            arrived: events after which the gradients are complete.

        Returns:
            The gradients by shard, each with the index of its first element in the segment; ``None`` if they are in
            pages.
        """
        self._left = None
        stream = self._device.stream("update")
        for device_event in arrived:
            device_event.before(stream)
        for grad in (grads or {}).values():
            self._device.keep(grad, stream)
        if grads is None:
            return None
        return {shard: (self._layout.shards[shard].start, grad) for shard, grad in grads.items()}

    def bring(self, joined: JoinedBatch, held: Mapping[int, Content], grads: Slices | None) -> list[RangePages]:
        """Start copying the pages of a batch to the GPU, and return their ranges for use in `on_stream`.

        Args:
            held: contents of the pages in cache slots, by page.
            grads: result of `begin`.

        Raises:
            StallError: if the GPU does not respond.
            Exception: the first error of the run, if the run has already failed.
        """
        while len(self._batches) >= BATCHES:
            self._pager.wait_for_device(self._batches.popleft(), "update pages")
        self._left = None
        coming, update = self._device.stream("in"), self._device.stream("update")
        with self._device.on(coming):
            memory = torch.empty(joined.nbytes, dtype=torch.uint8, device=self._device.name)
        there: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._back = [], []
        for array, part in zip(joined.arrays, memory.split_with_sizes(joined.sizes), strict=True):
            if array is not None:
                (page, mode), offset, nbytes = array
                source = torch.frombuffer(held[page], dtype=torch.uint8, offset=offset, count=nbytes)
                if mode is not Mode.WRITE:
                    there[0].append(part)
                    there[1].append(source)
                if mode is Mode.UPDATE or mode is Mode.WRITE:
                    self._back[0].append(source)
                    self._back[1].append(part)
        self._device.copy_all(*there, coming)
        self._device.record_event(coming).before(update)
        self._device.keep(memory, update)
        return [
            RangePages(self._layout, segment, item, [(page, memory[begin:end]) for page, begin, end in pages], grads)
            for segment, item, pages in joined.ranges
        ]

    def on_stream(self) -> AbstractContextManager[Any]:
        """Make this thread compute on the update stream."""
        return self._device.on(self._device.stream("update"))

    def leave(self) -> None:
        """End a batch, and start copying its modified pages back."""
        update = self._device.record_event(self._device.stream("update"))
        targets, sources = self._back
        if targets:
            back = self._device.stream("back")
            update.before(back)
            self._device.copy_all(targets, sources, back)
            self._device.keep(sources[0], back)  # all sources share one allocation
            self._left = update = self.record_event()
        self._back = [], []
        self._batches.append(update)

    def join(self) -> None:
        """Make the current stream wait for all updates so far, because scalar states may be on the GPU."""
        self._device.record_event(self._device.stream("update")).before(self._device.current())

    def record_event(self) -> DeviceEvent:
        """Return an event after all work on pages so far.

        If an update failed before its pages were copied back, no such event exists yet, so one is recorded here.
        """
        if self._left is not None:
            return self._left
        back = self._device.stream("back")
        for purpose in ("in", "update"):
            self._device.record_event(self._device.stream(purpose)).before(back)
        return self._device.record_event(back)
