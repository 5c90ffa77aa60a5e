"""Slots for stored gradients, in an area after all slots of the state.

[Note: area of gradients] Checkpoints contain no gradients, and many runs never store any, because gradients are
consumed where they are produced or stay in the host cache. However, the first step may store all of them for the
forward pass of the second one. Therefore the area exists from the start, and it is released after the first step if the
plan stores no gradients. A later step that departs from its plan, or a later plan, allocates the area again. At that
time, the drive may have too little free space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.store.extents import Extent, ExtentAllocator, SlotClass, missing_slots, needed_slots


class FileLengths(Protocol):
    """Extends and truncates data files."""

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Allocate blocks for slots. Raises `BudgetError` or `StorageError`."""

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Truncate files that are longer than the slots require. Raises `StorageError`."""


class GradientSpace:
    """Slots for the gradients of a rank. Thread-safe.

    Args:
        pages: Pages of the rank, by index.
        spare: Maximum number of writes in flight per class.
        files: Allocates blocks for an area.
        slots: Returns all slots of the state. The area follows them.
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
        """Slots of the area."""
        self._taken: dict[Extent, int] = {}
        """Page index by slot in use."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots of the area; empty if there is no area. Changed under `growing`."""
        self.growing = Lock()
        """Held while files are extended or truncated, so that no other thread adds slots at the same offsets. `give`
        never takes this lock, so its holder cannot block a thread that it waits for."""
        self._waiting = 0
        """Number of writes that wait for a slot and therefore need the area. Changed under `growing`."""

    def expect(self, stored: bool, paths: Sequence[int]) -> None:
        """Allocate the area if gradients may be stored. Otherwise release it, unless gradients are stored now.

        Args:
            stored: Whether gradients may be stored.
            paths: Path for writes, by page.

        Raises:
            BudgetError, StorageError: if the area cannot be allocated.
        """
        if stored:
            if not self.area:  # cheap test first, because every step calls this and large models have many pages
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
            page: Page to write.
            paths: Path for writes, by page.
            timeout: Seconds to wait for a slot of the area.

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
        """If there is an area, add the slots that gradients need on other paths. The caller holds `growing`.

        Raises:
            BudgetError, StorageError: if they cannot be allocated.
        """
        if self.area:
            self._add_missing(paths)

    def _add_missing(self, paths: Sequence[int]) -> None:
        on = {page.index: {paths[page.index]} for page in self._pages}
        for extent, page in self._taken.copy().items():
            on[page].add(extent.path)  # the page may have moved to another path since
        needed = needed_slots(self._pages, [on[page.index] for page in self._pages], self._spare, 0)
        more = missing_slots(self.area, needed, behind=self._slots())
        if more:
            self._files.allocate(more)
            self._own.add(more)
            self.area = (*self.area, *more)
