"""Which memory is which: pinned memory by its pieces, everything else by the storage of tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable

import torch

from infinity.memory.device import Pinned
from support.device.clocks import Actor, Clock, Memory, Races, Span, merge


class PinnedMemory(Pinned):
    """Host memory that is registered, in pieces that are used as one: cache slots of a host cache, slots of a ring."""

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
        """Return the pieces that some bytes lie in; none if they are elsewhere."""
        if not self.start <= low < self.start + self.nbytes:
            return []
        first, last = (low - self.start) // self._piece, (high - 1 - self.start) // self._piece
        return [Span(piece, low, high) for piece in self.pieces[first : last + 1]]


def address_of(memory: memoryview) -> int:
    """Return where some bytes begin."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class MemoryMap:
    """Knows the memory of tensors, and notes when it is allocated and given back. All is called under one lock.

    What is given back may be used again by the next allocation of its stream, whatever that is for: the allocator of an
    accelerator waits for no other stream, but for those that it was told of (`kept`).
    """

    def __init__(self, races: Races, clock: Callable[[], Clock]) -> None:
        self._races, self._clock = races, clock  # the clock of the thread that asks
        self.pinned: list[PinnedMemory] = []
        self._storages: dict[int, Memory] = {}  # by address of the storage's object
        # Storages that are gone, and what the thread was behind that let go of them. Appended to from within the
        # collector, by any thread: one call, without a lock.
        self._gone: deque[tuple[int, Clock]] = deque()
        # By stream, what its next allocation may use, what that is behind at least, and its number.
        self._free: dict[Actor, list[tuple[Memory, Clock, int]]] = {}
        self._freed = 0  # storages that were freed

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
        """Return the pinned pieces that some bytes lie in."""
        address = address_of(memory)
        return [span for pinned in self.pinned for span in pinned.at(address, address + memory.nbytes)]

    def of(self, tensor: torch.Tensor) -> list[Span]:
        """Return what the elements of a tensor lie in, from the first to the last; none of an empty one."""
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
        self._bury()
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = Memory(f"a tensor of {storage.nbytes()} bytes")
            weakref.finalize(storage, self._note_end, storage._cdata).atexit = False
        return found

    def allocate(self, storage: torch.UntypedStorage, stream: Actor, what: str, *, placed: bool) -> Memory:
        """Note that a storage gets memory while a stream is current; `placed`: in its order."""
        memory = self._of(storage)
        memory.name = f"{storage.nbytes()} bytes for {what}"
        memory.birth = stream, dict(stream.clock), self._freed
        if placed:
            self.place(memory, stream)
        return memory

    def place(self, memory: Memory, stream: Actor) -> None:
        """Note that memory is the device's, where that was not known: it may be what was freed before its birth.

        Args:
            stream: that uses it; its owner if nobody has seen it allocated.
        """
        if memory.owner is not None or memory.on_host:
            return
        if memory.birth is None:  # it was there before anything was looked at
            memory.owner = stream
            return
        stream, behind, freed = memory.birth
        memory.owner = stream
        pool = self._free.pop(stream, [])
        self._free[stream] = [item for item in pool if item[2] >= freed]
        for before, clock, number in pool:
            if number < freed:
                merge(clock, behind)
                self._races.end(clock, before, f"using it again for {memory.name} ({stream.name}), once it was freed,")

    def release(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage gives its memory back, and lives on."""
        self._bury()
        memory = self._storages.get(storage._cdata)
        if memory is not None:
            self._to_pool(memory, dict(self._clock()))
            self._storages[storage._cdata] = Memory(memory.name)

    def _note_end(self, storage: int) -> None:
        self._gone.append((storage, dict(self._clock())))

    def _bury(self) -> None:
        while self._gone:
            storage, clock = self._gone.popleft()
            memory = self._storages.pop(storage, None)
            if memory is not None:
                self._to_pool(memory, clock)

    def _to_pool(self, memory: Memory, clock: Clock) -> None:
        if memory.owner is not None and memory.uses:
            self._free.setdefault(memory.owner, []).append((memory, clock, self._freed))
            self._freed += 1
