"""Pages of GPU-resident FSDP modules. They are stored on the device and have no cache slots.

[Note: order of uses] Work on a device page is only queued when a use ends. Therefore every use makes its stream wait
for the previous use, which may have been on a different stream, and records an event. No host thread waits:
reservations order the threads, as they do for all pages, and these events order the work on the device.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import itemgetter

import torch

from infinity.content.format import Role
from infinity.content.joined import JoinedPages
from infinity.content.layout import Layout, Page
from infinity.content.views import Content, bytes_of, torch_dtype
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.tier import is_gpu_resident
from infinity.schedule.trace import Access, Mode
from infinity.telemetry.ledger import Ledger


class GpuResidentMemory:
    """Device memory of several pages of an FSDP module. The pages are joined, so that updates can process them in one
    piece.

    Raises:
        torch.OutOfMemoryError: if the device has too little memory.
    """

    def __init__(self, layout: Layout, pages: Sequence[Page], device: Device) -> None:
        joined = JoinedPages(layout, pages)
        with torch.inference_mode(False):  # the memory is used outside of inference mode, too
            self.memory = torch.empty(joined.nbytes, dtype=torch.uint8, device=device.name)
        """Bytes of all pages."""
        self.used = dict.fromkeys((page.index for page in pages), device.record_event(device.current()))
        """Event recorded after all work on each page so far."""
        self.newer: set[int] = set()
        """Pages whose content is newer than in the host cache and in the store."""
        self.arrays: dict[int, dict[int, torch.Tensor]] = {page.index: {} for page in pages}
        """Content of each page, by the offset in the page."""
        for array, part in zip(joined.arrays, self.memory.split_with_sizes(joined.sizes), strict=True):
            if array.page >= 0:
                self.arrays[array.page][array.offset] = part
        self.joined = [(page, self.memory[begin:end]) for page, begin, end in joined.pages]
        """Joined pages with their content."""


class GpuResidentPages:
    """Provides the pages of *GPU-resident* FSDP modules, as `Cache` provides all other pages.

    Pages of weights, master and moments occupy device memory as long as their FSDP module is GPU-resident. The pages of
    one gradient component share an allocation, from the first write until all of them are consumed. The caller of every
    method except `contents` and `build` must hold the lock of `Transfers`. The methods may queue work on the device.
    """

    def __init__(self, layout: Layout, device: Device, observer: Ledger) -> None:
        self._layout, self._device, self._observer = layout, device, observer
        self.fsdp_modules: frozenset[int] = frozenset()
        """GPU-resident FSDP modules. The training thread changes this set while no reservation is outstanding."""
        self._memory: dict[int, GpuResidentMemory] = {}  # by page
        self._weights: dict[int, dict[int, torch.Tensor]] = {}  # results of `weights`, by FSDP module

    def has(self, uses: Access) -> bool:
        """Return ``True`` if the pages of an access are GPU-resident.

        All pages of an access belong to the same FSDP module, so either all of them are GPU-resident or none are.
        """
        if not self.fsdp_modules:
            return False
        page = self._layout.pages[uses[0].page]
        return page.fsdp_module in self.fsdp_modules and is_gpu_resident(self._layout, page)

    # Methods in common with `Cache` #

    def acquire(self, uses: Access, *, threaded: bool, ordered: Container[int] = (), reserved: bool = False) -> None:
        """Report the uses to the observer. The pages are on the device and stay there, so there is no wait."""
        self._observer.fetched("hit", sum([use.mode.fetches for use in uses]))

    def contents(self, uses: Access) -> list[Content]:
        """Return the bytes of acquired pages, for later work on the current stream of the calling thread."""
        for use in uses:
            if use.page not in self._memory:  # a page of gradients that is about to be written
                page = self._layout.pages[use.page]
                others = [
                    each
                    for each in self._layout.fsdp_module_pages[page.fsdp_module]
                    if each.role is Role.GRAD and each.component == page.component
                ]
                assert not any(each.index in self._memory for each in others)  # updates consume all of them
                self._memory |= self.build(others)
        stream = self._device.current()
        for device_event in dict.fromkeys(self._memory[page].used[page] for page, _ in uses):
            device_event.before(stream)
        for memory in dict.fromkeys(self._memory[page] for page, _ in uses):
            self._device.keep(memory.memory, stream)
        return [self._memory[use.page].arrays[use.page] for use in uses]

    def joined(self, fsdp_module: int) -> list[tuple[Page, Content]]:
        """Return the joined pages of an FSDP module with their bytes. Call `contents` before."""
        return [joined for memory in dict.fromkeys(self.of(fsdp_module).values()) for joined in memory.joined]

    def weights(self, fsdp_module: int) -> Mapping[int, torch.Tensor]:
        """Return the weights of an FSDP module by shard: flat, in the compute dtype, padding included."""
        if fsdp_module not in self._weights:
            found = self._weights[fsdp_module] = {}
            joined = self.joined(fsdp_module)
            pages = {page.segment: (page.start, content) for page, content in joined if page.role is Role.PARAM}
            for shard in self._layout.fsdp_module_shards[fsdp_module]:
                placed, dtype = self._layout.shards[shard], torch_dtype(self._layout.format_of(shard).param)
                if placed.segment in pages:
                    start, content = pages[placed.segment]
                    weights = bytes_of(content).view(dtype)
                    found[shard] = weights.narrow(0, placed.start - start, placed.spec.padded)
                else:  # no shard of the segment has elements
                    found[shard] = torch.empty(0, dtype=dtype, device=self._device.name)
        return self._weights[fsdp_module]

    def release(self, uses: Access, device_event: DeviceEvent | None = None, *, reserved: bool = False) -> None:
        """Record that a use of pages has ended.

        Args:
            device_event: event recorded after the use. If ``None``, the use ends with the work that is queued on the
                current stream of the calling thread.
        """
        device_event = device_event or self._device.record_event(self._device.current())
        for page, mode in uses:
            memory = self._memory.get(page)  # None if an access that was acquired later has already consumed the page
            if memory is not None:
                memory.used[page] = device_event
                if mode.modifies:
                    memory.newer.add(page)
                elif mode is Mode.CONSUME:
                    self.discard(page)

    def discard(self, page: int) -> None:
        """Drop the content of a page. The allocator orders later uses of its memory after the work queued so far."""
        memory = self._memory.pop(page, None)
        if memory is not None:
            memory.newer.discard(page)

    # GPU-resident FSDP modules #

    def pages_of(self, fsdp_module: int) -> list[Page]:
        """Return the pages of an FSDP module that can be GPU-resident, except gradients."""
        pages = [page for page in self._layout.fsdp_module_pages[fsdp_module] if page.role is not Role.GRAD]
        return [page for page in pages if is_gpu_resident(self._layout, page)]

    def build(self, pages: Sequence[Page]) -> dict[int, GpuResidentMemory]:
        """Allocate device memory for pages, and return it by page. It needs no lock.

        Raises:
            torch.OutOfMemoryError: if the device has too little memory.
        """
        if not pages:
            return {}
        memory = GpuResidentMemory(self._layout, pages, self._device)
        return dict.fromkeys((page.index for page in pages), memory)

    def add(self, fsdp_module: int, memory: dict[int, GpuResidentMemory]) -> None:
        """Register an FSDP module as GPU-resident, with the memory of its pages."""
        self.fsdp_modules |= {fsdp_module}
        self._memory |= memory

    def remove(self, fsdp_module: int) -> None:
        """Register that an FSDP module is no longer GPU-resident, and drop its pages."""
        self.fsdp_modules -= {fsdp_module}
        self._weights.pop(fsdp_module, None)
        for page in self.of(fsdp_module):
            del self._memory[page]

    def of(self, fsdp_module: int) -> dict[int, GpuResidentMemory]:
        """Return the memory of the pages of an FSDP module that are on the device, by page."""
        pages = self._layout.fsdp_module_pages[fsdp_module]
        return {page.index: self._memory[page.index] for page in pages if page.index in self._memory}

    def newer(self) -> dict[int, GpuResidentMemory]:
        """Return the memory of pages whose content is newer than in the store, except gradients, by page."""
        pages = self._layout.pages
        return {
            page: memory
            for page, memory in sorted(self._memory.items(), key=itemgetter(0))
            if page in memory.newer and pages[page].role is not Role.GRAD
        }
