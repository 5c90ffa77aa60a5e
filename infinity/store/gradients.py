"""Where stored gradients lie: in slots that the state leaves free, else in an area behind all slots of the state.

[Note: where gradients lie] Gradients are in no commit, and many runs never store any: they are used up where they
arrive, or stay in the arena. So little is reserved for them at first. In the first step, which is served on demand,
they are lent slots of the next commit. An area of their own, at the end of the data files, is made for those that no
slot can be lent to, and for all when the plan says that gradients are stored in every step, or when no slot may be
lent. It is given back where a plan stores none.

[Note: what may be lent] Whoever writes a page of the state must find a slot. So each page of gradients may have a
*host*, a page of the state of the same unit that is no shorter, and no two have the same. A slot is lent in place of
that which the next version of the host will take: the host needs one more slot than it has only if its current
version is that of a commit (or there is none yet, and all slots for commits are free), and it is written after the
update of its unit, when the gradients have given theirs back.
"""

from __future__ import annotations

from collections import defaultdict
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
        self._hosts = _hosts(pages)
        self._held: dict[Extent, int] = {}
        """By slot that is taken, the page that it is for. Each is put in and taken out once."""
        self._lent: set[Extent] = set()
        """Those that are lent."""
        self.area: tuple[SlotClass, ...] = ()
        """All slots of the area; empty where there is none. Changed under `growing`."""
        self._stays = True
        """Whether an area is there to stay: not if a plan stores no gradients."""
        self.growing = Lock()
        """Held while slots are added to the files, so that nobody else adds slots in the same place."""

    def host(self, page: int) -> int | None:
        """Return the page of the state whose next slot may be lent to a page of gradients, if it has one."""
        return self._hosts.get(page)

    def reserve(self, paths: Sequence[int], *, lending: bool) -> None:
        """Have an area for all gradients, or with lending for those alone that no slot can be lent to.

        Raises:
            BudgetError, StorageError: there is no room for it.
        """
        self._make_area([page for page in self._pages if not lending or page.index not in self._hosts], paths)

    def take(self, page: Page, paths: Sequence[int], host: Page | None, timeout: float) -> Extent:
        """Return a slot for a page of gradients.

        Args:
            page: that is written.
            paths: by page, where all of them are written to.
            host: if the slot of its next version may be lent now.
            timeout: seconds to wait for a slot of the area.

        Raises:
            BudgetError, StorageError: there is no room for an area. StallError: no slot came back.
        """
        extent = self._own.take_free(paths[page.index], page.nbytes)
        if extent is None and host is not None and not self._borrows(page.index):
            extent = self._state.lend(paths[host.index], host.nbytes, page.nbytes)
            if extent is not None:
                self._lent.add(extent)
        if extent is None:
            self._make_area(self._pages, paths)
            extent = self._own.take(paths[page.index], page.nbytes, timeout)
        self._held[extent] = page.index
        return extent

    def _borrows(self, page: int) -> bool:
        """Whether a version of the page is in a slot that is lent: a host has one slot to lend."""
        return any(self._held[extent] == page for extent in list(self._lent))

    def give(self, extent: Extent) -> None:
        """Take a slot back."""
        del self._held[extent]
        if extent in self._lent:
            self._lent.remove(extent)
            self._state.give(extent)
        else:
            self._own.give(extent)
            if not self._stays:
                self._give_back()

    def expect(self, stored: bool, paths: Sequence[int]) -> None:
        """Have an area if gradients are stored in every step, and none if not, once none are there.

        Raises:
            BudgetError, StorageError: there is no room for it.
        """
        self._stays = stored
        if stored:
            self._make_area(self._pages, paths)
        else:
            self._give_back()

    def _give_back(self) -> None:
        with self.growing:
            if self._own.drain(self.area):
                self._files.cut(self._slots())  # an area of the run before this one, too
                self.area = ()

    def _make_area(self, pages: Sequence[Page], paths: Sequence[int]) -> None:
        """Have as many slots as some pages need on their paths."""
        on = {page.index: {paths[page.index]} for page in pages}
        for extent, page in list(self._held.items()):
            on.setdefault(page, set()).add(extent.path)  # it may have been spread anew meanwhile
        members = [page for page in self._pages if page.index in on]
        needed = needed_slots(members, [on[page.index] for page in members], self._spare, 0)
        with self.growing:
            more = missing_slots(self.area, needed, behind=self._slots())
            if more:
                self._files.allocate(more)
                self._own.add(more)
                self.area = (*self.area, *more)


def _hosts(pages: Sequence[Page]) -> dict[int, int]:
    """Return by page of gradients its host, where it has one. [Note: what may be lent]"""
    hosts: dict[int, int] = {}
    units: dict[int, tuple[list[Page], list[Page]]] = defaultdict(lambda: ([], []))
    for page in pages:
        units[page.unit][page.role is Role.GRAD].append(page)
    for state, gradients in units.values():
        # The longest with the longest: if that does not fit, no other choice gives more of them a host.
        free = iter(sorted(state, key=lambda page: -page.nbytes))
        host = next(free, None)
        for page in sorted(gradients, key=lambda page: -page.nbytes):
            if host is not None and host.nbytes >= page.nbytes:
                hosts[page.index] = host.index
                host = next(free, None)
    return hosts
