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
        paths: path of each page.
        spare: maximum number of writes in flight per class.
        files: functions that allocate and release the blocks of the area.
        slots: function that returns all slots of the state, which the area follows.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        paths: Sequence[int],
        spare: int,
        files: FileLengths,
        slots: Callable[[], Sequence[SlotClass]],
    ) -> None:
        of_gradients = [page for page in pages if page.role is Role.GRAD]
        self._needed = needed_slots(of_gradients, [paths[page.index] for page in of_gradients], spare, 0)
        """Number of slots in the area, by (path, length)."""
        self._files, self._slots = files, slots
        self._own = ExtentAllocator(())
        """Slots in the area."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots in the area; empty if there is no area. Changed only while `growing` is held."""
        self.growing = Lock()
        """Held while files are extended or truncated, so that no other thread adds slots at the same offsets. `give`
        never takes this lock, so slots can be freed while another thread holds it."""
        self._waiting = 0
        """Number of writes that wait for a slot and therefore need the area. Changed only while `growing` is held."""

    def expect(self, stored: bool) -> None:
        """Allocate the area if gradients may be stored. Otherwise release it, unless it contains gradients.

        Args:
            stored: whether gradients may be stored.

        Raises:
            BudgetError, StorageError: if the area cannot be allocated.
        """
        if stored:
            with self.growing:
                self._allocate()
        elif self.area:
            with self.growing:
                if not self._waiting and self._own.drain(self.area):
                    self._files.cut(self._slots())
                    self.area = ()

    def take(self, path: int, length: int, timeout: float) -> Extent:
        """Return a slot of `length` bytes on a path, for a page that is about to be written.

        Args:
            path: index of the path.
            length: size of the page in bytes.
            timeout: number of seconds to wait for a slot.

        Raises:
            BudgetError, StorageError: if the area cannot be allocated.
            StallError: if no slot is freed in time.
        """
        extent = self._own.take_free(path, length)
        if extent is None:
            with self.growing:
                self._allocate()
                self._waiting += 1
            try:
                extent = self._own.take(path, length, timeout)
            finally:
                with self.growing:
                    self._waiting -= 1
        return extent

    def give(self, extent: Extent) -> None:
        """Free a slot."""
        self._own.give(extent)

    def _allocate(self) -> None:
        """Allocate the area if it does not exist. The caller must hold `growing`."""
        if not self.area and self._needed:
            slots = missing_slots((), self._needed, behind=self._slots())
            self._files.allocate(slots)
            self._own.add(slots)
            self.area = slots
