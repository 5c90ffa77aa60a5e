"""Slots for stored gradients, in an area that follows all slots of the state.

[Note: area of gradients] Checkpoints contain no gradients, and many runs never store any, because gradients are
consumed where they are produced or stay in the host cache. However, the first step may store all gradients for the
forward pass of the second step. Therefore the area exists from the start, and it is released after the first step if
the plan stores no gradients. The area is allocated again if a later step departs from its plan, or if a later plan
stores gradients. At that time, the drive may no longer have enough free space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.store.extents import Extent, ExtentAllocator, SlotClass, missing_slots, needed_slots


class FileLengths(Protocol):
    """Functions that extend and truncate data files."""

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Allocate blocks for slots. Raises `BudgetError` or `StorageError`."""

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Truncate files that are longer than the slots require. Raises `StorageError`."""


class GradientSpace:
    """Slots for the gradients of a rank. Thread-safe.

    Args:
        pages: pages of the rank, by index.
        spare: maximum number of writes in flight per class.
        files: functions that allocate and release the blocks of the area.
        slots: function that returns all slots of the state, which the area follows.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        spare: int,
        files: FileLengths,
        slots: Callable[[], Sequence[SlotClass]],
    ) -> None:
        self._pages = [page for page in pages if page.role is Role.GRAD]
        self._spare, self._files, self._slots = spare, files, slots
        self._own = ExtentAllocator(())
        """Slots in the area."""
        self._taken: dict[Extent, int] = {}
        """Page index for each slot in use."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots in the area; empty if there is no area. Changed only while `growing` is held."""
        self.growing = Lock()
        """Held while files are extended or truncated, so that no other thread adds slots at the same offsets. `give`
        never takes this lock, so slots can be freed while another thread holds it."""
        self._waiting = 0
        """Number of writes that wait for a slot and therefore need the area. Changed only while `growing` is held."""

    def expect(self, stored: bool, paths: Sequence[int]) -> None:
        """Allocate the area if gradients may be stored. Otherwise release it, unless it contains gradients.

        Args:
            stored: whether gradients may be stored.
            paths: path for writes, by page.

        Raises:
            BudgetError, StorageError: if the area cannot be allocated.
        """
        if stored:
            if not self.area:  # cheap test first, because this runs in every step and large models have many pages
                with self.growing:
                    self._add_missing(paths)
        elif self.area:
            with self.growing:
                if not self._waiting and self._own.drain(self.area):
                    self._files.cut(self._slots())
                    self.area = ()

    def take(self, page: Page, paths: Sequence[int], timeout: float) -> Extent:
        """Return a slot for a page that is about to be written.

        Args:
            page: page to write.
            paths: path for writes, by page.
            timeout: number of seconds to wait for a slot.

        Raises:
            BudgetError, StorageError: if the area cannot be allocated.
            StallError: if no slot is freed in time.
        """
        path, length = paths[page.index], page.nbytes
        extent = self._own.take_free(path, length)
        if extent is None:
            with self.growing:
                self._add_missing(paths)
                self._waiting += 1
            try:
                extent = self._own.take(path, length, timeout)
            finally:
                with self.growing:
                    self._waiting -= 1
        self._taken[extent] = page.index
        return extent

    def give(self, extent: Extent) -> None:
        """Free a slot."""
        del self._taken[extent]
        self._own.give(extent)

    def reserve_space(self, paths: Sequence[int]) -> None:
        """If the area exists, add the slots that gradients need on new paths. The caller must hold `growing`.

        Raises:
            BudgetError, StorageError: if the slots cannot be allocated.
        """
        if self.area:
            self._add_missing(paths)

    def _add_missing(self, paths: Sequence[int]) -> None:
        on = {page.index: {paths[page.index]} for page in self._pages}
        for extent, page in self._taken.copy().items():
            on[page].add(extent.path)  # the page may have moved to another path in the meantime
        needed = needed_slots(self._pages, [on[page.index] for page in self._pages], self._spare, 0)
        more = missing_slots(self.area, needed, behind=self._slots())
        if more:
            self._files.allocate(more)
            self._own.add(more)
            self.area = (*self.area, *more)
