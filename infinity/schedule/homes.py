"""Pages of GPU-resident FSDP modules. They are stored on the device and have no cache slots.

[Note: order of uses] Work on a device page is only queued when a use ends. Therefore every use makes its stream wait
for the previous use, which may have been on a different stream, and records an event. No host thread waits:
reservations order the threads, as they do for all pages, and these events order the work on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.memory.device import Device, DeviceEvent, Stream
from infinity.schedule.tier import is_gpu_resident
from infinity.schedule.trace import Access, Mode
from infinity.telemetry.ledger import Ledger


@dataclass(slots=True)
class GpuResidentPage:
    """Device memory of one page."""

    content: torch.Tensor
    """Bytes of the page, on the device."""
    used: DeviceEvent
    """Event recorded after all work on the page so far."""
    newer: bool = False
    """``True`` if the content is newer than in the host cache and in the store."""


class GpuResidentPages:
    """Provides the pages of *GPU-resident* FSDP modules, as `Cache` provides all other pages.

    Pages of weights, master and moments occupy device memory as long as their FSDP module is GPU-resident. Pages of
    gradients occupy it from their first write until they are consumed or discarded. The caller of every method except
    `contents` and `build` must hold the lock of `Transfers`. The methods may queue work on the device.
    """

    def __init__(self, layout: Layout, device: Device, observer: Ledger) -> None:
        self._layout, self._device, self._observer = layout, device, observer
        self.fsdp_modules: frozenset[int] = frozenset()
        """GPU-resident FSDP modules. The training thread changes this set while no reservation is outstanding."""
        self._gpu_resident_pages: dict[int, GpuResidentPage] = {}  # by page

    def has(self, uses: Access) -> bool:
        """Return ``True`` if the pages of an access are GPU-resident.

        All pages of an access belong to the same FSDP module, so either all of them are GPU-resident or none are.
        """
        if not self.fsdp_modules:
            return False
        page = self._layout.pages[uses[0].page]
        return page.fsdp_module in self.fsdp_modules and is_gpu_resident(self._layout, page)

    # Methods in common with `Cache` #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Report the uses to the observer. The pages are on the device and stay there, so there is no wait."""
        self._observer.fetched("hit", sum([use.mode.fetches for use in uses]))

    acquire_reservation = acquire

    def contents(self, uses: Access) -> list[torch.Tensor]:
        """Return the bytes of acquired pages, for later work on the current stream of the calling thread."""
        stream = self._device.current()
        return [self._content(use.page, stream) for use in uses]

    def _content(self, page: int, stream: Stream) -> torch.Tensor:
        if page not in self._gpu_resident_pages:  # a gradient page, whose first use is a write
            others = self._gradient_pages(self._layout.pages[page])
            self._gpu_resident_pages |= self.build(
                [each for each in others if each.index not in self._gpu_resident_pages]
            )
        gpu_page = self._gpu_resident_pages[page]
        gpu_page.used.before(stream)
        self._device.keep(gpu_page.content, stream)
        return gpu_page.content

    def release(self, uses: Access, device_event: DeviceEvent | None = None) -> None:
        """Record that a use of pages has ended.

        Args:
            device_event: event recorded after the use. If ``None``, the use ends with the work that is queued on the
                current stream of the calling thread.
        """
        device_event = device_event or self._device.record_event(self._device.current())
        for use in uses:
            # The page is missing if an access that was acquired later has already consumed it.
            gpu_page = self._gpu_resident_pages.get(use.page)
            if use.mode is Mode.CONSUME:
                self.discard(use.page)
            elif gpu_page is not None:
                gpu_page.used, gpu_page.newer = device_event, gpu_page.newer or use.mode.modifies

    release_reservation = release

    def discard(self, page: int) -> None:
        """Drop the content of a page. The allocator orders later uses of its memory after the work queued so far."""
        self._gpu_resident_pages.pop(page, None)

    # GPU-resident FSDP modules #

    def _gradient_pages(self, page: Page) -> Sequence[Page]:
        """Return all pages of the FSDP module that hold the same gradient component as `page`."""
        segments = [self._layout.segments[segment] for segment in self._layout.fsdp_module_segments[page.fsdp_module]]
        parts = [segment.grad_pages[page.component] for segment in segments if page.component < len(segment.grad_pages)]
        return [each for part in parts for each in part]

    def pages_of(self, fsdp_module: int) -> list[Page]:
        """Return the pages of an FSDP module that can be GPU-resident, except gradients."""
        pages = [page for page in self._layout.pages if page.fsdp_module == fsdp_module and page.role is not Role.GRAD]
        return [page for page in pages if is_gpu_resident(self._layout, page)]

    def build(self, pages: Sequence[Page]) -> dict[int, GpuResidentPage]:
        """Allocate device memory for pages that are not GPU-resident yet.

        The method makes one allocation for all pages, because the allocator wastes less memory that way. It needs no
        lock.

        Raises:
            torch.OutOfMemoryError: if the device has too little memory.
        """
        if not pages:
            return {}
        memory = torch.empty(sum(page.nbytes for page in pages), dtype=torch.uint8, device=self._device.name)
        built = self._device.record_event(self._device.current())
        stops = accumulate(page.nbytes for page in pages)
        return {
            page.index: GpuResidentPage(memory[stop - page.nbytes : stop], built)
            for page, stop in zip(pages, stops, strict=True)
        }

    def add(self, fsdp_module: int, gpu_resident_pages: dict[int, GpuResidentPage]) -> None:
        """Register an FSDP module as GPU-resident, with the given pages."""
        self.fsdp_modules |= {fsdp_module}
        self._gpu_resident_pages |= gpu_resident_pages

    def remove(self, fsdp_module: int) -> None:
        """Register that an FSDP module is no longer GPU-resident, and drop its pages."""
        self.fsdp_modules -= {fsdp_module}
        for page in self.resident_pages(fsdp_module):
            del self._gpu_resident_pages[page]

    def resident_pages(self, fsdp_module: int) -> dict[int, GpuResidentPage]:
        """Return the pages of an FSDP module that are on the device, by page number."""
        return {
            page: gpu_page
            for page, gpu_page in self._gpu_resident_pages.items()
            if self._layout.pages[page].fsdp_module == fsdp_module
        }

    def newer(self) -> dict[int, GpuResidentPage]:
        """Return the pages whose content is newer than in the store, except gradients, by page number."""
        pages = self._layout.pages
        return {
            page: gpu_page
            for page, gpu_page in sorted(self._gpu_resident_pages.items())
            if gpu_page.newer and pages[page].role is not Role.GRAD
        }
