"""The host cache as a cache of pages: acquire, release, prefetch, write back, evict. All under the one lock.

[Note: allocation of cache slots] A thread that waits for a cache slot now (`acquire`) comes first, then the window of
the plan, in its order. For a use that needs the old content of a page, the page is read ahead. For a use that replaces
the content, a cache slot is left free, so that no prefetch of a later page takes it in the meantime. A cache slot
becomes free when a clean page that nothing keeps (no pin, no claim, not resident) is evicted. If there is no such page
and a thread is waiting, dirty pages that nothing keeps are written back. If there are no such pages either, which is
possible off the plan, the cache evicts pages that the plan needs later and has to read again: first streaming pages,
last resident pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from infinity.errors import InfinityError
from infinity.memory.device import DeviceEvent
from infinity.schedule.cache_slots import CacheSlots, PageState
from infinity.schedule.copies import Copies
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import PageReaderWriter, PagerObserver, Transfers

_WRITTEN_BACK = 4
"""Number of dirty pages that are written back at the same time when a cache slot is needed. One is enough; more keep
the drive busy.
"""


class Cache:
    """Moves pages between cache slots and the store. Every method and attribute except `drain` requires the lock.

    Between `acquire` and `release`, the pages of an access are pinned: their content is in memory, and no other thread
    moves it. `claim` and `release_claim` declare which pages the window of a plan needs in memory; `prefetch` reads
    them.

    Args:
        cache_slots: page table.
        transfers: transfers in flight, with the lock.
        store: storage that pages are read from and written to.
        observer: receiver of telemetry.
        timeout: time limit of a copy between a cache slot and a device, in seconds.
        enter_thread: called first in the thread that waits for these copies.
        named: whether the observer knows pages by number. If so, it receives the number of a page that was waited for.
        setting: key of the setting that determines the number of cache slots, for error messages.
    """

    def __init__(
        self,
        cache_slots: CacheSlots,
        transfers: Transfers,
        store: PageReaderWriter,
        observer: PagerObserver,
        *,
        timeout: float,
        enter_thread: Callable[[], None],
        named: bool = True,
        setting: str = "memory.host_bytes",
    ) -> None:
        self._cache_slots, self._transfers, self._store, self._observer = cache_slots, transfers, store, observer
        self._named, self._setting = named, setting
        self._reads = self._writes = 0
        """Number of pages of this cache that are being read and written. `Transfers` may count pages of other caches
        too.
        """
        self.eager = False
        """``True`` if a page without a pin or claim is evicted as soon as its write, or its copy to a device, has
        ended, as a plan requires. Otherwise the page stays until its cache slot is needed. (`Cursor` evicts pages that
        leave the window.) The pager sets this attribute when a plan is installed.
        """
        self._held_reservations = 0
        """Number of reservations whose pages are pinned. Their cache slots are returned without any action of the
        training thread.
        """
        self.fetched_bytes = 0
        """Total bytes that were read, plus bytes that did not have to be read because a write of the page was still in
        flight.
        """
        self._returned = 0
        """Total number of transfers, copies and held reservations that have ended. Each may have freed a cache slot."""
        self._wanted: deque[Use] = deque()
        """Uses in the window whose pages have no cache slot, in the order of the plan. `claim` appends, `prefetch`
        removes.
        """
        self._reserved: set[int] = set()
        """Pages in the window without a cache slot whose content will be replaced, and that no thread is waiting for.
        The same number of free cache slots is not available to later uses of the plan.
        """
        self._awaited = 0
        """Number of threads that wait for a cache slot in `acquire`. The same number of free cache slots is not
        available to prefetches.
        """
        self.copies = Copies(transfers, self._end_copy, timeout=timeout, enter_thread=enter_thread)
        """Copies of pages to or from a device. The pages stay pinned meanwhile."""

    # Uses #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Pin pages in cache slots and wait until they can be used.

        A page can be used when it has been read and no device is copying into it. A use that modifies the page also
        waits until it is no longer being written, or copied to a device.

        Args:
            uses: distinct pages.
            threaded: whether this is not the training thread.

        Raises:
            InfinityError: if there are not enough cache slots for the pages that are in use at the same time.
            CorruptPageError, StorageError, StallError: as in `Transfers.wait`. No page is pinned in this case.
        """
        self._transfers.check()
        pages = self._cache_slots.pages
        # Pin all pages before waiting for any of them: a wait releases the lock, and an unpinned page could be evicted
        # or written back in the meantime.
        for use in uses:
            pages[use.page].pins += 1
        try:
            for use in uses:  # start all reads before waiting for the first one
                self._fetch(use, threaded=threaded)
            for use in uses:
                page, state = use.page, pages[use.page]
                if state.reading:
                    self._wait(partial(_is_read, state), "read", page, threaded=threaded)
                # A page that is being written is read and hashed by other threads, so a modification now would store a
                # torn page. After this wait, no new write of the page starts: the page is pinned, and `flush`, which
                # ignores pins, runs on the training thread and waits for all reservations first.
                if state.writing and use.mode.modifies:
                    self._wait(partial(_is_written, state), "write", page, threaded=threaded)
                self._wait(partial(_is_left_by_device, state, use.mode), "copy", page, threaded=threaded)
            # A read that failed to start has ended before any wait. Its error must be raised here and not by the next
            # access, because the cache slot does not contain the page.
            self._transfers.check()
        except BaseException:
            for use in uses:
                pages[use.page].pins -= 1
            raise

    def can_acquire(self, uses: Access) -> bool:
        """Return ``True`` if `acquire` would not wait."""
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if state.cache_slot < 0 or state.reading or (state.writing and use.mode.modifies):
                return False
            if not _is_left_by_device(state, use.mode):
                return False
        return True

    def _fetch(self, use: Use, *, threaded: bool) -> None:
        """Assign a cache slot to a page, and start to read its content if that is needed and not in memory."""
        page, state, fetches = use.page, self._cache_slots.pages[use.page], use.mode.fetches
        reads = fetches and state.cache_slot < 0 and self._store.has(page)
        if fetches:
            self._observer.fetched("miss" if reads else "late" if state.reading else "hit")
        self._reserved.discard(page)
        if state.cache_slot < 0:
            self._acquire_cache_slot(page, threaded=threaded)
        # Look again: the wait released the lock, and a completed transfer may have prefetched this page. A second cache
        # slot for the same page would split its content.
        if state.cache_slot < 0:
            self._cache_slots.assign(page)
            if reads:
                self._read(page)

    def release(self, uses: Access, device_event: DeviceEvent | None = None) -> None:
        """Record the effect of an access that has ended on the content of its pages, and unpin them.

        Args:
            uses: the pages.
            device_event: event after copies between the pages and a device: to the device for pages that are read, from
                the device for pages that are modified. The pages stay pinned until the device has passed it.
        """
        # A device copies asynchronously. Pins stay until the event has passed, because an evicted cache slot would be
        # overwritten by the next read while the device still uses it.
        pending = device_event if device_event is not None and not device_event.passed() else None
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if pending is not None:
                state.landing += use.mode.modifies
                state.leaving += not use.mode.modifies
            else:
                state.pins -= 1
            if use.mode.modifies:
                # Not earlier: a dirty page may be written back, and until now its content was changing.
                state.dirty = True
            elif use.mode is Mode.CONSUME:
                state.dirty = False
                self._store.discard(use.page)  # a write may still be in flight, see `PageStore._writing`
        if pending is not None:
            self.copies.add(pending, uses)

    def _end_copy(self, uses: Access) -> None:
        self._returned += 1
        for use in uses:
            state = self._cache_slots.pages[use.page]
            state.landing -= use.mode.modifies
            state.leaving -= not use.mode.modifies
            state.pins -= 1
            if self.eager:
                self.evict(use.page)
        self.prefetch()

    def acquire_reservation(self, uses: Access, *, threaded: bool) -> None:
        """Acquire pages for a reservation, whose cache slots are returned without any action of the training thread."""
        self.acquire(uses, threaded=threaded)
        self._held_reservations += 1

    def release_reservation(self, uses: Access, device_event: DeviceEvent | None) -> None:
        """Release the pages of `acquire_reservation`, as `release` does."""
        self._held_reservations -= 1
        self._returned += 1
        self.release(uses, device_event)

    def contents(self, uses: Access) -> list[memoryview]:
        """Return the bytes of pinned pages. Does not need the lock, because a pinned page keeps its cache slot."""
        return [self._cache_slots.content(use.page) for use in uses]

    def has_content(self, page: int) -> bool:
        """Return ``True`` if a page has content, in memory or in the store."""
        state = self._cache_slots.pages[page]
        return state.dirty or state.writing or self._store.has(page)

    def discard(self, page: int) -> None:
        """Drop the content of a page that will not be read again.

        The page must have no transfer in flight and no open reservation.
        """
        state = self._cache_slots.pages[page]
        state.dirty = False
        if state.cache_slot >= 0 and not state.pins:
            self._release_cache_slot(page)
        self._store.discard(page)

    # Window of the plan #

    def claim(self, use: Use, *, kept: bool) -> None:
        """Count a use that enters the window, and queue it if its page is not in memory.

        Args:
            use: the use.
            kept: whether the plan has kept the page since its previous use, which has left its claim for this one.
        """
        state = self._cache_slots.pages[use.page]
        state.claims += not kept
        if state.claims == 1:
            if state.cache_slot < 0:
                self._wanted.append(use)
            elif state.writing and use.mode.fetches:
                self.fetched_bytes += self._cache_slots.nbytes(use.page)
                self._observer.spared(self._cache_slots.nbytes(use.page))

    def release_claim(self, page: int) -> None:
        """Count a use that leaves the window."""
        state = self._cache_slots.pages[page]
        state.claims = max(0, state.claims - 1)
        if not state.claims:
            self._reserved.discard(page)

    def drop_claims(self) -> None:
        """Remove all claims of the window."""
        for state in self._cache_slots.pages:
            state.claims = 0
        self._reserved.clear()
        self._wanted.clear()

    def prefetch(self) -> None:
        """Start reads for the window, in its order, as far as cache slots are available.

        A page whose content will be replaced gets its cache slot when it is acquired. Until then, one cache slot is
        left free for it.
        """
        cache_slots = self._cache_slots
        while self._wanted:
            use = self._wanted[0]
            state = cache_slots.pages[use.page]
            if state.cache_slot < 0 and state.claims:
                if not use.mode.fetches:
                    # A thread that has pinned the page is waiting for a cache slot, and `_awaited` counts it. In
                    # `_reserved`, the page would count twice, and stay there after it got its cache slot.
                    if not state.pins:
                        self._reserved.add(use.page)
                elif self._store.has(use.page):
                    # Reads must leave cache slots for waiting threads and for earlier uses that replace their page.
                    # Otherwise a read for a later use takes the cache slot of an earlier one, which then has to evict
                    # pages of the window.
                    while len(cache_slots.free) <= self._awaited + len(self._reserved):
                        if not self._evict_clean():
                            return
                    cache_slots.assign(use.page)
                    self._read(use.page)
            self._wanted.popleft()

    # Eviction #

    def evict(self, page: int, *, consumed: bool = False) -> None:
        """Evict a page that has a cache slot and no pin or claim. If the page is dirty, write it back first.

        Args:
            page: the page.
            consumed: whether its content is no longer needed. If so, the page is evicted even if it is resident, and
                keeps its cache slot only if the window will replace its content.
        """
        state = self._cache_slots.pages[page]
        if state.cache_slot < 0 or state.pins or state.reading or state.writing:
            return
        if not consumed and (state.claims or state.resident):
            return
        if state.dirty:
            self._write(page)
        elif not (consumed and state.claims):
            self._release_cache_slot(page)

    def evict_all(self) -> None:
        """Evict every page that has no pin or claim and is not resident."""
        for page in self._cache_slots.holders():
            self.evict(page)

    def flush(self) -> None:
        """Write every dirty page back and wait until no page is being written. Raises as `Transfers.wait` does."""
        # A page must not be written while a device is still copying into its cache slot.
        self._transfers.wait(lambda: not self.copies.pending, "copy", -1)
        while True:
            self._transfers.check()
            for page in self._cache_slots.holders():
                state = self._cache_slots.pages[page]
                if state.dirty and not state.writing:
                    self._write(page)
            if not self._writes:
                return
            self._transfers.wait(self._nothing_is_written, "write", -1)

    def _nothing_is_written(self) -> bool:
        return not self._writes

    def _evict_clean(self) -> bool:
        """Evict a clean page without a pin or claim that is not resident. Return ``False`` if there is no such page."""
        for page in self._cache_slots.holders():
            state = self._cache_slots.pages[page]
            if not (state.pins or state.claims or state.dirty or state.reading or state.writing or state.resident):
                self._release_cache_slot(page)
                return True
        return False

    def _evict_kept(self) -> bool:
        """Evict one page that the plan needs later or, if there is no such page, a resident one. Return ``False``
        without both.
        """
        for resident in (False, True):
            for page in reversed(self._cache_slots.holders()):
                state = self._cache_slots.pages[page]
                if state.pins or state.reading or state.writing or state.resident is not resident:
                    continue
                if state.dirty:
                    self._write(page)
                else:
                    self._release_cache_slot(page)
                return True
        return False

    def _reads_in_vain(self) -> bool:
        """Return whether a page is being read that has lost its claim meanwhile, and is therefore evicted after the
        read.
        """
        states = (self._cache_slots.pages[page] for page in self._cache_slots.holders()) if self._reads else ()
        return any(state.reading and not (state.pins or state.claims or state.resident) for state in states)

    def _write_back_some(self) -> None:
        """Start to write back up to `_WRITTEN_BACK` dirty pages that have no pin or claim and are not resident."""
        started = 0
        for page in self._cache_slots.holders():
            state = self._cache_slots.pages[page]
            if state.dirty and not (state.pins or state.claims or state.writing or state.resident):
                self._write(page)
                started += 1
                if started == _WRITTEN_BACK:
                    return

    def _acquire_cache_slot(self, page: int, *, threaded: bool) -> None:
        """Wait until there is a free cache slot or the page has one. [Note: allocation of cache slots]"""
        cache_slots = self._cache_slots
        state = cache_slots.pages[page]
        while state.cache_slot < 0 and not cache_slots.free and not self._evict_clean():
            self._transfers.check()
            if not self._writes:
                self._write_back_some()
            # Evict pages that the plan needs, or give up, only if no cache slot will be returned without any action of
            # this thread. Otherwise the plan would lose pages because of timing, and read more bytes than predicted.
            idle = not (self._writes or self._held_reservations or self.copies.pending or self._reads_in_vain())
            if idle and not self._evict_kept() and not self._reads:
                raise InfinityError(
                    f"all {cache_slots.count} cache slots of the host cache are in use at the same time; "
                    f"set {self._setting} higher"
                )
            if not cache_slots.free:
                self._awaited += 1
                try:
                    self._wait(
                        partial(self._may_have_cache_slot, self._returned), "host_cache", page, threaded=threaded
                    )
                finally:
                    self._awaited -= 1

    def wait_for_cache_slot(self) -> bool:
        """Wait until a copy that ends may have freed a cache slot. Return ``False`` if no copy is pending."""
        if not self.copies.pending:
            return False
        self._wait(partial(self._may_have_cache_slot, self._returned), "host_cache", -1, threaded=False)
        return True

    def _may_have_cache_slot(self, returned: int) -> bool:
        """Return whether a cache slot is free, or an operation has ended since `returned` that may have freed one."""
        return bool(self._cache_slots.free) or self._returned != returned

    def _release_cache_slot(self, page: int) -> None:
        self._cache_slots.release(page)
        self._transfers.lock.notify_all()

    def drain(self) -> bool:
        """Wait for all transfers and copies without raising. After a failure, wait only for a short time.

        Not under the lock.

        Returns:
            ``True`` if the device no longer uses the cache slots.
        """
        with self._transfers.lock:
            self.drop_claims()
            self._transfers.drain(lambda: not self.copies.pending)
            done = not self.copies.pending
        self.copies.close()
        return done

    # Transfers #

    def _wait(self, ready: Callable[[], bool], cause: str, page: int, *, threaded: bool) -> None:
        self._transfers.wait(ready, cause, page if self._named else -1, threaded=threaded)

    def _read(self, page: int) -> None:
        state = self._cache_slots.pages[page]
        state.reading, state.dirty = True, False
        self._reads += 1
        self.fetched_bytes += self._cache_slots.nbytes(page)

        def ended(error: Exception | None) -> None:
            state.reading = False
            self._reads -= 1
            self._returned += 1
            if error is None:
                self.evict(page)  # the page may have lost its claim during the read

        self._transfers.read(self._store, page, self._cache_slots.content(page), ended)

    def _write(self, page: int) -> None:
        state = self._cache_slots.pages[page]
        state.writing, state.dirty = True, False
        self._writes += 1

        def ended(error: Exception | None) -> None:
            state.writing = False
            self._writes -= 1
            self._returned += 1
            if error is not None:
                state.dirty = True  # the cache slot still holds the only copy of the new content
                return  # start no further transfer after a failure
            if self.eager:
                self.evict(page)
            self.prefetch()

        self._transfers.write(self._store, page, self._cache_slots.content(page), ended)


def _is_read(state: PageState) -> bool:
    return not state.reading


def _is_written(state: PageState) -> bool:
    return not state.writing


def _is_left_by_device(state: PageState, mode: Mode) -> bool:
    """Return whether no copy by a device is in flight that conflicts with a use of the page."""
    return not state.landing and not (state.leaving and mode.modifies)
