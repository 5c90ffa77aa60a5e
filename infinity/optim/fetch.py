"""Copies of gradients from the GPU to the host, range by range, for updates on the CPU.

A *range* is a set of contiguous elements of an FSDP module that are updated together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from infinity.budget import FETCHED, range_gradient_bytes
from infinity.content.layout import Layout, Range
from infinity.memory.device import Device, DeviceEvent, transfer_bytes
from infinity.schedule.pager import Pager

_LAST_SECONDS = 5.0
"""Time that `close` waits for each copy that was not taken, in seconds."""
Slices = Mapping[int, tuple[int, torch.Tensor]]
"""Gradients of a range by shard, each with the index of its first element in the segment."""


class GradientFetcher:
    """Copy gradients to the host ahead of their update, through a pinned ring buffer.

    The update thread calls all methods, for one FSDP module at a time.

    Args:
        pager: waits for the device.
    """

    def __init__(self, layout: Layout, device: Device, pager: Pager) -> None:
        self._layout, self._device, self._pager = layout, device, pager
        # Size of a ring slot in bytes; a slot holds the gradients of one range
        self._ring: list[torch.Tensor] = []  # slots of dtype uint8; empty if no parameter is trained
        if slot_bytes := range_gradient_bytes(layout):
            ring, self._pinned = transfer_bytes(device, FETCHED * slot_bytes, slot_bytes)
            self._ring = [*ring.view(FETCHED, slot_bytes)]
        self._next = 0  # slot to fill next
        self._held = 0  # slots whose gradients were taken but not released
        # Flat gradients of the current FSDP module on the device, by shard
        self._grads: Mapping[int, torch.Tensor] = {}
        self._waiting: deque[Range] = deque()  # ranges whose copies have not begun
        # Gradients of the next ranges in order, and the events after their copies
        self._coming: deque[tuple[Slices, DeviceEvent]] = deque()

    def begin(self, grads: Mapping[int, torch.Tensor], arrived: Sequence[DeviceEvent], ranges: Sequence[Range]) -> None:
        """Start copying the gradients of an FSDP module.

        Args:
            grads: flat gradients by shard.
            arrived: events after which the gradients are complete.
            ranges: ranges of the update, in the order in which they will be taken.
        """
        stream = self._device.stream("back")
        for device_event in arrived:
            device_event.before(stream)
        self._grads, self._waiting = grads, deque(ranges)
        self._copy_ahead()

    def wait(self) -> None:
        """Wait for the gradients of the next range. Raises the same exceptions as `take`."""
        self._pager.wait_for_device(self._coming[0][1], "copy gradients")

    def take(self) -> Slices:
        """Wait for the gradients of the next range, which stay valid until `release`.

        Raises:
            StallError: if the device does not respond.
            Exception: the first error of the run, if the run has already failed.
        """
        self.wait()
        slices, _ = self._coming.popleft()
        self._held += 1
        return slices

    def release(self) -> None:
        """Release all gradients that were taken."""
        self._held = 0
        self._copy_ahead()
        if not self._coming:
            self._grads = {}

    def close(self) -> None:
        """Unregister the ring buffer if the device finishes its copies in time."""
        if self._ring and all(self._device.wait(device_event, _LAST_SECONDS) for _, device_event in self._coming):
            self._ring = []
            self._pinned.close()

    def _copy_ahead(self) -> None:
        while self._waiting and len(self._coming) + self._held < len(self._ring):
            self._coming.append(self._copy(self._waiting.popleft()))

    def _copy(self, item: Range) -> tuple[Slices, DeviceEvent]:
        stream = self._device.stream("back")
        slices: dict[int, tuple[int, torch.Tensor]] = {}
        for shard in item.shards:
            if shard not in self._grads:
                continue
            placed, grad = self._layout.shards[shard], self._grads[shard]
            low, high = max(placed.start, item.start), min(placed.start + placed.spec.numel, item.stop)
            target = self._ring[self._next].view(grad.dtype)[low - item.start : high - item.start]
            self._device.copy_all([target], [grad[low - placed.start : high - placed.start]], stream)
            slices[shard] = low, target
        self._next = (self._next + 1) % len(self._ring)
        return slices, self._device.record_event(stream)
