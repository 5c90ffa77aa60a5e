"""Which page has which cache slot of the host cache, and what keeps it there.

Bookkeeping only: nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.memory.host_cache import HostCachePart


@dataclass(slots=True)
class PageState:
    """Where one page is, and what keeps it in memory. `Cache` changes it (and who else is named), under the lock.

    Life cycle: without a cache slot, the content is in the store, or nowhere (`has` of the store is false: never
    written, or
    consumed). With a cache slot it is being read, or valid; valid content is clean or dirty, and may be being written:

        no cache slot --assign, read--> reading --read ends--> clean <--write ends-- writing
                 --assign--------> (content to be replaced)  |                     ^
                                                             +--modified--> dirty --+--write back
        clean, and nothing keeps it --evict--> no cache slot

    Pins, claims and `resident` keep a cache slot. What nothing keeps is evicted: at once if it is clean, when it has
    been
    written back if it is dirty.
    """

    cache_slot: int = -1
    """Number of its cache slot, or -1; changed by `CacheSlots`."""
    reading: bool = False
    """Whether the cache slot is being filled from the store: its bytes mean nothing yet."""
    writing: bool = False
    """Whether the store is reading the cache slot: its bytes must not change."""
    dirty: bool = False
    """Whether the cache slot is newer than the store, and that is not on its way there."""
    leaving: int = 0
    """Copies of it to a device that have not ended: its bytes must not change."""
    landing: int = 0
    """Copies from a device into it that have not ended: its bytes mean nothing yet."""
    pins: int = 0
    """Accesses and held reservations that use it at this moment, and copies to a device or from it that have not ended.
    """
    claims: int = 0
    """Uses inside the plan's window; where the plan keeps a page, the last use leaves its claim for the next one."""
    resident: bool = False
    """Whether the plan keeps it always."""
    reservations: int = 0
    """Reservations that have been made and not returned; changed by `Pager`."""
    returned: int = 0
    """Reservations that have been returned, ever; changed by `Pager`."""


class CacheSlots:
    """The page table: which cache slot has which page, and which are free. Everything is read and changed under the
    lock.

    Args:
        pages: by number. There may be more later, see `grow`.
        host cache: the cache slots.
    """

    def __init__(self, pages: Sequence[Page], host_cache: HostCachePart) -> None:
        self._known, self._host_cache = pages, host_cache
        self.count = host_cache.cache_slots
        """Cache slots of the host cache; fixed."""
        self.pages = [PageState() for _ in pages]
        """By number of the page. The states change; `grow` adds to them."""
        self.free = list(range(host_cache.cache_slots))[::-1]
        """Numbers of cache slots without a page, the next one to be assigned last."""
        self._page_of = [-1] * host_cache.cache_slots
        """Page of each cache slot, or -1; changed by `assign` and `release`."""

    def grow(self) -> None:
        """Have a state for pages that there are now."""
        self.pages += [PageState() for _ in self._known[len(self.pages) :]]

    def holders(self) -> list[int]:
        """Return the pages that have a cache slot, in the order of their cache slots."""
        return [page for page in self._page_of if page >= 0]

    def nbytes(self, page: int) -> int:
        """Return the size of a page in bytes."""
        return self._known[page].nbytes

    def content(self, page: int) -> memoryview:
        """Return the bytes of a page that has a cache slot."""
        return self._host_cache.view(self.pages[page].cache_slot, self._known[page].nbytes)

    def assign(self, page: int) -> None:
        """Give a free cache slot to a page that has none."""
        cache_slot = self.free.pop()
        self.pages[page].cache_slot = cache_slot
        self._page_of[cache_slot] = page

    def release(self, page: int) -> None:
        """Take the cache slot of a page back."""
        state = self.pages[page]
        self._page_of[state.cache_slot] = -1
        self.free.append(state.cache_slot)
        state.cache_slot = -1

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status: free, resident, streaming, writing."""
        counts = {"free": len(self.free), "resident": 0, "streaming": 0, "writing": 0}
        for page in self.holders():
            state = self.pages[page]
            counts["writing" if state.writing else "resident" if state.resident else "streaming"] += 1
        return counts

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the host cache by role."""
        held = {role.value: 0 for role in Role}
        for page in self.holders():
            held[self._known[page].role.value] += self._known[page].nbytes
        return held
