"""Host cache: one fixed allocation of pinned memory, divided into cache slots of equal size."""

from __future__ import annotations

import torch

from infinity.errors import BudgetError
from infinity.hugepages import transfer_memory
from infinity.memory.device import Device
from infinity.units import format_size


class HostCache:
    """Page-aligned host memory of a fixed size, registered with the compute device.

    The memory is allocated and touched at once, so that a budget that does not fit fails before training. The size is
    exact, whereas torch's pinned allocator would round it up to a power of two. The assignment of pages to cache slots
    is not part of this class.

    Args:
        cache_slots: Number of cache slots.
        cache_slot_bytes: Size of a cache slot in bytes, a multiple of the alignment of direct transfers.
        device: Compute device.

    Raises:
        BudgetError: if too little memory is available.
    """

    def __init__(self, cache_slots: int, cache_slot_bytes: int, *, device: Device) -> None:
        self.cache_slots, self.cache_slot_bytes = cache_slots, cache_slot_bytes  # constant, like all attributes
        size = cache_slots * cache_slot_bytes
        try:
            self.memory = transfer_memory(size)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"cannot allocate a host cache of {format_size(size)} (memory.host_bytes): {error}"
            ) from error
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        # Pinned until `close`; the same thread creates and closes a host cache.
        self._pinned = device.pin(self.memory, cache_slot_bytes)

    @property
    def registered(self) -> bool:
        """``True`` if the device has registered the memory, so that copies are asynchronous."""
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
        """Return the given number of cache slots, starting with number `first`."""
        return HostCachePart(self, first, cache_slots)

    def close(self) -> None:
        """Unregister the memory. It is freed with its last view."""
        self._pinned.close()


class HostCachePart:
    """Part of a host cache. Its cache slots are numbered from 0."""

    def __init__(self, host_cache: HostCache, first: int, cache_slots: int) -> None:
        self._host_cache, self._first = host_cache, first
        self.cache_slots = cache_slots
        """Number of cache slots; constant."""

    def view(self, cache_slot: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes of a cache slot."""
        return self._host_cache.view(self._first + cache_slot, nbytes)
