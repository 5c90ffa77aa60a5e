"""The page table of the host cache, which records the cache slot of each page and the reasons to keep the page there.

This module only keeps records. It does not move data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.content.format import Role
from infinity.content.layout import Page

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class PageState:
    """Location of one page, and the reasons to keep it in memory. All fields are changed under the lock, by `Cache`
    unless noted otherwise.

    Life cycle: the content of a page without a cache slot is in the store, or it does not exist because it was never
    written or has been consumed (the store's `has` returns ``False``). The content of a page with a cache slot is being
    read or is valid. Valid content is clean or dirty, or it is currently being written:

        no cache slot --assign, read--> reading --read ends--> clean <--write ends-- writing
             --assign--------> (content to be replaced)  |                     ^
                                                         +--modified--> dirty --+--write back
        clean, no reason to keep it --evict--> no cache slot

    Pins, claims (uses inside the window of the plan) and `resident` keep a page in its cache slot. Without them the
    page may be evicted: immediately if it is clean, or after a write if it is dirty.
    """

    cache_slot: int = -1
    """Index of the page's cache slot, or -1. Changed by `CacheSlots`."""
    content: memoryview = _NOTHING
    """Bytes of the page in its cache slot. Changed by `CacheSlots`."""
    reading: bool = False
    """``True`` while the cache slot is being filled from the store, so that its bytes are not valid yet."""
    writing: bool = False
    """``True`` while the store reads the cache slot, so that its bytes must not change."""
    dirty: bool = False
    """``True`` if the content is newer than in the store and is not being written."""
    leaving: int = 0
    """Number of copies to a device in flight. The bytes must not change until these copies have ended."""
    landing: int = 0
    """Number of copies from a device in flight. The bytes are not valid until these copies have ended."""
    pins: int = 0
    """Number of accesses and held reservations that currently use the page, including accesses whose copies to or from
    a device are still in flight.
    """
    claims: int = 0
    """Number of uses of the page inside the window of the plan. If the plan keeps the page until its next use, that use
    inherits the claim.
    """
    resident: bool = False
    """``True`` if the plan keeps the page in the host cache permanently."""
    reservations: int = 0
    """Number of outstanding reservations of the page: created, but not yet returned. Changed by `Pager`."""
    returned: int = 0
    """Total number of reservations of the page that have been returned. Changed by `Pager`."""


class CacheSlots:
    """Assignment of cache slots to pages. Every attribute is read and changed under the lock.

    Args:
        pages: all pages, by number. To add pages later, extend this sequence and call `grow`.
        slots: memory of the cache slots.
    """

    def __init__(self, pages: Sequence[Page], slots: Sequence[memoryview]) -> None:
        self._known, self._slots = pages, slots
        self.count = len(slots)
        """Total number of cache slots. Constant."""
        self.pages = [PageState() for _ in pages]
        """State of each page, by page number. `grow` adds states."""
        self.free = list(range(len(slots)))[::-1]
        """Free cache slots. The last one in the list is assigned next."""
        self._held_bytes = dict.fromkeys(Role, 0)
        """Bytes of the pages that have a cache slot, by role. Changed by `assign` and `release`."""
        self._page_of = [-1] * len(slots)
        """Page in each cache slot, or -1 if the slot is free. Changed by `assign` and `release`."""

    def grow(self) -> None:
        """Add states for the pages that have been appended to `pages`."""
        self.pages += [PageState() for _ in self._known[len(self.pages) :]]

    def holders(self) -> list[int]:
        """Return the pages that have a cache slot, ordered by cache slot."""
        return [page for page in self._page_of if page >= 0]

    def nbytes(self, page: int) -> int:
        """Return the size of a page in bytes."""
        return self._known[page].nbytes

    def assign(self, page: int) -> None:
        """Assign a free cache slot to a page that has no cache slot."""
        cache_slot = self.free.pop()
        state = self.pages[page]
        state.cache_slot, state.content = cache_slot, self._slots[cache_slot][: self._known[page].nbytes]
        self._held_bytes[self._known[page].role] += self._known[page].nbytes
        self._page_of[cache_slot] = page

    def release(self, page: int) -> None:
        """Free the cache slot of a page."""
        state = self.pages[page]
        self._page_of[state.cache_slot] = -1
        self.free.append(state.cache_slot)
        state.cache_slot, state.content = -1, _NOTHING
        self._held_bytes[self._known[page].role] -= self._known[page].nbytes

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status: ``free``, ``resident``, ``streaming`` or ``writing``."""
        counts = {"free": len(self.free), "resident": 0, "streaming": 0, "writing": 0}
        for page in self.holders():
            state = self.pages[page]
            counts["writing" if state.writing else "resident" if state.resident else "streaming"] += 1
        return counts

    def held_bytes(self) -> dict[str, int]:
        """Return the number of bytes that pages occupy in the host cache, by role."""
        return {role.value: nbytes for role, nbytes in self._held_bytes.items()}
