"""Host cache: a single fixed-size allocation of pinned memory, divided into cache slots of equal size."""

from __future__ import annotations

from infinity.errors import BudgetError
from infinity.hugepages import transfer_memory
from infinity.memory.device import Device
from infinity.units import format_size


class HostCache:
    """Fixed-size, page-aligned host memory that is registered with the compute device, on the device's NUMA node.

    The constructor allocates and touches all of the memory, so that a size that does not fit causes an error before
    training starts. The size is exact, whereas PyTorch's pinned memory allocator would round it up to a power of two.
    This class does not assign pages to cache slots.

    Args:
        cache_slots: Number of cache slots.
        cache_slot_bytes: Size of a cache slot in bytes. Must be a multiple of the alignment of direct I/O.
        device: Compute device with which the memory is registered.

    Raises:
        BudgetError: if the memory cannot be allocated.
    """

    def __init__(self, cache_slots: int, cache_slot_bytes: int, *, device: Device) -> None:
        size = cache_slots * cache_slot_bytes
        try:
            self.memory = transfer_memory(size, device.numa_node())
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"cannot allocate a host cache of {format_size(size)}: {error}; decrease memory.host_bytes"
            ) from error
        self.cache_slots = [self.memory[start : start + cache_slot_bytes] for start in range(0, size, cache_slot_bytes)]
        """Memory of each cache slot."""
        # Registered until `close`. The same thread creates and closes a host cache.
        self._pinned = device.pin(self.memory, cache_slot_bytes)

    @property
    def registered(self) -> bool:
        """``True`` if the memory is registered with the device, so that copies are asynchronous."""
        return self._pinned.registered

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return self.memory.nbytes

    def close(self) -> None:
        """Unregister the memory. It is freed when the last view of it is gone."""
        self._pinned.close()
