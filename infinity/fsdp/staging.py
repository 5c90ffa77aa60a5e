"""Prefetch weights to the GPU: a thread copies the weights of the next FSDP module while the current one computes.

[Note: GPU prefetch] Once an FSDP module has been gathered, the training thread reserves the pages of the next one. The
reservation counts as the planned access immediately, so the order of transfers does not depend on timing. The prefetch
thread waits for each page and copies it, on its own stream, into a slot in device memory. The reservation is returned
after the device event that follows the copy. The later gather then only copies within the device, and the slot is
reused after the last of these copies. *Kept* FSDP modules keep their slots until the step ends, so that later gathers
of the same modules do not read pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from infinity.content.layout import Layout, WeightPart
from infinity.content.views import torch_dtype
from infinity.errors import InfinityError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.tier import SLOTS, prefetched_modules, shard_bytes
from infinity.schedule.trace import Access, Event, gather_accesses
from infinity.schedule.update_schedule import UpdateSchedule

_Batch = tuple[Access, Reservation, Sequence[WeightPart]]
"""Reserved pages, and the weights in them."""


class _Slot:
    """Device memory for the weights of one FSDP module."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # bytes
        self.weights: dict[int, dict[int, torch.Tensor]] = {}  # views of the memory, by FSDP module and shard
        self.used: DeviceEvent | None = None  # recorded after the last use of the memory; None before the first use
        self.filled: Future[DeviceEvent] | None = None  # result: the event that follows all copies into the slot


class ModuleWeights:
    """Weights of one FSDP module: batches of their pages, and their slot in the GPU prefetch buffer."""

    def __init__(self, layout: Layout, fsdp_module: int) -> None:
        self.fsdp_module = fsdp_module
        self.batches = [
            *zip(gather_accesses(layout, fsdp_module), layout.fsdp_module_gathers[fsdp_module], strict=True)
        ]
        """Accesses to the pages of each batch, and the weights in them."""
        shards = layout.fsdp_module_shards[fsdp_module]
        offsets = [*accumulate((shard_bytes(layout, shard) for shard in shards), initial=0)]
        self.nbytes = offsets.pop()
        """Required size of a slot in bytes."""
        self.offsets = dict(zip(shards, offsets, strict=True))
        """Offset of each shard in a slot, in bytes."""
        self._padded = {
            shard: (layout.shards[shard].spec.padded, torch_dtype(layout.format_of(shard).param)) for shard in shards
        }  # number of elements and dtype
        self.own: _Slot | None = None
        """Slot that only this FSDP module uses, if its weights are kept."""
        self.slot: _Slot | None = None
        """Slot that holds or receives the weights."""

    def views(self, slot: _Slot) -> Mapping[int, torch.Tensor]:
        """Return the weights in a slot, flat, in the compute dtype, padding included, by shard."""
        if self.fsdp_module not in slot.weights:
            found = slot.weights[self.fsdp_module] = {}
            for shard, (padded, dtype) in self._padded.items():
                begin = self.offsets[shard]
                found[shard] = slot.memory[begin : begin + padded * dtype.itemsize].view(dtype)
        return slot.weights[self.fsdp_module]


class GpuPrefetcher:
    """GPU prefetch buffer: its slots, and the thread that fills them.

    `provide` allocates the slots. `stage` starts prefetching an FSDP module, and `weights` waits for its weights, which
    FSDP2 copies out of the slot. `release` frees the slot after these copies unless the FSDP module is kept. `drop`
    discards prefetched weights before they change. Only the training thread calls these methods.
    """

    def __init__(self, layout: Layout, pager: Pager, device: Device) -> None:
        self._pager, self._device = pager, device
        self.modules = [ModuleWeights(layout, fsdp_module) for fsdp_module in range(len(layout.fsdp_modules))]
        """Weights of each FSDP module."""
        self._free: deque[_Slot] = deque()  # free slots for FSDP modules that are not kept, next one first
        self._provided: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        """FSDP modules that have slots, and the kept ones among them."""
        self._thread: ThreadPoolExecutor | None = None  # started by `provide`

    def provide(self, update_schedule: UpdateSchedule, events: Sequence[Event]) -> None:
        """Allocate the slots for steps with the given events. If the slots change, prefetched weights are discarded.

        Raises:
            torch.OutOfMemoryError: If the device memory is too small. In that case, no slots remain.
        """
        prefetched = (
            frozenset(prefetched_modules(events, update_schedule)) if update_schedule.prefetched else frozenset()
        )
        kept = update_schedule.kept
        if (prefetched, kept) == self._provided:
            return
        self.drop()
        stream = self._device.stream("stage")
        slots = [*self._free, *(module.own for module in self.modules if module.own is not None)]
        self._free, self._provided = deque(), (frozenset(), frozenset())
        for module in self.modules:
            module.own = None
        for memory in [slot.memory for slot in slots]:
            self._device.keep(memory, stream)  # copies into it may still be running
        del slots
        passing = [self.modules[index].nbytes for index in prefetched - kept]
        free = [self._new_slot(max(passing)) for _ in range(SLOTS if passing else 0)]
        own = {index: self._new_slot(self.modules[index].nbytes) for index in sorted(kept)}
        for index, slot in own.items():
            self.modules[index].own = slot
        self._free, self._provided = deque(free), (prefetched, kept)
        self._device.record_event(self._device.current()).before(stream)  # after earlier uses of the same memory
        if prefetched and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "infinity-stage", self._device.enter_thread)

    def _new_slot(self, nbytes: int) -> _Slot:
        return _Slot(torch.empty(nbytes, dtype=torch.uint8, device=self._device.name))

    def has(self, fsdp_module: int) -> bool:
        """Return whether the weights of an FSDP module are prefetched."""
        return self.modules[fsdp_module].slot is not None

    def can_stage(self, fsdp_module: int) -> bool:
        """Return whether an FSDP module is not prefetched, and a slot is available for it.

        If a step deviates from the plan, weights that are prefetched but never gathered continue to occupy their slot.
        """
        module = self.modules[fsdp_module]
        return module.slot is None and (module.own is not None or bool(self._free))

    def stage(self, fsdp_module: int) -> None:
        """Start prefetching the weights of an FSDP module, and count this as the planned access to their pages.

        Raises the same exceptions as `Pager.reservation`.
        """
        if self._thread is None:
            raise InfinityError("the GPU prefetch buffer has no slots; call provide first")
        module = self.modules[fsdp_module]
        slot = module.slot = module.own or self._free.popleft()
        device_event = partial(self._device.record_event, self._device.stream("stage"))
        batches: deque[_Batch] = deque()
        for access, parts in module.batches:
            reservation = self._pager.reservation(access, threaded=True, copies=device_event, ahead=True)
            batches.append((access, reservation, parts))
        slot.filled = self._thread.submit(self._fill, slot.memory, slot.used, module, batches)
        slot.used = None

    def _fill(
        self, memory: torch.Tensor, used: DeviceEvent | None, module: ModuleWeights, batches: deque[_Batch]
    ) -> DeviceEvent:
        """Issue all copies into the memory of a slot, and return the event that follows. Runs in the prefetch thread.

        Args:
            memory: Memory of the slot.
            used: Event that follows earlier uses of the memory.
            module: FSDP module to prefetch.
            batches: Weights to copy.
        """
        stream = self._device.stream("stage")
        try:
            if used is not None:
                used.before(stream)
            while batches:
                access, reservation, parts = batches.popleft()
                with reservation as contents:
                    held: dict[int, Any] = {
                        use.page: content for use, content in zip(access, contents, strict=True)
                    }  # in cache slots, because weights of GPU-resident FSDP modules are not prefetched
                    targets, sources = [], []
                    for part in parts:
                        begin = module.offsets[part.shard] + part.begin
                        targets.append(memory[begin : begin + part.nbytes])
                        sources.append(
                            torch.frombuffer(held[part.page], dtype=torch.uint8, count=part.nbytes, offset=part.offset)
                        )
                    self._device.copy_all(targets, sources, stream)
            return self._device.record_event(stream)
        except Exception as error:
            self._pager.fail(error)  # the remaining reservations are never returned, so no thread may wait for them
            raise

    def weights(self, fsdp_module: int) -> Mapping[int, torch.Tensor]:
        """Return the prefetched weights of an FSDP module for later work on the current stream.

        They stay valid until `release`.

        Returns:
            Flat tensors in the compute dtype, padding included, by shard.

        Raises:
            Exception: The error that occurred while the pages were read.
        """
        module = self.modules[fsdp_module]
        assert module.slot is not None
        self._filled(module.slot).before(self._device.current())
        return module.views(module.slot)

    def release(self, fsdp_module: int) -> None:
        """Free the slot of an FSDP module, unless the module is kept, after the work queued on the current stream."""
        module = self.modules[fsdp_module]
        assert module.slot is not None
        module.slot.used = self._device.record_event(self._device.current())
        if module.own is None:
            self._free.append(module.slot)
            module.slot = None

    def _filled(self, slot: _Slot) -> DeviceEvent:
        """Wait until all copies into a slot have been issued.

        Raises the error that stopped the copies, or the pager's first error.
        """
        assert slot.filled is not None
        self._pager.wait_for_job(slot.filled, "read")
        return slot.filled.result()

    def drop(self, fsdp_module: int | None = None) -> None:
        """Discard the prefetched weights of one FSDP module, or of all (``None``), before the weights change."""
        for module in self.modules if fsdp_module is None else [self.modules[fsdp_module]]:
            slot, module.slot = module.slot, None
            if slot is not None:
                with suppress(Exception):  # the pager stores the error and raises it at the next access
                    slot.used = slot.used or self._filled(slot)
                if module.own is None:
                    self._free.append(slot)

    def close(self) -> None:
        """Stop the thread and discard copies that have not started."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._free = deque()
        for module in self.modules:
            module.own = module.slot = None
