"""Pages of GPU-resident FSDP modules. They live on the device, have no cache slots, and do not move during a step.

[Note: order of uses] Work on a page of the device is only queued. Therefore every use makes its stream wait
for the previous use, whatever stream that was on, and records an event. No thread of the host waits: threads are
ordered by reservations, as for all pages, and the device by these events.
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
from infinity.schedule.transfers import PagerObserver


@dataclass(slots=True)
class GpuResidentPage:
    """Memory of one page on the device."""

    content: torch.Tensor
    """Bytes of the page."""
    used: DeviceEvent
    """Event after all work on the page so far."""
    newer: bool = False
    """``True`` if the content is newer than in cache slots and in the store."""


class GpuResidentPages:
    """Serves uses of pages of *GPU-resident* FSDP modules, as `Cache` does for all other pages.

    Pages of weights, master and moments have memory on the device as long as their FSDP module is GPU-resident. Pages
    of gradients have memory from their first write until they are consumed or discarded. Every method except `contents`
    must be called under the lock of `Transfers`, and may queue work on the device.

    Args:
        layout: pages of this rank.
        device: device that holds the pages.
        observer: receiver of telemetry.
    """

    def __init__(self, layout: Layout, device: Device, observer: PagerObserver) -> None:
        self._layout, self._device, self._observer = layout, device, observer
        self.fsdp_modules: frozenset[int] = frozenset()
        """GPU-resident FSDP modules. The training thread changes this set while no reservation is open."""
        self._gpu_resident_pages: dict[int, GpuResidentPage] = {}  # by page

    def has(self, uses: Access) -> bool:
        """Return ``True`` if the pages of an access are GPU-resident.

        An access belongs to one FSDP module, so either all of its pages are GPU-resident or no page is.
        """
        if not self.fsdp_modules:
            return False
        page = self._layout.pages[uses[0].page]
        return page.fsdp_module in self.fsdp_modules and is_gpu_resident(self._layout, page)

    # Methods in common with `Cache` #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Count uses. The pages are on the device, and no other thread moves them."""
        for use in uses:
            if use.mode.fetches:
                self._observer.fetched("hit")

    acquire_reservation = acquire

    def can_acquire(self, uses: Access) -> bool:
        """Return ``True``: no use has to wait."""
        return True

    def contents(self, uses: Access) -> list[torch.Tensor]:
        """Return the bytes of acquired pages, for later work on the current stream of this thread."""
        stream = self._device.current()
        return [self._content(use.page, stream) for use in uses]

    def _content(self, page: int, stream: Stream) -> torch.Tensor:
        if page not in self._gpu_resident_pages:  # page of a gradient, whose first use is a write
            others = self._of_gradients(self._layout.pages[page])
            self._gpu_resident_pages |= self.build(
                [each for each in others if each.index not in self._gpu_resident_pages]
            )
        home = self._gpu_resident_pages[page]
        home.used.before(stream)
        self._device.keep(home.content, stream)
        return home.content

    def release(self, uses: Access, device_event: DeviceEvent | None = None) -> None:
        """Record that pages have been used.

        Args:
            uses: the pages.
            device_event: event after the use. If ``None``, the use ends with the work queued so far on the current
                stream of this thread.
        """
        device_event = device_event or self._device.record_event(self._device.current())
        for use in uses:
            # Missing if an access that was acquired later has consumed the page.
            home = self._gpu_resident_pages.get(use.page)
            if use.mode is Mode.CONSUME:
                self.discard(use.page)
            elif home is not None:
                home.used, home.newer = device_event, home.newer or use.mode.modifies

    release_reservation = release

    def discard(self, page: int) -> None:
        """Drop the content of a page. The allocator orders later uses of its memory."""
        self._gpu_resident_pages.pop(page, None)

    # GPU-resident FSDP modules #

    def _of_gradients(self, page: Page) -> Sequence[Page]:
        """Return the pages of the same gradient component as a page, for the whole FSDP module."""
        segments = [self._layout.segments[segment] for segment in self._layout.fsdp_module_segments[page.fsdp_module]]
        parts = [segment.grad_pages[page.component] for segment in segments if page.component < len(segment.grad_pages)]
        return [each for part in parts for each in part]

    def pages_of(self, fsdp_module: int) -> list[Page]:
        """Return the pages of an FSDP module that can be GPU-resident, without gradients."""
        pages = [page for page in self._layout.pages if page.fsdp_module == fsdp_module and page.role is not Role.GRAD]
        return [page for page in pages if is_gpu_resident(self._layout, page)]

    def build(self, pages: Sequence[Page]) -> dict[int, GpuResidentPage]:
        """Return memory for pages that are not GPU-resident yet, in one allocation, because the allocator wastes little
        of it.

        Not under the lock.

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

    def come(self, fsdp_module: int, gpu_resident_pages: dict[int, GpuResidentPage]) -> None:
        """Make an FSDP module GPU-resident, with the given content of its pages."""
        self.fsdp_modules |= {fsdp_module}
        self._gpu_resident_pages |= gpu_resident_pages

    def leave(self, fsdp_module: int) -> None:
        """Make an FSDP module no longer GPU-resident."""
        self.fsdp_modules -= {fsdp_module}
        for page in self.of(fsdp_module):
            del self._gpu_resident_pages[page]

    def of(self, fsdp_module: int) -> dict[int, GpuResidentPage]:
        """Return the GPU-resident pages of an FSDP module, by page number."""
        return {
            page: home
            for page, home in self._gpu_resident_pages.items()
            if self._layout.pages[page].fsdp_module == fsdp_module
        }

    def newer(self) -> dict[int, GpuResidentPage]:
        """Return the pages that are newer than in the store, in the order of their numbers, without gradients."""
        pages = self._layout.pages
        return {
            page: home
            for page, home in sorted(self._gpu_resident_pages.items())
            if home.newer and pages[page].role is not Role.GRAD
        }
