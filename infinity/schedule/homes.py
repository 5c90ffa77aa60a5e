"""Pages that live on the device, those of whole units: they have no frames, and nothing of them moves in a step.

[Note: one use after the other] What is done with a page on the device is only queued. So every use lets its stream wait
for the use before, whatever stream that was on, and leaves a mark. Nobody on the host waits: threads are ordered by
leases, as for all pages, and the device by these marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.memory.device import Device, Mark, Stream
from infinity.schedule.tier import lives_at_home
from infinity.schedule.trace import Access, Mode
from infinity.schedule.transfers import PagerObserver


@dataclass(slots=True)
class Home:
    """The memory of one page on the device."""

    content: torch.Tensor
    """Its bytes."""
    used: Mark
    """Behind all that has been done with it."""
    newer: bool = False
    """Whether it is newer than what frames and the store have."""


class Homes:
    """Serves uses of pages of units that are *at home* on the device, as `Cache` does those of all others.

    Pages of weights, and of master and moments, have memory there as long as their unit is at home; those of gradients
    from when they are first written until they are consumed or discarded. Everything is called under the lock of
    `Transfers`, but for `contents`, and what is on the device may be queued there.

    Args:
        layout: pages of this rank.
        device: that has them.
        observer: is told of uses.
    """

    def __init__(self, layout: Layout, device: Device, observer: PagerObserver) -> None:
        self._layout, self._device, self._observer = layout, device, observer
        self.units: frozenset[int] = frozenset()
        """Units that are at home; the training thread changes it, while no lease is out."""
        self._homes: dict[int, Home] = {}  # by page

    def has(self, uses: Access) -> bool:
        """Whether the pages of an access live here: all of them or none, as one access is of one unit."""
        if not self.units:
            return False
        page = self._layout.pages[uses[0].page]
        return page.unit in self.units and lives_at_home(self._layout, page)

    # What `Cache` has too #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Count uses: the pages are there, and nobody moves them."""
        for use in uses:
            if use.mode.fetches:
                self._observer.fetched("hit")

    acquire_lease = acquire

    def can_acquire(self, uses: Access) -> bool:
        """Return True: nothing is waited for."""
        return True

    def contents(self, uses: Access) -> list[torch.Tensor]:
        """Return the bytes of pages that are acquired, for what this thread's stream does with them from now on."""
        stream = self._device.current()
        return [self._content(use.page, stream) for use in uses]

    def _content(self, page: int, stream: Stream) -> torch.Tensor:
        if page not in self._homes:  # of a gradient, which is written first
            others = self._of_gradients(self._layout.pages[page])
            self._homes |= self.build([each for each in others if each.index not in self._homes])
        home = self._homes[page]
        home.used.before(stream)
        self._device.keep(home.content, stream)
        return home.content

    def release(self, uses: Access, mark: Mark | None = None) -> None:
        """Note that pages have been used.

        Args:
            mark: behind that; None: behind what this thread's stream was given.
        """
        mark = mark or self._device.mark(self._device.current())
        for use in uses:
            home = self._homes.get(use.page)  # none where an access that was acquired later has consumed it
            if use.mode is Mode.CONSUME:
                self.discard(use.page)
            elif home is not None:
                home.used, home.newer = mark, home.newer or use.mode.modifies

    release_lease = release

    def discard(self, page: int) -> None:
        """Drop the content of a page: what uses its memory is ordered by the allocator."""
        self._homes.pop(page, None)

    # Who lives there #

    def _of_gradients(self, page: Page) -> Sequence[Page]:
        """Return the pages that have the same component of gradients as one page, of all of its unit."""
        segments = [self._layout.segments[segment] for segment in self._layout.unit_segments[page.unit]]
        parts = [segment.grad_pages[page.component] for segment in segments if page.component < len(segment.grad_pages)]
        return [each for part in parts for each in part]

    def pages_of(self, unit: int) -> list[Page]:
        """Return the pages of weights and state of a unit that can be at home."""
        pages = [page for page in self._layout.pages if page.unit == unit and page.role is not Role.GRAD]
        return [page for page in pages if lives_at_home(self._layout, page)]

    def build(self, pages: Sequence[Page]) -> dict[int, Home]:
        """Return memory for pages, which are not at home yet: in one piece, of which an allocator wastes little.

        Not under the lock.

        Raises:
            torch.OutOfMemoryError: the device has too little.
        """
        if not pages:
            return {}
        memory = torch.empty(sum(page.nbytes for page in pages), dtype=torch.uint8, device=self._device.name)
        built = self._device.mark(self._device.current())
        stops = accumulate(page.nbytes for page in pages)
        return {
            page.index: Home(memory[stop - page.nbytes : stop], built) for page, stop in zip(pages, stops, strict=True)
        }

    def come(self, unit: int, homes: dict[int, Home]) -> None:
        """Let a unit be at home, with the content that its pages have there."""
        self.units |= {unit}
        self._homes |= homes

    def leave(self, unit: int) -> None:
        """Let a unit not be at home any more."""
        self.units -= {unit}
        for page in self.of(unit):
            del self._homes[page]

    def of(self, unit: int) -> dict[int, Home]:
        """Return the homes of a unit, by page."""
        return {page: home for page, home in self._homes.items() if self._layout.pages[page].unit == unit}

    def newer(self) -> dict[int, Home]:
        """Return those of weights and states that are newer than what the store has, in the order of their pages."""
        pages = self._layout.pages
        return {
            page: home for page, home in sorted(self._homes.items()) if home.newer and pages[page].role is not Role.GRAD
        }
