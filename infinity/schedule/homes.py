"""Pages that live on the device, those of whole FSDP modules: they have no cache slots, and nothing of them moves in a
step.

[Note: one use after the other] What is done with a page on the device is only queued. So every use lets its stream wait
for the use before, whatever stream that was on, and leaves a mark. Nobody on the host waits: threads are ordered by
reservations, as for all pages, and the device by these marks.
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
    """The memory of one page on the device."""

    content: torch.Tensor
    """Its bytes."""
    used: DeviceEvent
    """Behind all that has been done with it."""
    newer: bool = False
    """Whether it is newer than what cache slots and the store have."""


class GpuResidentPages:
    """Serves uses of pages of FSDP modules that are *GPU-resident* on the device, as `Cache` does those of all others.

    Pages of weights, and of master and moments, have memory there as long as their FSDP module is GPU-resident; those
    of gradients
    from when they are first written until they are consumed or discarded. Everything is called under the lock of
    `Transfers`, but for `contents`, and what is on the device may be queued there.

    Args:
        layout: pages of this rank.
        device: that has them.
        observer: is told of uses.
    """

    def __init__(self, layout: Layout, device: Device, observer: PagerObserver) -> None:
        self._layout, self._device, self._observer = layout, device, observer
        self.fsdp_modules: frozenset[int] = frozenset()
        """FSDP modules that are GPU-resident; the training thread changes it, while no reservation is out."""
        self._gpu_resident_pages: dict[int, GpuResidentPage] = {}  # by page

    def has(self, uses: Access) -> bool:
        """Whether the pages of an access live here: all of them or none, as one access is of one FSDP module."""
        if not self.fsdp_modules:
            return False
        page = self._layout.pages[uses[0].page]
        return page.fsdp_module in self.fsdp_modules and is_gpu_resident(self._layout, page)

    # What `Cache` has too #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Count uses: the pages are there, and nobody moves them."""
        for use in uses:
            if use.mode.fetches:
                self._observer.fetched("hit")

    acquire_reservation = acquire

    def can_acquire(self, uses: Access) -> bool:
        """Return True: nothing is waited for."""
        return True

    def contents(self, uses: Access) -> list[torch.Tensor]:
        """Return the bytes of pages that are acquired, for what this thread's stream does with them from now on."""
        stream = self._device.current()
        return [self._content(use.page, stream) for use in uses]

    def _content(self, page: int, stream: Stream) -> torch.Tensor:
        if page not in self._gpu_resident_pages:  # of a gradient, which is written first
            others = self._of_gradients(self._layout.pages[page])
            self._gpu_resident_pages |= self.build(
                [each for each in others if each.index not in self._gpu_resident_pages]
            )
        home = self._gpu_resident_pages[page]
        home.used.before(stream)
        self._device.keep(home.content, stream)
        return home.content

    def release(self, uses: Access, device_event: DeviceEvent | None = None) -> None:
        """Note that pages have been used.

        Args:
            mark: behind that; None: behind what this thread's stream was given.
        """
        device_event = device_event or self._device.record_event(self._device.current())
        for use in uses:
            home = self._gpu_resident_pages.get(
                use.page
            )  # none where an access that was acquired later has consumed it
            if use.mode is Mode.CONSUME:
                self.discard(use.page)
            elif home is not None:
                home.used, home.newer = device_event, home.newer or use.mode.modifies

    release_reservation = release

    def discard(self, page: int) -> None:
        """Drop the content of a page: what uses its memory is ordered by the allocator."""
        self._gpu_resident_pages.pop(page, None)

    # Who lives there #

    def _of_gradients(self, page: Page) -> Sequence[Page]:
        """Return the pages that have the same component of gradients as one page, of all of its FSDP module."""
        segments = [self._layout.segments[segment] for segment in self._layout.fsdp_module_segments[page.fsdp_module]]
        parts = [segment.grad_pages[page.component] for segment in segments if page.component < len(segment.grad_pages)]
        return [each for part in parts for each in part]

    def pages_of(self, fsdp_module: int) -> list[Page]:
        """Return the pages of weights and state of an FSDP module that can be GPU-resident."""
        pages = [page for page in self._layout.pages if page.fsdp_module == fsdp_module and page.role is not Role.GRAD]
        return [page for page in pages if is_gpu_resident(self._layout, page)]

    def build(self, pages: Sequence[Page]) -> dict[int, GpuResidentPage]:
        """Return memory for pages, which are not GPU-resident yet: in one piece, of which an allocator wastes little.

        Not under the lock.

        Raises:
            torch.OutOfMemoryError: the device has too little.
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
        """Let an FSDP module be GPU-resident, with the content that its pages have there."""
        self.fsdp_modules |= {fsdp_module}
        self._gpu_resident_pages |= gpu_resident_pages

    def leave(self, fsdp_module: int) -> None:
        """Let an FSDP module not be GPU-resident any more."""
        self.fsdp_modules -= {fsdp_module}
        for page in self.of(fsdp_module):
            del self._gpu_resident_pages[page]

    def of(self, fsdp_module: int) -> dict[int, GpuResidentPage]:
        """Return the homes of an FSDP module, by page."""
        return {
            page: home
            for page, home in self._gpu_resident_pages.items()
            if self._layout.pages[page].fsdp_module == fsdp_module
        }

    def newer(self) -> dict[int, GpuResidentPage]:
        """Return those of weights and states that are newer than what the store has, in the order of their pages."""
        pages = self._layout.pages
        return {
            page: home
            for page, home in sorted(self._gpu_resident_pages.items())
            if home.newer and pages[page].role is not Role.GRAD
        }
