"""Where stored gradients lie: in slots that the state leaves free, else in an area behind all slots of the state.

[Note: the area of gradients] Gradients are in no commit, and many runs never store any: they are used up where they
arrive, or stay in the arena. So nothing is reserved for them at first. In the first step of a run, which is served on
demand, slots for the next commit are still free and long enough; they are lent. An area of their own is made at the end
of the data files when the plan says that gradients are stored in every step, or when no slot is left to lend. It is
given back where a plan stores none.
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
        spare: writes that may be in flight at once, at most.
        state: slots of the state, which may be lent.
        files: makes room for an area.
        slots: returns all slots of the state, behind which an area lies.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        spare: int,
        state: ExtentAllocator,
        files: FileLengths,
        slots: Callable[[], Sequence[SlotClass]],
    ) -> None:
        self._pages = [page for page in pages if page.role is Role.GRAD]
        self._spare, self._state, self._files, self._slots = spare, state, files, slots
        self._own = ExtentAllocator(())
        """Slots of the area."""
        self._held: dict[Extent, tuple[int, bool]] = {}
        """By slot that is taken, the page that it is for, and whether it is lent. Each is put in and taken out once."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots of the area; empty where there is none. Changed under `growing`."""
        self._stays = True
        """Whether an area is there to stay: not if a plan stores no gradients."""
        self.growing = Lock()
        """Held while slots are added to the files, so that nobody else adds slots in the same place."""

    def take(self, page: Page, paths: Sequence[int], timeout: float) -> Extent:
        """Return a slot for a page of gradients.

        Args:
            page: that is written.
            paths: by page, where all of them are written to.
            timeout: seconds to wait for a slot of the area.

        Raises:
            BudgetError, StorageError: there is no room for an area. StallError: no slot came back.
        """
        path, length = paths[page.index], page.nbytes
        lent = False
        extent = self._own.take_free(path, length)
        if extent is None:
            extent = self._state.lend(path, length)
            lent = extent is not None
        if extent is None:
            self._make_area(paths)
            extent = self._own.take(path, length, timeout)
        self._held[extent] = page.index, lent
        return extent

    def give(self, extent: Extent) -> None:
        """Take a slot back."""
        _, lent = self._held.pop(extent)
        (self._state if lent else self._own).give(extent)
        if not lent and not self._stays:
            self._give_back()

    def expect(self, stored: bool, paths: Sequence[int]) -> None:
        """Have an area if gradients are stored in every step, and none if not, once none are there.

        Raises:
            BudgetError, StorageError: there is no room for it.
        """
        self._stays = stored
        if stored:
            self._make_area(paths)
        else:
            self._give_back()

    def _give_back(self) -> None:
        with self.growing:
            if self._own.drain(self.area):
                self._files.cut(self._slots())  # an area of the run before this one, too
                self.area = ()

    def _make_area(self, paths: Sequence[int]) -> None:
        """Have as many slots as all gradients need on their paths."""
        on = {page.index: {paths[page.index]} for page in self._pages}
        for extent, (page, _) in list(self._held.items()):
            on[page].add(extent.path)  # it may have been spread anew meanwhile
        needed = needed_slots(self._pages, list(on.values()), self._spare, 0)
        with self.growing:
            more = missing_slots(self.area, needed, behind=self._slots())
            if more:
                self._files.allocate(more)
                self._own.add(more)
                self.area = (*self.area, *more)
