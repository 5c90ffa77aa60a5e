"""The page table of the host cache: the cache slot of each page, and the reasons to keep the page there.

Bookkeeping only: this module moves no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.memory.host_cache import HostCachePart


@dataclass(slots=True)
class PageState:
    """Location of one page, and the reasons to keep it in memory. Changed under the lock, by `Cache` unless noted
    otherwise.

    Life cycle: without a cache slot, the content is in the store or does not exist (`has` of the store returns
    ``False``: it was never written, or it was consumed). With a cache slot, the content is being read or is valid.
    Valid content is clean or dirty, and may be being written:

        no cache slot --assign, read--> reading --read ends--> clean <--write ends-- writing
             --assign--------> (content to be replaced)  |                     ^
                                                         +--modified--> dirty --+--write back
        clean, no reason to keep it --evict--> no cache slot

    Pins, claims and `resident` keep a page in its cache slot. Otherwise it is evicted: at once if it is clean, after a
    write if it is dirty.
    """

    cache_slot: int = -1
    """Index of its cache slot, or -1. Changed by `CacheSlots`."""
    reading: bool = False
    """The cache slot is being filled from the store: its bytes are not valid yet."""
    writing: bool = False
    """The store is reading the cache slot: its bytes must not change."""
    dirty: bool = False
    """The cache slot is newer than the store, and no write of it is in flight."""
    leaving: int = 0
    """Number of copies to a device in flight: the bytes must not change."""
    landing: int = 0
    """Number of copies from a device in flight: the bytes are not valid yet."""
    pins: int = 0
    """Number of accesses and held reservations that currently use the page, plus copies to or from a device in flight.
    """
    claims: int = 0
    """Number of uses inside the window of the plan. If the plan keeps a page, a use leaves its claim to the next use.
    """
    resident: bool = False
    """The plan always keeps the page."""
    reservations: int = 0
    """Number of reservations that have been created and not returned. Changed by `Pager`."""
    returned: int = 0
    """Total number of reservations that have been returned. Changed by `Pager`."""


class CacheSlots:
    """Assignment of cache slots to pages. Every attribute is read and changed under the lock.

    Args:
        pages: pages by number. Pages may be added later, see `grow`.
        host_cache: the cache slots.
    """

    def __init__(self, pages: Sequence[Page], host_cache: HostCachePart) -> None:
        self._known, self._host_cache = pages, host_cache
        self.count = host_cache.cache_slots
        """Number of cache slots of the host cache; fixed."""
        self.pages = [PageState() for _ in pages]
        """States by page number. `grow` adds states."""
        self.free = list(range(host_cache.cache_slots))[::-1]
        """Cache slots without a page. The last one is assigned next."""
        self._page_of = [-1] * host_cache.cache_slots
        """Page of each cache slot, or -1. Changed by `assign` and `release`."""

    def grow(self) -> None:
        """Add states for pages that were added to the sequence of pages."""
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
        """Assign a free cache slot to a page that has none."""
        cache_slot = self.free.pop()
        self.pages[page].cache_slot = cache_slot
        self._page_of[cache_slot] = page

    def release(self, page: int) -> None:
        """Take the cache slot from a page and mark it as free."""
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
        """Return the bytes of pages in the host cache, by role."""
        held = {role.value: 0 for role in Role}
        for page in self.holders():
            held[self._known[page].role.value] += self._known[page].nbytes
        return held
