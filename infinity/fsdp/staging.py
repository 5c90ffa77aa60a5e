"""Weights on the device ahead of their gather: a thread copies those of the next FSDP module while this one computes.

[Note: staging] When an FSDP module has been gathered, the pages of the next one are reserved, which takes their place
in the plan
there and then: so what is moved does not depend on how fast anything is. A thread of its own waits for them, copies
each into a slot on the device, on a stream of its own, and gives the reservation back behind a mark. The gather is then
a
copy on the device. A slot is used again behind the last such copy; the slots of FSDP modules that are *kept* have their
weights until the step ends, and no later gather of such an FSDP module reads pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from infinity.content.layout import Layout, Page, Placed, overlapping
from infinity.content.views import section, torch_dtype
from infinity.errors import InfinityError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.tier import SLOTS, fsdp_module_bytes, prefetched_modules, shard_bytes
from infinity.schedule.trace import Event, gather_accesses
from infinity.schedule.update_schedule import UpdateSchedule


class _Part(NamedTuple):
    """What a shard has in one page."""

    reservation: Reservation
    page: Page
    placed: Placed
    first: int
    """Its first element there, in the segment."""
    last: int
    """The first one behind."""
    offset: int
    """Where the shard begins in the slot, in bytes."""


class _Slot:
    """Room for the weights of one FSDP module on the device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # bytes
        self.used: DeviceEvent | None = None  # behind all that was done with it; None before anything was
        self.filled: Future[DeviceEvent] | None = (
            None  # the mark behind the copies into it, once the device has all of them
        )


class GpuPrefetcher:
    """The slots, what is in them, and the thread that fills them.

    Life cycle: without slots until `provide`. An FSDP module is *staged* from `stage` on; its shards are copied out one
    after
    the other, and behind the last one its slot is free again, but for FSDP modules that are kept. `drop` forgets what
    is
    staged, where weights change. The training thread calls all methods.

    Args:
        layout: pages of this rank.
        pager: has them.
        device: that computes.
    """

    def __init__(self, layout: Layout, pager: Pager, device: Device) -> None:
        self._layout, self._pager, self._device = layout, pager, device
        self._free: deque[_Slot] = deque()  # slots for FSDP modules that are not kept, the next one first
        self._own: dict[int, _Slot] = {}  # by FSDP module that is kept, its slot
        self._prefetched: dict[int, _Slot] = {}  # by FSDP module, the slot that has its weights, or gets them
        self._provided: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        """For which FSDP modules there are slots, and which of them are kept."""
        self._thread: ThreadPoolExecutor | None = None  # begins with `provide`

    def provide(self, update_schedule: UpdateSchedule, events: Sequence[Event]) -> None:
        """Have the slots that steps need which look like `events`. Where they are others, what is staged is forgotten.

        Raises:
            torch.OutOfMemoryError: the device has no room for them; there are none then.
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
            self._device.keep(slot.memory, stream)  # copies into it may not have ended
        self._free, self._own, self._provided = deque(), {}, (frozenset(), frozenset())
        passing = [fsdp_module_bytes(self._layout, fsdp_module) for fsdp_module in prefetched - kept]
        free = [self._new_slot(max(passing)) for _ in range(SLOTS if passing else 0)]
        own = {
            fsdp_module: self._new_slot(fsdp_module_bytes(self._layout, fsdp_module)) for fsdp_module in sorted(kept)
        }
        self._free, self._own, self._provided = deque(free), own, (prefetched, kept)
        self._device.record_event(self._device.current()).before(stream)  # behind what the memory was used for before
        if prefetched and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "infinity-stage", self._device.enter_thread)

    def _new_slot(self, nbytes: int) -> _Slot:
        return _Slot(torch.empty(nbytes, dtype=torch.uint8, device=self._device.name))

    def has(self, fsdp_module: int) -> bool:
        """Whether the weights of an FSDP module are staged."""
        return fsdp_module in self._prefetched

    def has_room(self, fsdp_module: int) -> bool:
        """Whether there is a slot for an FSDP module:

        off the plan, what was staged and is not gathered keeps its own.
        """
        return fsdp_module in self._own or bool(self._free)

    def stage(self, fsdp_module: int) -> None:
        """Begin to copy the weights of an FSDP module;

        their place in the plan is taken here. Raises as `Pager.reservation`.
        """
        if self._thread is None:
            raise InfinityError("there are no slots to stage weights in")
        slot = self._own.get(fsdp_module) or self._free.popleft()
        self._prefetched[fsdp_module] = slot
        slot.filled = self._thread.submit(self._fill, slot.memory, slot.used, self._parts(fsdp_module))
        slot.used = None

    def _parts(self, fsdp_module: int) -> deque[_Part]:
        """Reservation the pages of an FSDP module, shard by shard, as `gather_accesses` has them."""
        device_event = partial(self._device.record_event, self._device.stream("stage"))
        accesses = gather_accesses(self._layout, fsdp_module)
        parts: deque[_Part] = deque()
        offset = 0
        for shard in self._layout.fsdp_module_shards[fsdp_module]:
            placed = self._layout.shards[shard]
            pages = self._layout.segments[placed.segment].param_pages
            for page, first, last in overlapping(pages, placed.start, placed.start + placed.spec.padded):
                reservation = self._pager.reservation(next(accesses), threaded=True, copies=device_event, ahead=True)
                parts.append(_Part(reservation, page, placed, first, last, offset))
            offset += shard_bytes(self._layout, shard)
        return parts

    def _fill(self, memory: torch.Tensor, used: DeviceEvent | None, parts: deque[_Part]) -> DeviceEvent:
        """Give the device all copies into the memory of a slot; return the mark behind them. In the thread.

        Args:
            used: behind what was done with the memory before.
        """
        try:
            return self._copy_in(memory, used, parts)
        except Exception as error:
            self._pager.fail(error)  # reservations are left that will not be returned: nobody is to wait for them
            raise

    def _copy_in(self, memory: torch.Tensor, used: DeviceEvent | None, parts: deque[_Part]) -> DeviceEvent:
        stream = self._device.stream("stage")
        if used is not None:
            used.before(stream)
        while parts:
            part = parts.popleft()
            dtype = torch_dtype(self._layout.segments[part.placed.segment].format.param)
            begin = part.offset + (part.first - part.placed.start) * dtype.itemsize
            target = memory[begin : begin + (part.last - part.first) * dtype.itemsize].view(dtype)
            with part.reservation as (content,):
                source = section(content, part.page, self._layout, part.first, part.last)
                self._device.copy(target, source, stream)
        return self._device.record_event(stream)

    def copy_out(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the weights of a shard of a staged FSDP module, padding included, into a flat tensor, on the current
        stream.

        Raises:
            Exception: what kept its pages from being read.
        """
        fsdp_module = self._layout.shards[shard].fsdp_module
        slot, stream = self._prefetched[fsdp_module], self._device.current()
        shards = self._layout.fsdp_module_shards[fsdp_module]
        if self._layout.begins_fsdp_module(shard):
            self._filled(slot).before(stream)
        begin = sum(shard_bytes(self._layout, before) for before in shards[: shards.index(shard)])
        destination.copy_(slot.memory[begin : begin + destination.nbytes].view(destination.dtype))
        if self._layout.ends_fsdp_module(shard):
            slot.used = self._device.record_event(stream)
            if fsdp_module not in self._own:
                del self._prefetched[fsdp_module]
                self._free.append(slot)

    def _filled(self, slot: _Slot) -> DeviceEvent:
        """Wait until all copies into a slot are on their way. Raises what kept them, or the first error."""
        assert slot.filled is not None
        self._pager.wait_for_job(slot.filled, "read")
        return slot.filled.result()

    def drop(self, fsdp_module: int | None = None) -> None:
        """Forget what is staged of one FSDP module, or of all: its weights are about to change."""
        for index in [fsdp_module] if fsdp_module is not None else list(self._prefetched):
            slot = self._prefetched.pop(index, None)
            if slot is not None:
                with suppress(Exception):  # the pager has it too: whoever asks for a page next gets it
                    slot.used = slot.used or self._filled(slot)
                if index not in self._own:
                    self._free.append(slot)

    def close(self) -> None:
        """End the thread; what it has not begun is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._free, self._own, self._prefetched = deque(), {}, {}
