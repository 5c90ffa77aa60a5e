"""Which page has which frame of the arena, and what keeps it there. Bookkeeping only: nothing is moved here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.memory.arena import ArenaPart


@dataclass(slots=True)
class PageState:
    """Where one page is, and what keeps it in memory. `Cache` changes it (and who else is named), under the lock.

    Life cycle: without a frame, the content is in the store, or nowhere (`has` of the store is false: never written, or
    consumed). With a frame it is being read, or valid; valid content is clean or dirty, and may be being written:

        no frame --assign, read--> reading --read ends--> clean <--write ends-- writing
                 --assign--------> (content to be replaced)  |                     ^
                                                             +--modified--> dirty --+--write back
        clean, and nothing keeps it --evict--> no frame

    Pins, claims and `resident` keep a frame. What nothing keeps is evicted: at once if it is clean, when it has been
    written back if it is dirty.
    """

    frame: int = -1
    """Number of its frame, or -1; changed by `Frames`."""
    reading: bool = False
    """Whether the frame is being filled from the store: its bytes mean nothing yet."""
    writing: bool = False
    """Whether the store is reading the frame: its bytes must not change."""
    dirty: bool = False
    """Whether the frame is newer than the store, and that is not on its way there."""
    leaving: int = 0
    """Copies of it to a device that have not ended: its bytes must not change."""
    landing: int = 0
    """Copies from a device into it that have not ended: its bytes mean nothing yet."""
    pins: int = 0
    """Accesses and held leases that use it at this moment, and copies to a device or from it that have not ended."""
    claims: int = 0
    """Uses inside the plan's window; where the plan keeps a page, the last use leaves its claim for the next one."""
    resident: bool = False
    """Whether the plan keeps it always."""
    leases: int = 0
    """Leases that have been made and not returned; changed by `Pager`."""
    returned: int = 0
    """Leases that have been returned, ever; changed by `Pager`."""


class Frames:
    """The page table: which frame has which page, and which are free. Everything is read and changed under the lock.

    Args:
        pages: by number. There may be more later, see `grow`.
        arena: the frames.
    """

    def __init__(self, pages: Sequence[Page], arena: ArenaPart) -> None:
        self._known, self._arena = pages, arena
        self.count = arena.frames
        """Frames of the arena; fixed."""
        self.pages = [PageState() for _ in pages]
        """By number of the page. The states change; `grow` adds to them."""
        self.free = list(range(arena.frames))[::-1]
        """Numbers of frames without a page, the next one to be assigned last."""
        self._page_of = [-1] * arena.frames
        """Page of each frame, or -1; changed by `assign` and `release`."""

    def grow(self) -> None:
        """Have a state for pages that there are now."""
        self.pages += [PageState() for _ in self._known[len(self.pages) :]]

    def holders(self) -> list[int]:
        """Return the pages that have a frame, in the order of their frames."""
        return [page for page in self._page_of if page >= 0]

    def nbytes(self, page: int) -> int:
        """Return the size of a page in bytes."""
        return self._known[page].nbytes

    def content(self, page: int) -> memoryview:
        """Return the bytes of a page that has a frame."""
        return self._arena.view(self.pages[page].frame, self._known[page].nbytes)

    def assign(self, page: int) -> None:
        """Give a free frame to a page that has none."""
        frame = self.free.pop()
        self.pages[page].frame = frame
        self._page_of[frame] = page

    def release(self, page: int) -> None:
        """Take the frame of a page back."""
        state = self.pages[page]
        self._page_of[state.frame] = -1
        self.free.append(state.frame)
        state.frame = -1

    def census(self) -> dict[str, int]:
        """Return the number of frames by status: free, resident, streaming, writing."""
        counts = {"free": len(self.free), "resident": 0, "streaming": 0, "writing": 0}
        for page in self.holders():
            state = self.pages[page]
            counts["writing" if state.writing else "resident" if state.resident else "streaming"] += 1
        return counts

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the arena by role."""
        held = {role.value: 0 for role in Role}
        for page in self.holders():
            held[self._known[page].role.value] += self._known[page].nbytes
        return held
