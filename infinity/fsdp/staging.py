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
from typing import NamedTuple

import torch

from infinity.content.layout import Layout, WeightPart
from infinity.content.views import bytes_of, torch_dtype
from infinity.errors import InfinityError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.tier import SLOTS, fsdp_module_bytes, prefetched_modules, shard_bytes
from infinity.schedule.trace import Event, gather_accesses
from infinity.schedule.update_schedule import UpdateSchedule


class _WeightBatch(NamedTuple):
    """Weights whose pages are held at the same time."""

    reservation: Reservation
    parts: Sequence[WeightPart]


class _Slot:
    """Device memory for the weights of one FSDP module."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # bytes
        self.weights: dict[int, dict[int, torch.Tensor]] = {}  # views of the memory, by FSDP module and shard
        self.used: DeviceEvent | None = None  # recorded after the last use of the memory; None before the first use
        self.filled: Future[DeviceEvent] | None = None  # result: the event that follows all copies into the slot


class GpuPrefetcher:
    """GPU prefetch buffer: its slots, and the thread that fills them.

    `provide` allocates the slots. `stage` starts prefetching an FSDP module, and `weights` waits for its weights, which
    FSDP2 copies out of the slot. `release` frees the slot after these copies unless the FSDP module is kept. `drop`
    discards prefetched weights before they change. Only the training thread calls these methods.
    """

    def __init__(self, layout: Layout, pager: Pager, device: Device) -> None:
        self._layout, self._pager, self._device = layout, pager, device
        self._free: deque[_Slot] = deque()  # free slots for FSDP modules that are not kept, next one first
        self._own: dict[int, _Slot] = {}  # slots of kept FSDP modules
        self._prefetched: dict[int, _Slot] = {}  # slot that holds or receives the weights, by FSDP module
        self._provided: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        """FSDP modules that have slots, and the kept ones among them."""
        self._thread: ThreadPoolExecutor | None = None  # started by `provide`
        self._offsets: dict[int, int] = {}  # offset in the slot by shard, in bytes
        self._gathers = [
            [*zip(gather_accesses(layout, fsdp_module), batches, strict=True)]
            for fsdp_module, batches in enumerate(layout.fsdp_module_gathers)
        ]
        for shards in layout.fsdp_module_shards:
            starts = accumulate((shard_bytes(layout, shard) for shard in shards), initial=0)
            self._offsets.update(zip(shards, starts, strict=False))

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
        for slot in (*self._free, *self._own.values()):
            self._device.keep(slot.memory, stream)  # copies into it may still be running
        self._free, self._own, self._provided = deque(), {}, (frozenset(), frozenset())
        passing = [fsdp_module_bytes(self._layout, fsdp_module) for fsdp_module in prefetched - kept]
        free = [self._new_slot(max(passing)) for _ in range(SLOTS if passing else 0)]
        own = {
            fsdp_module: self._new_slot(fsdp_module_bytes(self._layout, fsdp_module)) for fsdp_module in sorted(kept)
        }
        self._free, self._own, self._provided = deque(free), own, (prefetched, kept)
        self._device.record_event(self._device.current()).before(stream)  # after earlier uses of the same memory
        if prefetched and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "infinity-stage", self._device.enter_thread)

    def _new_slot(self, nbytes: int) -> _Slot:
        return _Slot(torch.empty(nbytes, dtype=torch.uint8, device=self._device.name))

    def has(self, fsdp_module: int) -> bool:
        """Return whether the weights of an FSDP module are prefetched."""
        return fsdp_module in self._prefetched

    def has_free_buffer(self, fsdp_module: int) -> bool:
        """Return whether a slot is available for an FSDP module.

        If a step deviates from the plan, weights that are prefetched but never gathered continue to occupy their slot.
        """
        return fsdp_module in self._own or bool(self._free)

    def stage(self, fsdp_module: int) -> None:
        """Start prefetching the weights of an FSDP module, and count this as the planned access to their pages.

        Raises the same exceptions as `Pager.reservation`.
        """
        if self._thread is None:
            raise InfinityError("the GPU prefetch buffer has no slots; call provide first")
        slot = self._own.get(fsdp_module) or self._free.popleft()
        self._prefetched[fsdp_module] = slot
        slot.filled = self._thread.submit(self._fill, slot.memory, slot.used, self._batches(fsdp_module))
        slot.used = None

    def _batches(self, fsdp_module: int) -> deque[_WeightBatch]:
        """Reserve the pages of an FSDP module, batch by batch."""
        device_event = partial(self._device.record_event, self._device.stream("stage"))
        return deque(
            _WeightBatch(self._pager.reservation(access, threaded=True, copies=device_event, ahead=True), parts)
            for access, parts in self._gathers[fsdp_module]
        )

    def _fill(self, memory: torch.Tensor, used: DeviceEvent | None, batches: deque[_WeightBatch]) -> DeviceEvent:
        """Issue all copies into the memory of a slot, and return the event that follows. Runs in the prefetch thread.

        Args:
            memory: Memory of the slot.
            used: Event that follows earlier uses of the memory.
            batches: Weights to copy.
        """
        try:
            return self._copy_in(memory, used, batches)
        except Exception as error:
            self._pager.fail(error)  # the remaining reservations are never returned, so no thread may wait for them
            raise

    def _copy_in(self, memory: torch.Tensor, used: DeviceEvent | None, batches: deque[_WeightBatch]) -> DeviceEvent:
        stream = self._device.stream("stage")
        if used is not None:
            used.before(stream)
        while batches:
            reservation, parts = batches.popleft()
            begins = [self._offsets[part.shard] + part.begin for part in parts]
            targets = [memory[begin : begin + part.nbytes] for begin, part in zip(begins, parts, strict=True)]
            with reservation as contents:
                held = {use.page: content for use, content in zip(reservation.uses, contents, strict=True)}
                sources = [bytes_of(held[part.page], part.offset, part.nbytes) for part in parts]
                self._device.copy_all(targets, sources, stream)
        return self._device.record_event(stream)

    def weights(self, fsdp_module: int) -> Mapping[int, torch.Tensor]:
        """Return the prefetched weights of an FSDP module for later work on the current stream.

        They stay valid until `release`.

        Returns:
            Flat tensors in the compute dtype, padding included, by shard.

        Raises:
            Exception: The error that occurred while the pages were read.
        """
        slot = self._prefetched[fsdp_module]
        self._filled(slot).before(self._device.current())
        if fsdp_module not in slot.weights:
            found = slot.weights[fsdp_module] = {}
            for shard in self._layout.fsdp_module_shards[fsdp_module]:
                dtype = torch_dtype(self._layout.format_of(shard).param)
                nbytes, begin = self._layout.shards[shard].spec.padded * dtype.itemsize, self._offsets[shard]
                found[shard] = slot.memory[begin : begin + nbytes].view(dtype)
        return slot.weights[fsdp_module]

    def release(self, fsdp_module: int) -> None:
        """Free the slot of an FSDP module, unless the module is kept, after the work queued on the current stream."""
        slot = self._prefetched[fsdp_module]
        slot.used = self._device.record_event(self._device.current())
        if fsdp_module not in self._own:
            del self._prefetched[fsdp_module]
            self._free.append(slot)

    def _filled(self, slot: _Slot) -> DeviceEvent:
        """Wait until all copies into a slot have been issued.

        Raises the error that stopped the copies, or the pager's first error.
        """
        assert slot.filled is not None
        self._pager.wait_for_job(slot.filled, "read")
        return slot.filled.result()

    def drop(self, fsdp_module: int | None = None) -> None:
        """Discard the prefetched weights of one FSDP module, or of all (``None``), before the weights change."""
        for index in [fsdp_module] if fsdp_module is not None else list(self._prefetched):
            slot = self._prefetched.pop(index, None)
            if slot is not None:
                with suppress(Exception):  # the pager stores the error and raises it at the next access
                    slot.used = slot.used or self._filled(slot)
                if index not in self._own:
                    self._free.append(slot)

    def close(self) -> None:
        """Stop the thread and discard copies that have not started."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._free, self._own, self._prefetched = deque(), {}, {}
