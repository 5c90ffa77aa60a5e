"""The cache of pages in host memory: acquiring, releasing, prefetching, writing back and evicting pages.

A single lock protects all of this. A page is *pinned* while a thread uses it, and *claimed* while an upcoming access
inside the window of the plan needs it. It is *resident* if the plan keeps it permanently in the host cache. An access
is *off the plan* if no plan is followed or the plan did not expect the access.

[Note: allocation of cache slots] Free cache slots go first to threads that are waiting for one in `acquire`, and then
to the pages of the window, in the order of the plan. If a use needs the old content of a page, the page is read ahead
of time. If a use replaces the content, the cache leaves a slot free for the page, so that no prefetch of a later page
takes the slot in the meantime. To free a cache slot, the cache evicts a clean page that is evictable (not pinned, not
claimed and not resident). If there is no such page and a thread is waiting, it writes back dirty evictable pages. If
there are no such pages either, which is possible off the plan, the cache evicts pages that the plan will have to read
again: streaming pages first, resident pages last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import islice

from infinity.errors import InfinityError, StallError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.cache_slots import CacheSlots, PageState
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import PageReaderWriter, Transfers

_WRITTEN_BACK = 4
"""Number of dirty pages that are written back concurrently when a cache slot is needed. A single page would free a
slot; more pages keep the drive busy.
"""
_CHECKS = 20
"""Number of checks of the watchdog within the time limit."""


class Cache:
    """Moves pages between cache slots and the store.

    The caller of every method except `drain`, `close` and `contents` must hold the lock. All attributes are protected
    by the lock.

    Between `acquire` and `release`, the pages of an access are pinned: their content is in memory, and no other thread
    evicts them. `claim` and `release_claim` declare which pages the window of a plan needs in memory, and `prefetch`
    reads these pages.

    Args:
        store: storage that pages are read from and written to. ``None`` if every page has a cache slot.
        device: device that copies pages to or from cache slots.
        named: whether the page numbers of this cache are meaningful to the observer. If not, it receives -1 instead.
        setting: name of the setting that determines the number of cache slots, for error messages.
    """

    def __init__(
        self,
        cache_slots: CacheSlots,
        transfers: Transfers,
        store: PageReaderWriter | None,
        device: Device,
        *,
        named: bool = True,
        setting: str = "memory.host_bytes",
    ) -> None:
        self._cache_slots, self._transfers, self._store, self._device = cache_slots, transfers, store, device
        self._named, self._setting = named, setting
        self._reads = self._writes = 0
        """Numbers of pages of this cache that are being read and written. `Transfers` may also count pages of other
        caches.
        """
        self.eager = False
        """``True`` if an evictable page is evicted as soon as its write, or its copy to or from a device, has ended, as
        a plan requires. Otherwise the page stays until its cache slot is needed. (`Cursor` evicts pages that leave the
        window.) The pager sets this attribute when it installs a plan.
        """
        self._held_reservations = 0
        """Number of reservations whose pages are pinned. Their pages are released without any action by the training
        thread.
        """
        self.fetched_bytes = 0
        """Total number of bytes read, including reads that were avoided because the page was still being written."""
        self._returned = 0
        """Total number of transfers, copies and held reservations that have ended. Each may have freed a cache slot."""
        self._wanted: deque[Use] = deque()
        """Uses in the window whose pages have no cache slot, in the order of the plan. `claim` appends uses, and
        `prefetch` removes them.
        """
        self._reserved: set[int] = set()
        """Pages in the window that have no cache slot, whose content will be replaced, and that no thread is waiting
        for. An equal number of free cache slots is set aside for them and not available to later uses.
        """
        self._awaited = 0
        """Number of threads that are waiting for a cache slot. An equal number of free cache slots is set aside for
        these threads and not available to prefetches.
        """
        self.copies = 0
        """Number of copies of pages to or from a device that are in flight. The pages stay pinned until their copy has
        ended.
        """
        self._watchdog: threading.Thread | None = None
        """Thread that fails the run if the device does not respond. Started with the first copy."""
        self._closed = threading.Event()
        """Set by `close`, after which the end of a copy is ignored."""

    # Uses #

    def acquire(self, uses: Access, *, threaded: bool, ordered: Container[int] = (), reserved: bool = False) -> None:
        """Pin pages in cache slots and wait until they can be used.

        A page can be used when it has been read and no copy from a device is in flight. A use that modifies the page
        also waits until all writes of the page, and all copies of it to a device, have ended.

        Args:
            threaded: whether the calling thread is not the training thread.
            ordered: pages that only the device uses, after all copies from the device that are in flight.
            reserved: whether a reservation holds the pages, so that they will be released without any action by the
                training thread.

        Raises:
            InfinityError: if more pages are in use at the same time than there are cache slots.
            CorruptPageError, StorageError, StallError: if an operation fails or a wait exceeds the time limit. In this
                case, no page stays pinned.
        """
        self._transfers.check()
        pages = self._cache_slots.pages
        # Pin all pages before waiting for any of them. A wait releases the lock, and in the meantime an unpinned page
        # could be evicted or written back.
        for use in uses:
            pages[use.page].pins += 1
        try:
            hits = 0
            for use in uses:  # start all reads before waiting for the first one
                state = pages[use.page]
                if state.cache_slot < 0 or state.reading:
                    self._fetch(use, threaded=threaded)
                else:
                    hits += use.mode.fetches
            self._transfers.observer.fetched("hit", hits)
            for use in uses:
                (page, mode), state = use, pages[use.page]
                if state.reading:
                    self._wait(lambda state=state: not state.reading, "read", page, threaded=threaded)  # type: ignore[misc]
                # While a page is being written, other threads read and hash it, so a modification now would store a
                # torn page. No new write of the page starts after this wait, because the page is pinned. `flush`
                # ignores pins, but it runs on the training thread and first waits for all reservations.
                if state.writing and mode.modifies:
                    self._wait(lambda state=state: not state.writing, "write", page, threaded=threaded)  # type: ignore[misc]
                if (state.landing and page not in ordered) or (state.leaving and mode.modifies):
                    self._wait(partial(_is_left_by_device, state, mode), "copy", page, threaded=threaded)
            # If a read fails to start, no wait above raises its error. The error must be raised here rather than by the
            # next access, because the cache slot does not contain the page.
            self._transfers.check()
        except BaseException:
            for use in uses:
                pages[use.page].pins -= 1
            raise
        self._held_reservations += reserved

    def _fetch(self, use: Use, *, threaded: bool) -> None:
        page, state, fetches = use.page, self._cache_slots.pages[use.page], use.mode.fetches
        reads = fetches and state.cache_slot < 0 and self._is_stored(page)
        if fetches:
            self._transfers.observer.fetched("miss" if reads else "late" if state.reading else "hit")
        self._reserved.discard(page)
        if state.cache_slot < 0:
            self._acquire_cache_slot(page, threaded=threaded)
        # Check again, because the wait released the lock, and the end of a transfer may have started a prefetch of this
        # page. A page must not have two cache slots, because their contents would diverge.
        if state.cache_slot < 0:
            self._cache_slots.assign(page)
            if reads:
                self._read(page)

    def release(self, uses: Access, device_event: DeviceEvent | None = None, *, reserved: bool = False) -> None:
        """Unpin the pages of an access that has ended, and record whether their content was modified or consumed.

        Args:
            device_event: event recorded after the copies between the pages and a device. Pages that are read are copied
                to the device, and pages that are modified are copied from it. All pages stay pinned until the device
                has passed the event. If ``None``, there are no copies.
            reserved: whether a reservation has held the pages, as for `acquire`.
        """
        self._held_reservations -= reserved
        self._returned += reserved
        # Copies are asynchronous. Pages stay pinned until the device has passed the event. Otherwise a cache slot could
        # be freed and overwritten by the next read while the device still uses it.
        pending = device_event if device_event is not None and not device_event.passed() else None
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if pending is not None:
                state.landing += use.mode.modifies
                state.leaving += not use.mode.modifies
            else:
                state.pins -= 1
            if use.mode.modifies:
                # Set only now, because a dirty page may be written back, and until now its content was changing.
                state.dirty = True
            elif use.mode is Mode.CONSUME:
                state.dirty = False
                if self._store is not None:
                    self._store.discard(use.page)  # a write may still be in flight, see `PageStore._writing`
        if pending is not None:
            self._begin_copy(pending, uses)

    # Copies. Threads of the device wait for the events, without holding the lock, so cache slots become free regardless
    # of the activity of other threads.

    def _begin_copy(self, device_event: DeviceEvent, uses: Access) -> None:
        """Track a copy of the pages of an access. The copy ends when the device passes the event."""
        self.copies += 1
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, name="infinity-watchdog", daemon=True)
            self._watchdog.start()
        device_event.then(partial(self._end_copy, uses))

    def _end_copy(self, uses: Access, error: Exception | None) -> None:
        with self._transfers.lock:
            if self._closed.is_set():
                return
            if error is not None:  # raised by the device; the pages stay pinned because it may still use them
                self._transfers.fail(error)
                return
            self.copies -= 1
            self._transfers.copied = time.perf_counter()
            self._returned += 1
            for use in uses:
                state = self._cache_slots.pages[use.page]
                state.landing -= use.mode.modifies
                state.leaving -= not use.mode.modifies
                state.pins -= 1
                if self.eager:
                    self.evict(use.page)
            self.prefetch()
            self._transfers.lock.notify_all()

    def _watch(self) -> None:
        progress, quiet = -1, 0  # `quiet` is the number of checks since the last progress
        while not self._closed.wait(self._transfers.timeout / _CHECKS):
            with self._transfers.lock:
                quiet = quiet + 1 if self.copies and self._device.progress == progress else 0
                progress = self._device.progress
                if quiet >= _CHECKS:
                    self._transfers.fail(
                        StallError(f"waited {self._transfers.timeout:.0f} s for the device to copy pages")
                    )

    def close(self) -> None:
        """End all threads, and ignore copies that are still in flight. Must be called without the lock."""
        with self._transfers.lock:
            self._closed.set()
        if self._watchdog is not None:
            self._watchdog.join()
        self._device.end_threads()

    def contents(self, uses: Access) -> list[memoryview]:
        """Return the bytes of pinned pages. No lock is required, because a pinned page keeps its cache slot."""
        pages = self._cache_slots.pages
        return [pages[use.page].content for use in uses]

    def has_content(self, page: int) -> bool:
        """Return ``True`` if a page has content in memory or in the store."""
        state = self._cache_slots.pages[page]
        return state.dirty or state.writing or self._is_stored(page)

    def discard(self, page: int) -> None:
        """Drop the content of a page that will not be read again.

        The page must have no transfer in flight and no outstanding reservation.
        """
        state = self._cache_slots.pages[page]
        state.dirty = False
        if state.cache_slot >= 0 and not state.pins:
            self._release_cache_slot(page)
        if self._store is not None:
            self._store.discard(page)

    # Window of the plan #

    def claim(self, uses: Iterable[Use], kept: Container[int] = ()) -> None:
        """Claim the pages of uses that enter the window. Uses whose pages are not in memory are queued for `prefetch`.

        Args:
            kept: pages that the plan has kept since their previous use, whose claim the next use inherits.
        """
        for use in uses:
            state = self._cache_slots.pages[use.page]
            state.claims += use.page not in kept
            if state.claims == 1:
                if state.cache_slot < 0:
                    self._wanted.append(use)
                elif state.writing and use.mode.fetches:
                    self.fetched_bytes += self._cache_slots.nbytes(use.page)
                    self._transfers.observer.spared(self._cache_slots.nbytes(use.page))

    def release_claims(self, uses: Iterable[Use], kept: Container[int] = ()) -> None:
        """Release the claims of uses that leave the window. Pages in `kept` keep their claims."""
        for use in uses:
            if use.page not in kept:
                state = self._cache_slots.pages[use.page]
                state.claims = max(0, state.claims - 1)
                if not state.claims:
                    self._reserved.discard(use.page)

    def evict_used(self, uses: Iterable[Use]) -> None:
        """Evict the pages of uses that have left the window, if they are evictable."""
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if use.mode is Mode.CONSUME or not (state.claims or state.resident or state.pins):
                self.evict(use.page, consumed=use.mode is Mode.CONSUME)

    def drop_claims(self) -> None:
        """Release all claims of the window."""
        for state in self._cache_slots.pages:
            state.claims = 0
        self._reserved.clear()
        self._wanted.clear()

    def prefetch(self) -> None:
        """Start reading pages of the window, in the order of the plan, as far as cache slots are available.

        A page whose content will be replaced gets its cache slot when it is acquired. Until then, one cache slot is
        left free for it.
        """
        cache_slots = self._cache_slots
        while self._wanted:
            use = self._wanted[0]
            state = cache_slots.pages[use.page]
            if state.cache_slot < 0 and state.claims:
                if not use.mode.fetches:
                    # If the page is pinned, a thread is waiting for its cache slot and is counted by `_awaited`. Adding
                    # the page to `_reserved` would count it twice, and the page would stay there after it got its cache
                    # slot.
                    if not state.pins:
                        self._reserved.add(use.page)
                elif self._is_stored(use.page):
                    # Reads must leave cache slots free for waiting threads and for earlier uses that replace the
                    # content of their page. Otherwise a read for a later use would take the cache slot of an earlier
                    # use, which would then have to evict pages of the window.
                    while len(cache_slots.free) <= self._awaited + len(self._reserved):
                        if not self._evict_clean():
                            return
                    cache_slots.assign(use.page)
                    self._read(use.page)
            self._wanted.popleft()

    # Eviction #

    def evict(self, page: int, *, consumed: bool = False) -> None:
        """Evict a page if it is evictable and no transfer of it is in flight. If the page is dirty, write it back
        first.

        Args:
            consumed: whether the content of the page is no longer needed. If so, the page is evicted even if it is
                resident. It keeps its cache slot only if a use inside the window will replace its content.
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

    def flush(self) -> None:
        """Write back all dirty pages and wait until all writes have ended. Raises the same exceptions as
        `Transfers.wait`.
        """
        # A page must not be written to the store while a device is still copying into its cache slot.
        self._transfers.wait(lambda: not self.copies, "copy", -1)
        while True:
            self._transfers.check()
            for page in self._cache_slots.holders():
                state = self._cache_slots.pages[page]
                if state.dirty and not state.writing:
                    self._write(page)
            if not self._writes:
                return
            self._transfers.wait(lambda: not self._writes, "write", -1)

    def _evict_clean(self) -> bool:
        """Evict one clean page that is not pinned, claimed or resident. Return ``False`` if there is no such page."""
        for page in self._cache_slots.holders():
            state = self._cache_slots.pages[page]
            if not (state.pins or state.claims or state.dirty or state.reading or state.writing or state.resident):
                self._release_cache_slot(page)
                return True
        return False

    def _evict_kept(self) -> bool:
        """Evict one streaming page, claimed or not. If there is none, evict one resident page. Return ``False`` if no
        page can be evicted.
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
        """Return whether a page is being read that has lost its claim and will therefore be evicted after the read."""
        states = (self._cache_slots.pages[page] for page in self._cache_slots.holders()) if self._reads else ()
        return any(state.reading and not (state.pins or state.claims or state.resident) for state in states)

    def _write_back_some(self) -> None:
        states = ((page, self._cache_slots.pages[page]) for page in self._cache_slots.holders())
        dirty = (page for page, of in states if of.dirty and not (of.pins or of.claims or of.writing or of.resident))
        for page in islice(dirty, _WRITTEN_BACK):
            self._write(page)

    def _acquire_cache_slot(self, page: int, *, threaded: bool) -> None:
        """Wait until a cache slot is free or the page has one. [Note: allocation of cache slots]"""
        cache_slots = self._cache_slots
        state = cache_slots.pages[page]
        while state.cache_slot < 0 and not cache_slots.free and not self._evict_clean():
            self._transfers.check()
            if not self._writes:
                self._write_back_some()
            # Evict pages that the plan needs, or give up, only if no cache slot will become free without action by this
            # thread. Otherwise the plan would lose pages depending on timing, and the step would read more bytes than
            # predicted.
            idle = not (self._writes or self._held_reservations or self.copies or self._reads_in_vain())
            if idle and not self._evict_kept() and not self._reads:
                raise InfinityError(
                    f"all {cache_slots.count} cache slots of the host cache are in use at the same time; "
                    f"set {self._setting} higher"
                )
            if not cache_slots.free:
                self.wait_for_cache_slot(page, threaded=threaded)

    def wait_for_cache_slot(self, page: int = -1, *, threaded: bool = False) -> None:
        """Wait until a cache slot is free, or may have become free because a transfer, copy or reservation has ended.

        Args:
            page: page that needs the cache slot, or -1.
        """
        free, returned = self._cache_slots.free, self._returned
        self._awaited += 1
        try:
            self._wait(lambda: bool(free) or self._returned != returned, "host_cache", page, threaded=threaded)
        finally:
            self._awaited -= 1

    def _release_cache_slot(self, page: int) -> None:
        self._cache_slots.release(page)
        self._transfers.lock.notify_all()

    def drain(self) -> bool:
        """Wait for all transfers and copies, without raising. After a failure, wait only for a short time.

        The caller must not hold the lock.

        Returns:
            ``True`` if all copies between the device and the cache slots have ended.
        """
        with self._transfers.lock:
            self.drop_claims()
            self._transfers.drain(lambda: not self.copies)
            done = not self.copies
        self.close()
        return done

    def _is_stored(self, page: int) -> bool:
        return self._store is not None and self._store.has(page)

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

        assert self._store is not None
        self._transfers.read(self._store, page, self._cache_slots.pages[page].content, ended)

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
                return  # do not start another transfer after a failure
            if self.eager:
                self.evict(page)
            self.prefetch()

        assert self._store is not None
        self._transfers.write(self._store, page, self._cache_slots.pages[page].content, ended)


def _is_left_by_device(state: PageState, mode: Mode) -> bool:
    """Return whether no copy in flight conflicts with the use of a page in the given mode."""
    return not state.landing and not (state.leaving and mode.modifies)
