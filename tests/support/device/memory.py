"""Map from addresses to allocations: pieces of pinned memory, and storages of tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable

import torch

from infinity.memory.device import Pinned
from support.device.clocks import Actor, Clock, Memory, Races, Span, merge


class PinnedMemory(Pinned):
    """Registered host memory, divided into pieces: slots of the host cache or of a ring buffer."""

    def __init__(self, memory: memoryview, piece: int, name: str, closing: Callable[[PinnedMemory], None]) -> None:
        self.start, self.nbytes = address_of(memory), memory.nbytes
        self._piece, self._closing = piece, closing
        self.pieces = [Memory(f"{name}, piece {index}", on_host=True) for index in range(-(-memory.nbytes // piece))]

    @property
    def registered(self) -> bool:
        return self.nbytes > 0

    def close(self) -> None:
        self._closing(self)

    def at(self, low: int, high: int) -> list[Span]:
        """Return the pieces that contain a range of addresses, or an empty list."""
        if not self.start <= low < self.start + self.nbytes:
            return []
        first, last = (low - self.start) // self._piece, (high - 1 - self.start) // self._piece
        return [Span(piece, low, high) for piece in self.pieces[first : last + 1]]


def address_of(memory: memoryview) -> int:
    """Return the address of a buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class MemoryMap:
    """Track allocation and release of the memory of tensors. The caller must hold the lock of the simulation.

    The next allocation of a stream may reuse released memory of this stream. Like the allocator of an accelerator, it
    does not wait for other streams, except for those passed to `record_stream` (`kept`).
    """

    def __init__(self, races: Races, clock: Callable[[], Clock]) -> None:
        self._races, self._clock = races, clock  # clock of the calling thread
        self.pinned: list[PinnedMemory] = []
        self._storages: dict[int, Memory] = {}  # by address of the storage object
        # Deleted storages, and clocks of the threads that deleted them. Finalizers append to this queue in any thread,
        # so that they must not take a lock.
        self._deleted: deque[tuple[int, Clock]] = deque()
        # By stream: memory that its next allocation may reuse, the minimum clock, and the number of the release.
        self._free: dict[Actor, list[tuple[Memory, Clock, int]]] = {}
        self._freed = 0  # number of freed storages

    def pin(self, memory: memoryview, piece: int, name: str) -> PinnedMemory:
        """Register memory."""

        def close(pinned: PinnedMemory) -> None:
            if pinned in self.pinned:
                self.pinned.remove(pinned)
                for part in pinned.pieces:
                    self._races.end(self._clock(), part, "unregistering it")

        pinned = PinnedMemory(memory, piece, name, close)
        self.pinned.append(pinned)
        return pinned

    def at(self, memory: memoryview) -> list[Span]:
        """Return the pinned pieces that contain a buffer."""
        address = address_of(memory)
        return [span for pinned in self.pinned for span in pinned.at(address, address + memory.nbytes)]

    def of(self, tensor: torch.Tensor) -> list[Span]:
        """Return the allocations that contain the elements of a tensor. Empty for empty tensors."""
        if not tensor.numel():
            return []
        low = tensor.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        high = low + (reach + 1) * tensor.itemsize
        for pinned in self.pinned:
            if spans := pinned.at(low, high):
                return spans
        return [Span(self._of(tensor.untyped_storage()), low, high)]

    def _of(self, storage: torch.UntypedStorage) -> Memory:
        self._process_deleted()
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = Memory(f"a tensor of {storage.nbytes()} bytes")
            weakref.finalize(storage, self._record_deleted, storage._cdata).atexit = False
        return found

    def allocate(self, storage: torch.UntypedStorage, stream: Actor, what: str, *, placed: bool) -> Memory:
        """Record the allocation of a storage. If `placed`, it is device memory of the current stream."""
        memory = self._of(storage)
        memory.name = f"{storage.nbytes()} bytes for {what}"
        memory.birth = stream, dict(stream.clock), self._freed
        if placed:
            self.place(memory, stream)
        return memory

    def place(self, memory: Memory, stream: Actor) -> None:
        """Record that memory is on the device, if this was unknown. It may reuse memory freed before its allocation.

        Args:
            memory: Memory.
            stream: Stream that uses it, which becomes its owner if its allocation was not recorded.
        """
        if memory.owner is not None or memory.on_host:
            return
        if memory.birth is None:  # allocated before the simulation started
            memory.owner = stream
            return
        stream, birth_clock, freed = memory.birth
        memory.owner = stream
        pool = self._free.pop(stream, [])
        self._free[stream] = [item for item in pool if item[2] >= freed]
        for before, clock, number in pool:
            if number < freed:
                merge(clock, birth_clock)
                self._races.end(clock, before, f"reuse for {memory.name} ({stream.name}) after it was freed")

    def release(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage releases its memory, but continues to exist."""
        self._process_deleted()
        memory = self._storages.get(storage._cdata)
        if memory is not None:
            self._to_pool(memory, dict(self._clock()))
            self._storages[storage._cdata] = Memory(memory.name)

    def _record_deleted(self, storage: int) -> None:
        self._deleted.append((storage, dict(self._clock())))

    def _process_deleted(self) -> None:
        while self._deleted:
            storage, clock = self._deleted.popleft()
            memory = self._storages.pop(storage, None)
            if memory is not None:
                self._to_pool(memory, clock)

    def _to_pool(self, memory: Memory, clock: Clock) -> None:
        if memory.owner is not None and memory.uses:
            self._free.setdefault(memory.owner, []).append((memory, clock, self._freed))
            self._freed += 1
