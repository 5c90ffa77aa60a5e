"""Updates on the device: copies of pages there, between their cache slots and the optimizer.

[Note: updates on the device] The pages of a batch of ranges are copied to the device, updated there by the same code as
in memory, and copied back; each of the three has a stream, so that a batch is copied while the one before is updated.
A page that later ranges of the FSDP module need too stays on the device until the last of them. The pages' reservations
are returned
behind the mark of the copies back, so nobody uses a cache slot before it has what the update made of it. Pages of FSDP
modules that
live there are updated where they are.
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
    """The pages of the FSDP module that is being updated, on the device. The thread of updates calls all methods.

    Args:
        layout: pages of this rank.
        device: that updates.
        pager: waits for it.
    """

    def __init__(self, layout: Layout, device: Device, pager: Pager) -> None:
        self._layout, self._device, self._pager = layout, device, pager
        self._pages: dict[int, torch.Tensor] = {}  # by page, its bytes on the device
        self._needed: Counter[int] = Counter()  # by page, how many ranges of the FSDP module are still to use it
        self._back: dict[int, tuple[memoryview, torch.Tensor]] = {}  # what `leave` copies back: cache slot and page
        self._batches: deque[DeviceEvent] = deque()  # behind batches that may not have ended
        self._left: DeviceEvent | None = (
            None  # behind all so far, from `leave` until more is begun: for all reservations of a batch
        )

    def begin(
        self, grads: Mapping[int, torch.Tensor] | None, arrived: Sequence[DeviceEvent], accesses: Iterable[Access]
    ) -> Slices | None:
        """Take an FSDP module in hand; return its gradients, or None where they are in pages.

        Args:
            grads: by shard, flat; None where they are in pages.
            arrived: where the device has them.
            accesses: of all its ranges.
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
        """Begin to copy the pages of a range to the device; return their bytes there, for what runs `on_stream`.

        Those that live there are returned as they are.

        Raises:
            StallError: the device does not answer.
            Exception: the first error, if something has failed before.
        """
        while len(self._batches) >= BATCHES:
            self._pager.wait_for_device(self._batches.popleft(), "update pages")
        self._left = None
        coming, update = self._device.stream("in"), self._device.stream("update")
        found = []
        for use, content in zip(access, contents, strict=True):
            if isinstance(content, torch.Tensor):
                found.append(content)
                continue
            self._needed[use.page] -= 1
            if use.page not in self._pages:
                with self._device.on(coming):
                    self._pages[use.page] = torch.empty(len(content), dtype=torch.uint8, device=self._device.name)
                if use.mode.fetches:
                    self._device.copy(self._pages[use.page], bytes_of(content), coming)
            page = self._pages[use.page]
            found.append(page)
            if use.mode.modifies:
                self._back[use.page] = content, page
            if not self._needed[use.page]:
                del self._pages[use.page]
            self._device.keep(page, update)
        self._device.record_event(coming).before(update)
        return found

    def on_stream(self) -> AbstractContextManager[Any]:
        """Let this thread compute on the stream of updates."""
        return self._device.on(self._device.stream("update"))

    def leave(self) -> None:
        """End a batch: begin to copy back what no later range of the FSDP module needs."""
        if not self._back:
            self._batches.append(self._device.record_event(self._device.stream("update")))
            return
        back = self._device.stream("back")
        self._device.record_event(self._device.stream("update")).before(back)
        for index, (content, page) in list(self._back.items()):
            if not self._needed[index]:
                self._device.copy(bytes_of(content), page, back)
                self._device.keep(page, back)
                del self._back[index]
        self._left = self.record_event()
        self._batches.append(self._left)

    def join(self) -> None:
        """Let this thread's stream wait for all updates so far: what the optimizer counts may be on the device."""
        self._device.record_event(self._device.stream("update")).before(self._device.current())

    def record_event(self) -> DeviceEvent:
        """Return a mark behind all that was done with pages so far: an update that has failed has not copied back."""
        if self._left is not None:
            return self._left
        back = self._device.stream("back")
        for purpose in ("in", "update"):
            self._device.record_event(self._device.stream(purpose)).before(back)
        return self._device.record_event(back)
