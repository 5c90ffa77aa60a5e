"""The host cache: one fixed allocation, cut into cache slots of one size."""

from __future__ import annotations

import torch

from infinity.errors import BudgetError
from infinity.hugepages import transfer_memory
from infinity.memory.device import Device
from infinity.units import format_size


class HostCache:
    """Page-aligned host memory of a fixed size, registered with the device that computes.

    Allocated once and touched at once, so that a budget that does not fit fails before training. Exact sizes:
    torch's own pinned allocator would round up to a power of two. Which page has which cache slot is not known here.

    Args:
        cache slots: their number.
        cache_slot_bytes: size of each in bytes, a multiple of what direct transfers are aligned to.
        device: what computes.

    Raises:
        BudgetError: there is not so much memory.
    """

    def __init__(self, cache_slots: int, cache_slot_bytes: int, *, device: Device) -> None:
        self.cache_slots, self.cache_slot_bytes = cache_slots, cache_slot_bytes  # fixed, as all below
        size = cache_slots * cache_slot_bytes
        try:
            self.memory = transfer_memory(size)  # all bytes of the host cache
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"cannot allocate a host cache of {format_size(size)} (memory.host_bytes): {error}"
            ) from error
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)  # the same bytes as a tensor of one dimension
        self._pinned = device.pin(
            self.memory, cache_slot_bytes
        )  # ends with `close`; one thread makes and closes a host cache

    @property
    def registered(self) -> bool:
        """Whether the device has it registered, so that copies run beside the host."""
        return self._pinned.registered

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.cache_slots * self.cache_slot_bytes

    def view(self, cache_slot: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of a cache slot."""
        start = cache_slot * self.cache_slot_bytes
        return self.memory[start : start + nbytes]

    def part(self, first: int, cache_slots: int) -> HostCachePart:
        """Return so many of its cache slots, from number `first` on."""
        return HostCachePart(self, first, cache_slots)

    def close(self) -> None:
        """Unregister. The memory itself goes when the last view of it does."""
        self._pinned.close()


class HostCachePart:
    """Some cache slots of a host cache, numbered from 0."""

    def __init__(self, host_cache: HostCache, first: int, cache_slots: int) -> None:
        self._host_cache, self._first = host_cache, first
        self.cache_slots = cache_slots
        """Their number; fixed."""

    def view(self, cache_slot: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of a cache slot."""
        return self._host_cache.view(self._first + cache_slot, nbytes)
