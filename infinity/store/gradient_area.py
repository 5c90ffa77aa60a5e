"""Where stored gradients lie: in an area of their own, behind all slots of the state.

[Note: the area of gradients] Gradients are in no checkpoint, and many runs never store any: they are used up where they
arrive, or stay in the host cache. But the first step may store all of them, for the forward of the second one. So there
is
an area from the start, which is given back behind that, when a plan stores none. A later step that departs from its
plan, or a later plan, makes it again; then it may be that there is no room any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.store.extents import Extent, ExtentAllocator, SlotClass, missing_slots, needed_slots


class FileLengths(Protocol):
    """What makes data files longer and shorter."""

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Let there be blocks for these slots. Raises `BudgetError`, `StorageError`."""

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Let no file be longer than these slots need. Raises `StorageError`."""


class GradientSpace:
    """Slots for the gradients of a rank. Safe to call from several threads.

    Args:
        pages: of the rank, by index.
        spare: writes of a class that may be in flight at once, at most.
        files: makes room for an area.
        slots: returns all slots of the state, behind which an area lies.
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
        """By slot that is taken, the page that it is for."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots of the area; empty where there is none. Changed under `growing`."""
        self.growing = Lock()
        """Held while the files become longer or shorter, so that nobody else adds slots in the same place. Who holds it
        waits for nobody who waits for it: `give` never takes it."""
        self._waiting = 0
        """Writes that wait for a slot, for which the area stays. Changed under `growing`."""

    def expect(self, stored: bool, paths: Sequence[int]) -> None:
        """Have an area if gradients may be stored, and none if not, unless some are there now.

        Args:
            paths: by page, where all of them are written to.

        Raises:
            BudgetError, StorageError: there is no room for it.
        """
        if stored:
            if not self.area:  # every step asks, and large models have many pages
                with self.growing:
                    self._add_missing(paths)
        elif self.area:
            with self.growing:
                if not self._waiting and self._own.drain(self.area):
                    self._files.cut(self._slots())
                    self.area = ()

    def take(self, page: Page, paths: Sequence[int], timeout: float) -> Extent:
        """Return a slot for a page that is written.

        Args:
            paths: by page, where all of them are written to.
            timeout: seconds to wait for a slot of the area.

        Raises:
            BudgetError, StorageError: there is no room for an area. StallError: no slot came back.
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
        """Take a slot back."""
        del self._taken[extent]
        self._own.give(extent)

    def make_room(self, paths: Sequence[int]) -> None:
        """Where there is an area, have as many slots as gradients need on other paths; `growing` is held.

        Raises:
            BudgetError, StorageError: there is no room for it.
        """
        if self.area:
            self._add_missing(paths)

    def _add_missing(self, paths: Sequence[int]) -> None:
        on = {page.index: {paths[page.index]} for page in self._pages}
        for extent, page in self._taken.copy().items():
            on[page].add(extent.path)  # it may have been spread anew meanwhile
        needed = needed_slots(self._pages, [on[page.index] for page in self._pages], self._spare, 0)
        more = missing_slots(self.area, needed, behind=self._slots())
        if more:
            self._files.allocate(more)
            self._own.add(more)
            self.area = (*self.area, *more)
