"""Pages that are updated on the GPU, and their copies to and from cache slots.

[Note: updates on the device] The pages of a batch are copied to the GPU, updated there by the same code as in host
memory, and copied back. Each of these operations has its own stream, so that one batch is copied while the previous one
is updated. On the GPU, consecutive pages of the same kind are joined into one page, so that the optimizer updates each
parameter of the batch in one piece. When a reservation ends, its pages stay pinned until the device has passed the
event after the copies back, so that a cache slot is not used before it holds the result of the update. Pages of
GPU-resident FSDP modules are updated in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch

from infinity.budget import BATCHES_ON_DEVICE
from infinity.content.format import Role
from infinity.content.joined import JoinedPages
from infinity.content.layout import Layout, Page, Range, RangeBatch
from infinity.content.views import Content, bytes_of
from infinity.memory.device import Device, DeviceEvent
from infinity.optim.fetch import Slices
from infinity.optim.update import RangePages
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access, Use

_MOST_QUEUED = BATCHES_ON_DEVICE + 1
"""Maximum number of unfinished batches. It limits the gradients that wait for an update, and the pinned pages. The
additional batch keeps the link busy until this thread learns that a batch has finished.
"""


class JoinedBatch:
    """Arrangement of a batch on the GPU.

    Attributes:
        ranges: consecutive ranges of each segment as one range.
        joined: the parts of its pages that contain these ranges.
        replaced: pages of weights whose parts are replaced. Several batches may copy parts of them back, one after
            another on the same stream, so no batch has to wait for the previous one.
        fetched: pages whose parts are copied to the GPU.
        modified: pages whose parts are copied back.
        slots: contents of cache slots and views of the arrays in them, from the previous update. Most pages keep their
            cache slots.
    """

    def __init__(self, layout: Layout, batch: RangeBatch, access: Access) -> None:
        self.ranges: list[tuple[int, Range]] = []
        for segment, members in groupby(batch, lambda member: member[0].param_pages[0].segment):
            items = [of.ranges[position] for of, position in members]
            shards = tuple(dict.fromkeys(shard for item in items for shard in item.shards))
            self.ranges.append((segment, Range(start=items[0].start, stop=items[-1].stop, shards=shards)))
        within = {segment: (item.start, item.stop) for segment, item in self.ranges}
        self.joined = JoinedPages(layout, [layout.pages[use.page] for use in access], within)
        self.replaced = {use.page for use in access if _is_replaced(layout, use)}
        self.fetched = {use.page for use in access if use.mode.fetches} - self.replaced
        self.modified = {use.page for use in access if use.mode.modifies}
        self.slots: list[tuple[Content, torch.Tensor] | None] = [None] * len(self.joined.arrays)


def _is_replaced(layout: Layout, use: Use) -> bool:
    """Return whether an update replaces its part of a page of weights. Other parts stay in the cache slot."""
    page = layout.pages[use.page]
    return page.role is Role.PARAM and layout.segments[page.segment].format.replaces_weights


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
        # Memory of the next batches, and the event after the last work on it. The next batch uses the first one.
        self._memory: deque[tuple[torch.Tensor, DeviceEvent]] = deque()
        # Event after all work so far, set from `leave` until the next batch; all reservations of a batch share it
        self._left: DeviceEvent | None = None

    def begin(self, grads: Iterable[torch.Tensor], arrived: Sequence[DeviceEvent]) -> None:
        """Begin the update of an FSDP module.

        Args:
            grads: gradients that are not in pages.
            arrived: events after which the gradients are complete.
        """
        self._left = None
        stream = self._device.stream("update")
        for device_event in arrived:
            device_event.before(stream)
        for grad in grads:
            self._device.keep(grad, stream)

    def bring(self, batch: JoinedBatch, held: Mapping[int, Content], grads: Slices | None) -> list[RangePages]:
        """Start copying the pages of a batch to the GPU, and return their ranges for use in `on_stream`.

        Args:
            held: contents of the pages, by page. GPU-resident pages are updated in place.
            grads: gradients by shard; ``None`` if they are in pages.

        Raises:
            torch.OutOfMemoryError: if the GPU has too little memory even when no other batch is on it.
            StallError: if the GPU does not respond.
            Exception: the first error of the run, if the run has already failed.
        """
        while len(self._batches) >= _MOST_QUEUED:
            self._pager.wait_for_device(self._batches.popleft(), "update pages")
        self._left = None
        page, content = next(iter(held.items()))
        if not isinstance(content, memoryview):
            return self._ranges(batch, self._pager.joined_pages(self._layout.pages[page].fsdp_module), grads)
        coming, update = self._device.stream("in"), self._device.stream("update")
        joined = batch.joined
        memory = self._memory_of(joined.nbytes)
        there: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._back = [], []
        parts = memory.split_with_sizes(joined.sizes)
        for number, ((page, offset, nbytes), part) in enumerate(zip(joined.arrays, parts, strict=True)):
            if page >= 0:
                content, slot = held[page], batch.slots[number]
                if slot is None or slot[0] is not content:
                    slot = batch.slots[number] = content, bytes_of(content, offset, nbytes)
                source = slot[1]
                if page in batch.fetched:
                    there[0].append(part)
                    there[1].append(source)
                if page in batch.modified:
                    self._back[0].append(source)
                    self._back[1].append(part)
        self._device.copy_all(*there, coming)
        self._device.record_event(coming).before(update)
        return self._ranges(batch, [(page, memory[begin:end]) for page, begin, end in joined.pages], grads)

    def _memory_of(self, nbytes: int) -> torch.Tensor:
        """Return memory for the next batch, and make the stream of copies to the GPU wait for earlier work on it.

        Batches use `BATCHES_ON_DEVICE` buffers in turns. The buffers stay allocated.
        """
        coming = self._device.stream("in")
        if len(self._memory) == BATCHES_ON_DEVICE:
            memory, left = self._memory[0]
            left.before(coming)
            if memory.nbytes >= nbytes:
                return memory[:nbytes]
            self._memory.popleft()
            del memory  # it is too small, so free it first
        with self._device.on(coming):
            memory = self._allocate(nbytes)
        self._memory.appendleft((memory, DeviceEvent()))
        return memory

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError:  # the allocator reuses memory that finished work has released
            while self._batches:
                self._pager.wait_for_device(self._batches.popleft(), "update pages")
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.name)

    def _ranges(
        self, batch: JoinedBatch, pages: Sequence[tuple[Page, Content]], grads: Slices | None
    ) -> list[RangePages]:
        """Return the ranges of a batch whose joined pages are on the GPU. The pages may extend beyond the batch."""
        return [
            RangePages(
                self._layout,
                self._layout.segments[segment],
                item,
                [(page, content) for page, content in pages if page.segment == segment],
                grads,
            )
            for segment, item in batch.ranges
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
            self._device.keep(sources[0], back)  # a larger batch may replace the buffer, which all sources share
            self._left = update = self.record_event()
            self._memory.append((self._memory.popleft()[0], update))
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
