"""The host arena: one fixed allocation, cut into frames of one size."""

from __future__ import annotations

import torch

from infinity.errors import BudgetError
from infinity.hugepages import transfer_memory
from infinity.memory.device import Device
from infinity.units import format_size


class Arena:
    """Page-aligned host memory of a fixed size, registered with the device that computes.

    Allocated once and touched at once, so that a budget that does not fit fails before training. Exact sizes:
    torch's own pinned allocator would round up to a power of two. Which page has which frame is not known here.

    Args:
        frames: their number.
        frame_bytes: size of each in bytes, a multiple of what direct transfers are aligned to.
        device: what computes.

    Raises:
        BudgetError: there is not so much memory.
    """

    def __init__(self, frames: int, frame_bytes: int, *, device: Device) -> None:
        self.frames, self.frame_bytes = frames, frame_bytes  # fixed, as all below
        size = frames * frame_bytes
        try:
            self.memory = transfer_memory(size)  # all bytes of the arena
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"cannot allocate a host arena of {format_size(size)} (memory.host_bytes): {error}"
            ) from error
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)  # the same bytes as a tensor of one dimension
        self._pinned = device.pin(self.memory, frame_bytes)  # ends with `close`; one thread makes and closes an arena

    @property
    def registered(self) -> bool:
        """Whether the device has it registered, so that copies run beside the host."""
        return self._pinned.registered

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.frames * self.frame_bytes

    def view(self, frame: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of a frame."""
        start = frame * self.frame_bytes
        return self.memory[start : start + nbytes]

    def part(self, first: int, frames: int) -> ArenaPart:
        """Return so many of its frames, from number `first` on."""
        return ArenaPart(self, first, frames)

    def close(self) -> None:
        """Unregister. The memory itself goes when the last view of it does."""
        self._pinned.close()


class ArenaPart:
    """Some frames of an arena, numbered from 0."""

    def __init__(self, arena: Arena, first: int, frames: int) -> None:
        self._arena, self._first = arena, first
        self.frames = frames
        """Their number; fixed."""

    def view(self, frame: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of a frame."""
        return self._arena.view(self._first + frame, nbytes)
