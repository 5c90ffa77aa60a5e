"""The host cache as a cache of pages: acquire, release, prefetch, write back, evict. All under the one lock.

[Note: who gets a cache slot] First who waits for one now (`acquire`), then what the plan wants, in its order: a page is
read
ahead, and for one that will be filled anew a cache slot is left free, so that no prefetch of a later page has taken it
by
then. A cache slot comes free when a clean page that nothing keeps is evicted. For those who wait, dirty pages that
nothing
keeps are written back if there is none; where that gives none either, as may be off the plan, pages are evicted that
the plan wants later and will have to read again: first those that stream, last those that are resident.
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
"""Dirty pages that are written back at once where a cache slot is wanted: one would do, more keep the drive busy."""


class Cache:
    """Moves pages between cache slots and the store. Everything but `drain` is called, read and changed under the lock.

    Between `acquire` and `release` the pages of an access are pinned: their content is there, and nobody else moves it.
    `claim` and `release_claim` say what the window of a plan wants in memory; `prefetch` reads it.
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
        """Begin with nothing in memory.

        Args:
            named: whether the observer knows pages by their numbers, and is told which one was waited for.
            setting: which setting gives it more cache slots, for errors.
            timeout: seconds after which a copy between a cache slot and a device is an error.
            enter_thread: is called first in the thread that waits for those.
        """
        self._cache_slots, self._transfers, self._store, self._observer = cache_slots, transfers, store, observer
        self._named, self._setting = named, setting
        self._reads = self._writes = 0
        """Pages that are being read, and written: those of this cache, which need not be all of `Transfers`."""
        self.eager = False
        """Whether a page that nothing keeps is evicted when a write of it, or its copy to a device, has ended, as a
        plan wants it; else it stays until its cache slot is wanted. (`Cursor` evicts what leaves the window.) The pager
        sets
        it when a plan is installed."""
        self._held_reservations = 0
        """Reservations whose pages are pinned;

        their cache slots come back without anything that the training thread does.
        """
        self.fetched_bytes = 0
        """Bytes that were read, ever, or would have been but for a write that had not ended."""
        self._returned = 0
        """Transfers, copies and held reservations that have ended, ever: each may have left a cache slot."""
        self._wanted: deque[Use] = deque()
        """Uses that the window wants, of pages without a cache slot, in the plan's order;

        `claim` adds, `prefetch` takes.
        """
        self._reserved: set[int] = set()
        """Pages without a cache slot that the window wants, to be filled anew, and nobody waits for: as many free cache
        slots are
        not for what the plan wants later."""
        self._awaited = 0
        """Threads that wait for a cache slot in `acquire`: as many free cache slots are not for prefetches."""
        self.copies = Copies(transfers, self._end_copy, timeout=timeout, enter_thread=enter_thread)
        """Pages that are being copied to a device or from it; pinned meanwhile."""

    # Uses #

    def acquire(self, uses: Access, *, threaded: bool) -> None:
        """Pin pages in cache slots; wait until they are read, and those to be modified are not being written or copied.

        Args:
            uses: distinct pages.
            threaded: whether this is not the training thread.

        Raises:
            InfinityError: there are not enough cache slots for what is in use at once.
            CorruptPageError, StorageError, StallError: as for `Transfers.wait`; nothing is pinned then.
        """
        self._transfers.check()
        pages = self._cache_slots.pages
        for use in uses:
            pages[use.page].pins += 1
        try:
            for use in uses:  # all are on their way before the first one is waited for
                self._fetch(use, threaded=threaded)
            for use in uses:
                page, state = use.page, pages[use.page]
                if state.reading:
                    self._wait(partial(_is_read, state), "read", page, threaded=threaded)
                # What is being written is hashed and read by other threads: a change would tear it. From here on
                # nothing begins to write it: it is pinned, and `flush`, which does not look at pins, belongs to the
                # training thread and waits for all reservations first.
                if state.writing and use.mode.modifies:
                    self._wait(partial(_is_written, state), "write", page, threaded=threaded)
                self._wait(partial(_is_left_by_device, state, use.mode), "copy", page, threaded=threaded)
            self._transfers.check()  # a read that could not be started has ended before anybody waited for it
        except BaseException:
            for use in uses:
                pages[use.page].pins -= 1
            raise

    def can_acquire(self, uses: Access) -> bool:
        """Whether `acquire` would not wait for anything."""
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if state.cache_slot < 0 or state.reading or (state.writing and use.mode.modifies):
                return False
            if not _is_left_by_device(state, use.mode):
                return False
        return True

    def _fetch(self, use: Use, *, threaded: bool) -> None:
        """Give a page a cache slot, and start to read it if its content is needed and not there."""
        page, state, fetches = use.page, self._cache_slots.pages[use.page], use.mode.fetches
        reads = fetches and state.cache_slot < 0 and self._store.has(page)
        if fetches:
            self._observer.fetched("miss" if reads else "late" if state.reading else "hit")
        self._reserved.discard(page)
        if state.cache_slot < 0:
            self._acquire_cache_slot(page, threaded=threaded)
        if state.cache_slot < 0:  # while waiting, a completion may have prefetched this very page
            self._cache_slots.assign(page)
            if reads:
                self._read(page)

    def release(self, uses: Access, device_event: DeviceEvent | None = None) -> None:
        """Note what an access that has ended means for the content of its pages; unpin them.

        Args:
            mark: behind copies between the pages and a device: to it of those that are read, from it of those that are
                modified. They stay pinned until it has been passed.
        """
        pending = device_event if device_event is not None and not device_event.passed() else None
        for use in uses:
            state = self._cache_slots.pages[use.page]
            if pending is not None:
                state.landing += use.mode.modifies
                state.leaving += not use.mode.modifies
            else:
                state.pins -= 1
            if use.mode.modifies:
                state.dirty = True  # not before: until here the content was changing, and pinned
            elif use.mode is Mode.CONSUME:
                state.dirty = False
                self._store.discard(use.page)  # it may still be being written: see `PageStore._writing`
        if pending is not None:
            self.copies.add(pending, uses)

    def _end_copy(self, uses: Access) -> None:
        """Unpin what has been copied."""
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
        """Do as `acquire` for a reservation, whose cache slots come back by themselves."""
        self.acquire(uses, threaded=threaded)
        self._held_reservations += 1

    def release_reservation(self, uses: Access, device_event: DeviceEvent | None) -> None:
        """Release what `acquire_reservation` has acquired, as `release`."""
        self._held_reservations -= 1
        self._returned += 1
        self.release(uses, device_event)

    def contents(self, uses: Access) -> list[memoryview]:
        """Return the bytes of pages that are pinned, so that their cache slots do not change:

        the lock is not needed.
        """
        return [self._cache_slots.content(use.page) for use in uses]

    def has_content(self, page: int) -> bool:
        """Whether somebody may want to know what is in a page."""
        state = self._cache_slots.pages[page]
        return state.dirty or state.writing or self._store.has(page)

    def discard(self, page: int) -> None:
        """Drop the content of a page that nobody will read again.

        Nothing of it is in flight, and no reservation needs it.
        """
        state = self._cache_slots.pages[page]
        state.dirty = False
        if state.cache_slot >= 0 and not state.pins:
            self._release_cache_slot(page)
        self._store.discard(page)

    # What the window of a plan wants #

    def claim(self, use: Use, *, kept: bool) -> None:
        """Count a use that enters the window, and queue it if its page is not in memory.

        Args:
            kept: whether the plan has kept the page since its last use, which has left its claim for this one.
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
        """Forget what the window wanted."""
        for state in self._cache_slots.pages:
            state.claims = 0
        self._reserved.clear()
        self._wanted.clear()

    def prefetch(self) -> None:
        """Start the reads that the window wants, in its order, as far as cache slots are left by those who come before.

        A page that will be filled anew takes its cache slot when it is filled; until then one is left free for it.
        """
        cache_slots = self._cache_slots
        while self._wanted:
            use = self._wanted[0]
            state = cache_slots.pages[use.page]
            if state.cache_slot < 0 and state.claims:
                if not use.mode.fetches:
                    if not state.pins:  # else who has pinned it gets a cache slot by itself
                        self._reserved.add(use.page)
                elif self._store.has(use.page):
                    while len(cache_slots.free) <= self._awaited + len(self._reserved):
                        if not self._evict_clean():
                            return
                    cache_slots.assign(use.page)
                    self._read(use.page)
            self._wanted.popleft()

    # Eviction #

    def evict(self, page: int, *, consumed: bool = False) -> None:
        """Evict a page that has a cache slot and that nothing keeps; if it is dirty, write it back first.

        Args:
            consumed: whether its content is dead. Then it does not stay for being resident, and keeps its cache slot
                only
                where the window wants to write it anew.
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
        """Evict every page that nothing keeps."""
        for page in self._cache_slots.holders():
            self.evict(page)

    def flush(self) -> None:
        """Write every dirty page back, and wait until nothing is being written. Raises as `Transfers.wait` does."""
        self._transfers.wait(
            lambda: not self.copies.pending, "copy", -1
        )  # what lands in cache slots is not written before
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
        """Evict some page that is clean and that nothing keeps; return whether there was one."""
        for page in self._cache_slots.holders():
            state = self._cache_slots.pages[page]
            if not (state.pins or state.claims or state.dirty or state.reading or state.writing or state.resident):
                self._release_cache_slot(page)
                return True
        return False

    def _evict_kept(self) -> bool:
        """Evict some page that the plan wants later, or else one that it always keeps; return whether there was one."""
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
        """Whether a page is being read that nothing keeps any more, so that it is evicted when it has been."""
        states = (self._cache_slots.pages[page] for page in self._cache_slots.holders()) if self._reads else ()
        return any(state.reading and not (state.pins or state.claims or state.resident) for state in states)

    def _write_back_some(self) -> None:
        """Start to write a few dirty pages back that nothing keeps."""
        started = 0
        for page in self._cache_slots.holders():
            state = self._cache_slots.pages[page]
            if state.dirty and not (state.pins or state.claims or state.writing or state.resident):
                self._write(page)
                started += 1
                if started == _WRITTEN_BACK:
                    return

    def _acquire_cache_slot(self, page: int, *, threaded: bool) -> None:
        """Wait until there is a free cache slot, or the page has one. [Note: who gets a cache slot]"""
        cache_slots = self._cache_slots
        state = cache_slots.pages[page]
        while state.cache_slot < 0 and not cache_slots.free and not self._evict_clean():
            self._transfers.check()
            if not self._writes:
                self._write_back_some()
            # Cache slots that come back by themselves are waited for.
            idle = not (self._writes or self._held_reservations or self.copies.pending or self._reads_in_vain())
            if idle and not self._evict_kept() and not self._reads:
                raise InfinityError(
                    f"all {cache_slots.count} cache slots of the host cache are in use at once; set {self._setting} higher"
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
        """Wait until a cache slot may have come free by a copy that ends; return False where none is being made."""
        if not self.copies.pending:
            return False
        self._wait(partial(self._may_have_cache_slot, self._returned), "host_cache", -1, threaded=False)
        return True

    def _may_have_cache_slot(self, returned: int) -> bool:
        """Whether a cache slot is free, or something has ended since `returned` that may leave one."""
        return bool(self._cache_slots.free) or self._returned != returned

    def _release_cache_slot(self, page: int) -> None:
        self._cache_slots.release(page)
        self._transfers.lock.notify_all()

    def drain(self) -> bool:
        """Wait for all transfers and copies without raising, after a failure a moment only. Not under the lock.

        Returns:
            Whether the device is done with the cache slots.
        """
        with self._transfers.lock:
            self.drop_claims()
            self._transfers.drain(lambda: not self.copies.pending)
            done = not self.copies.pending
        self.copies.close()
        return done

    # Transfers #

    def _wait(self, ready: Callable[[], bool], cause: str, page: int, *, threaded: bool) -> None:
        """Wait as `Transfers.wait`."""
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
                self.evict(page)  # the window may have moved on, or been given up

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
                state.dirty = True  # the cache slot still has the only copy
                return  # and nothing more is started
            if self.eager:
                self.evict(page)
            self.prefetch()

        self._transfers.write(self._store, page, self._cache_slots.content(page), ended)


def _is_read(state: PageState) -> bool:
    return not state.reading


def _is_written(state: PageState) -> bool:
    return not state.writing


def _is_left_by_device(state: PageState, mode: Mode) -> bool:
    """Whether no device is at a page in a way that a use has to wait for."""
    return not state.landing and not (state.leaving and mode.modifies)
