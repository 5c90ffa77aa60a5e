"""Pages that are updated on the GPU, and their copies to and from cache slots.

[Note: updates on the device] A *range* is a set of contiguous elements of an FSDP module that are updated together. The
pages of a batch of ranges are copied to the GPU, updated there by the same code as in host memory, and copied back.
Each of these operations has its own stream, so that one batch is copied while the previous one is updated. A page stays
on the GPU until the last range that needs it has been updated. A page reservation ends with the event after the copies
back, so that a cache slot is not used before it holds the result of the update. Pages of GPU-resident FSDP modules are
updated in place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.budget import BATCHES
from infinity.content.layout import Layout
from infinity.content.views import Content, bytes_of
from infinity.memory.device import Device, DeviceEvent
from infinity.optim.fetch import Slices
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access


class DevicePages:
    """GPU copies of the pages of the FSDP module that is being updated. The update thread calls all methods.

    Args:
        device: GPU that updates the pages.
        pager: waits for the GPU.
    """

    def __init__(self, layout: Layout, device: Device, pager: Pager) -> None:
        self._layout, self._device, self._pager = layout, device, pager
        self._pages: dict[int, torch.Tensor] = {}  # bytes on the GPU, by page
        self._needed: Counter[int] = Counter()  # number of remaining ranges that need a page, by page
        # Cache slot and GPU bytes of the pages that `leave` copies back
        self._back: dict[int, tuple[memoryview, torch.Tensor]] = {}
        self._batches: deque[DeviceEvent] = deque()  # events after batches that may be unfinished
        # Event after all work so far, set from `leave` until the next batch; all reservations of a batch share it
        self._left: DeviceEvent | None = None

    def begin(
        self, grads: Mapping[int, torch.Tensor] | None, arrived: Sequence[DeviceEvent], accesses: Iterable[Access]
    ) -> Slices | None:
        """Begin the update of an FSDP module.

        Args:
            grads: flat gradients by shard; ``None`` if they are in pages.
            arrived: events after which the gradients are complete.
            accesses: page accesses of all ranges of the FSDP module.

        Returns:
            The gradients by shard, each with the index of its first element in the segment; ``None`` if they are in
            pages.
        """
        self._needed = Counter(use.page for access in accesses for use in access)
        self._left = None
        stream = self._device.stream("update")
        for device_event in arrived:
            device_event.before(stream)
        for grad in (grads or {}).values():
            self._device.keep(grad, stream)
        if grads is None:
            return None
        return {shard: (self._layout.shards[shard].start, grad) for shard, grad in grads.items()}

    def bring(self, access: Access, contents: Sequence[Content]) -> list[torch.Tensor]:
        """Start copying the pages of a range to the GPU, and return the copies for use in `on_stream`.

        GPU-resident pages are returned as they are.

        Raises:
            StallError: if the GPU does not respond.
            Exception: the first error of the run, if the run has already failed.
        """
        while len(self._batches) >= BATCHES:
            self._pager.wait_for_device(self._batches.popleft(), "update pages")
        self._left = None
        if isinstance(contents[0], torch.Tensor):  # GPU-resident
            return list(contents)
        coming, update = self._device.stream("in"), self._device.stream("update")
        missing = [(use, content) for use, content in zip(access, contents, strict=True) if use.page not in self._pages]
        if missing:
            with self._device.on(coming):
                memory = torch.empty(
                    sum(len(content) for _, content in missing), dtype=torch.uint8, device=self._device.name
                )
            new = memory.split_with_sizes([len(content) for _, content in missing])
            self._pages.update((use.page, page) for (use, _), page in zip(missing, new, strict=True))
            fetched = [
                (page, bytes_of(content)) for (use, content), page in zip(missing, new, strict=True) if use.mode.fetches
            ]
            self._device.copy_all([page for page, _ in fetched], [source for _, source in fetched], coming)
            self._device.keep(memory, update)
        found = [self._pages[use.page] for use in access]
        for use, content, page in zip(access, contents, found, strict=True):
            self._needed[use.page] -= 1
            if use.mode.modifies:
                self._back[use.page] = content, page
            if not self._needed[use.page]:
                del self._pages[use.page]
        self._device.record_event(coming).before(update)
        return found

    def on_stream(self) -> AbstractContextManager[Any]:
        """Make this thread compute on the update stream."""
        return self._device.on(self._device.stream("update"))

    def leave(self) -> None:
        """End a batch, and start copying back the pages that no later range of the FSDP module needs."""
        if not self._back:
            self._batches.append(self._device.record_event(self._device.stream("update")))
            return
        back = self._device.stream("back")
        self._device.record_event(self._device.stream("update")).before(back)
        done = [index for index in self._back if not self._needed[index]]
        moved = [self._back.pop(index) for index in done]
        self._device.copy_all([bytes_of(content) for content, _ in moved], [page for _, page in moved], back)
        for _, page in moved:
            self._device.keep(page, back)
        self._left = self.record_event()
        self._batches.append(self._left)

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
