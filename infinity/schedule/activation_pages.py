"""What forwards keep for backwards, as pages: in cache slots of the host cache, and on the drives what these have no
room for.

Which of them move when: [Note: a stack] in `stack`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.content.layout import Page
from infinity.content.views import bytes_of
from infinity.errors import BudgetError, InfinityError
from infinity.memory.device import Device, DeviceEvent
from infinity.memory.host_cache import HostCachePart
from infinity.schedule.cache import Cache
from infinity.schedule.cache_slots import CacheSlots
from infinity.schedule.stack import SPARE_CACHE_SLOTS, activation_page, page_lengths
from infinity.schedule.trace import Mode, Use
from infinity.schedule.transfers import PageReaderWriter, PagerObserver, Transfers
from infinity.units import format_size


class ActivationStore(PageReaderWriter, Protocol):
    """Where activations are written to."""

    def add(self, pages: Sequence[Page], path_of: Callable[[Page], int]) -> None:
        """Have further pages; see `PageStore.add`."""


@dataclass(frozen=True, kw_only=True)
class ActivationTraffic:
    """Bytes of activations that a step moves."""

    kept: int = 0
    """Copied into pages."""
    loaded: int = 0
    """Copied out of pages."""
    written: int = 0
    """Of pages to the drives."""
    read: int = 0
    """Of pages from the drives, also what was not read because a write of it had not ended when it was wanted."""


class StoredActivation:
    """The bytes of one tensor; they are given up when nobody has this object any more."""

    __slots__ = ("__weakref__", "_given_up", "pages")

    def __init__(self, pages: tuple[int, ...], given_up: deque[tuple[int, ...]]) -> None:
        self.pages = pages
        """Numbers of its pages, in the order of its bytes; fixed."""
        self._given_up = given_up

    def __del__(self) -> None:
        self._given_up.append(self.pages)  # from any thread, at any moment: no lock may be taken here


class ActivationPages:
    """Keeps the bytes of tensors in pages until they are wanted again.

    One thread at a time uses it: the training thread, or autograd's for a device while the training thread waits for
    it. Everything but `_free` and `_given_up` is read and changed under the lock of `Transfers`.

    Args:
        host cache: cache slots for them.
        page_bytes: size of a cache slot.
        device: has the tensors.
        store: where pages are written to; None: nowhere, so that all have to have cache slots.
        shares: of the pages, by NVMe path of the store.
        transfers: has the lock, and the first error.
        observer: is told what happens.
        timeout: seconds after which a wait is an error.
    """

    def __init__(
        self,
        host_cache: HostCachePart,
        page_bytes: int,
        device: Device,
        store: ActivationStore | None,
        shares: Sequence[float],
        transfers: Transfers,
        observer: PagerObserver,
        *,
        timeout: float,
    ) -> None:
        self.device = device.name
        """Where the tensors are."""
        self._page_bytes, self._device, self._store, self._transfers = page_bytes, device, store, transfers
        self._shares = shares
        self._dealt = [0.0] * len(shares)
        """Bytes of pages by path."""
        self._pages: list[Page] = []
        """All that there have been at once, by number; grows."""
        self._cache_slots = CacheSlots(self._pages, host_cache)
        self._cache = Cache(
            self._cache_slots, transfers, store or _Nowhere(), observer,
            timeout=timeout, enter_thread=device.enter_thread, named=False,
            setting="activations.host_bytes",
        )  # fmt: skip
        self._cache.eager = True
        self._free: dict[int, deque[int]] = defaultdict(deque)
        """Numbers of pages that nobody has, by length, the one that was given up first next. There are few lengths."""
        self._given_up: deque[tuple[int, ...]] = deque()
        """Pages of tensors that nobody has any more, until `_reap`."""
        self._stack: dict[int, tuple[int, ...]] = {}
        """Pages of each tensor by the first one, in the order in which they were kept, the last time."""
        self._again: set[int] = set()
        """First pages of tensors that were kept more than once, so that they are wanted more than once."""
        self._loaded: set[int] = set()
        """First pages of those that have been loaded and were not kept again: who has them needs them no more, unless
        for another backward."""
        self._unwritten: dict[int, None] = {}
        """Pages that stay in their cache slots, the oldest first."""
        self._claimed: set[int] = set()
        """Pages that are to be in memory soon."""
        self._most = host_cache.cache_slots - SPARE_CACHE_SLOTS
        """Pages that stay at once, at most; fixed."""
        self.traffic = ActivationTraffic()
        """Of the last step, and so of one like it. Changed by `end_step`."""
        self._moved: Counter[str] = Counter()
        """The same of this step so far, by field, but for what was read."""
        self._fetched = 0
        """Bytes that had been read when this step began."""
        self._used = 0
        """Most cache slots that were in use at once in this step, so far."""

    def keep(self, content: torch.Tensor) -> tuple[StoredActivation, DeviceEvent]:
        """Copy bytes into pages.

        Args:
            content: flat, of bytes, on the device. It must not change, nor its memory be used again, until the mark has
                been passed.

        Raises:
            BudgetError: there is no room for it. StorageError, CorruptPageError, StallError: a drive failed.
        """
        pages = self._new_pages(content.numel())
        kept = StoredActivation(pages, self._given_up)
        stream = self._device.stream("activations")
        self._device.record_event(self._device.current()).before(stream)
        with self._transfers.lock:
            self._transfers.check()
            self._moved["kept"] += content.numel()
            self._stack[pages[0]] = pages
            self._want(())
        for number, page in enumerate(pages):
            part = content[number * self._page_bytes : (number + 1) * self._page_bytes]
            use = (Use(page, Mode.WRITE),)
            with self._transfers.lock:
                self._make_room()
                self._cache.acquire(use, threaded=False)
                self._cache_slots.pages[page].resident = True
                self._unwritten[page] = None
                self._used = max(self._used, self._cache_slots.count - len(self._cache_slots.free))
            (memory,) = self._cache.contents(use)
            self._device.copy(bytes_of(memory)[: len(part)], part, stream)
            device_event = self._device.record_event(stream)
            with self._transfers.lock:
                self._cache.release(use, device_event)
        return kept, device_event

    def keep_again(self, kept: StoredActivation) -> None:
        """Have the bytes of a tensor be wanted before all that was kept since. [Note: a stack]"""
        with self._transfers.lock:
            self._stack[kept.pages[0]] = self._stack.pop(kept.pages[0])
            self._again.add(kept.pages[0])
            for page in kept.pages:
                if page in self._unwritten:
                    del self._unwritten[page]
                    self._unwritten[page] = None

    def load(self, kept: StoredActivation, into: torch.Tensor) -> None:
        """Copy the bytes of a tensor out of its pages, on the current stream.

        Args:
            into: flat, of bytes, on the device.

        Raises:
            StorageError, CorruptPageError, StallError: a drive failed.
        """
        stream = self._device.current()
        with self._transfers.lock:
            self._reap()
            self._moved["loaded"] += into.numel()
            all_loaded = len(self._loaded) == len(self._stack) - len(self._again)
            if kept.pages[0] in self._loaded or all_loaded:  # a graph that is used again, and so in its order
                self._loaded.clear()
            if kept.pages[0] not in self._again:
                self._loaded.add(kept.pages[0])
            wanted = self._from(kept)
            stays = kept.pages[0] in self._again and len(kept.pages) < self._most  # it is wanted again
        for number, page in enumerate(kept.pages):
            use = (Use(page, Mode.READ),)
            with self._transfers.lock:
                begin = 0 if stays else number
                self._want(wanted[begin : begin + self._most])
                self._cache.acquire(use, threaded=False)
            part = into[number * self._page_bytes : (number + 1) * self._page_bytes]
            (memory,) = self._cache.contents(use)
            self._device.copy(part, bytes_of(memory)[: len(part)], stream)
            device_event = self._device.record_event(stream)
            with self._transfers.lock:
                self._cache.release(use, device_event)

    def end_step(self) -> int:
        """Close the books of a step; return the most bytes of cache slots that were in use in it."""
        with self._transfers.lock:
            self._reap()
            before, self._fetched = self._fetched, self._cache.fetched_bytes
            self.traffic = ActivationTraffic(**self._moved, read=self._fetched - before)
            self._moved.clear()
            used, self._used = self._used, 0
            return used * self._page_bytes

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status, as `CacheSlots.census`."""
        with self._transfers.lock:
            return self._cache_slots.census()

    def drain(self) -> bool:
        """Wait for all transfers and copies, as `Pager.drain`; it is not used afterwards."""
        return self._cache.drain()

    # Pages #

    def _new_pages(self, nbytes: int) -> tuple[int, ...]:
        """Return pages for so many bytes, that nobody has. Raises as `ActivationStore.add`."""
        with self._transfers.lock:
            self._reap()
        lengths = page_lengths(nbytes, self._page_bytes)
        begin = len(self._pages)
        more = [activation_page(number, length) for number, length in enumerate(self._missing(lengths), begin)]
        if more and self._store is not None:
            dealt = self._dealt.copy()
            try:
                self._store.add(more, self._path_of)  # not under the lock: files grow
            except BaseException:
                self._dealt = dealt
                raise
        with self._transfers.lock:
            self._pages += more
            self._cache_slots.grow()
        for page in more:
            self._free[page.nbytes].append(page.index)
        return tuple(self._free[length].popleft() for length in lengths)

    def _missing(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of which there are not enough free pages, as often as one is missing."""
        missing = Counter(lengths)
        for length in missing:
            missing[length] -= len(self._free[length])
        return list((+missing).elements())

    def _path_of(self, page: Page) -> int:
        """Deal a page to the path that has least, for its share."""
        path = min(range(len(self._shares)), key=lambda k: (self._dealt[k] + page.nbytes) / self._shares[k])
        self._dealt[path] += page.nbytes
        return path

    def _reap(self) -> None:
        """Give up the pages of tensors that nobody has any more. Under the lock."""
        pages = self._cache_slots.pages
        for _ in range(len(self._given_up)):
            numbers = self._given_up.popleft()
            self._stack.pop(numbers[0], None)
            self._again.discard(numbers[0])
            self._loaded.discard(numbers[0])
            for page in numbers:
                self._unwritten.pop(page, None)
                if page in self._claimed:
                    self._claimed.remove(page)
                    self._cache.release_claim(page)
            if any(pages[page].reading or pages[page].writing or pages[page].pins for page in numbers):
                self._given_up.append(numbers)  # what is in flight comes to its end; nothing else is begun with it
                continue
            for page in numbers:
                pages[page].resident = False
                self._cache.discard(page)
                self._free[self._pages[page].nbytes].append(page)
        self._cache.prefetch()

    def _make_room(self) -> None:
        """Write the oldest pages until a page more can stay. Under the lock.

        Raises:
            BudgetError: there is nowhere to write them to. Else as `Cache.acquire`.
        """
        self._reap()
        if self._store is None:
            while not self._cache_slots.free:
                # A device may still copy what nobody has any more.
                if not (self._given_up and self._cache.wait_for_cache_slot()):
                    raise BudgetError(
                        f"activations need more than the {format_size(self._cache_slots.count * self._page_bytes)} of host "
                        'memory that are for them; set activations.host_bytes higher, or activations.tier = "nvme"'
                    )
                self._reap()
            return
        while len(self._unwritten) >= self._most:
            page = next(iter(self._unwritten))
            use = (Use(page, Mode.READ),)
            self._cache.acquire(use, threaded=False)  # until a device has copied all of it
            self._cache.release(use)
            del self._unwritten[page]
            self._cache_slots.pages[page].resident = False
            self._moved["written"] += self._pages[page].nbytes
            self._cache.evict(page)

    # What comes next #

    def _from(self, kept: StoredActivation) -> list[int]:
        """Return the pages of a tensor, and those that come next, as far as there are cache slots. Under the lock.

        Next come others that were kept again for what is above it, as long as somebody has them, then those below it,
        but not what has been loaded.
        """
        found = list(kept.pages)
        below = False
        for first, pages in reversed(self._stack.items()):
            if first == kept.pages[0]:
                below = True
            elif (below or first in self._again) and first not in self._loaded:
                found += pages
            if len(found) >= len(kept.pages) + self._most:
                break
        return found

    def _want(self, pages: Sequence[int]) -> None:
        """Have these read, and none of the others that were wanted. Under the lock."""
        wanted = set(pages)
        for page in self._claimed - wanted:
            self._cache.release_claim(page)
        for page in pages:
            if page not in self._claimed:
                self._cache.claim(Use(page, Mode.READ), kept=False)
        self._claimed = wanted
        self._cache.prefetch()


class _Nowhere:
    """A store that nothing is written to."""

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Refuse."""
        raise InfinityError(f"activation {page} is stored nowhere")

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Refuse."""
        raise InfinityError(f"activation {page} cannot be stored anywhere")

    def discard(self, page: int) -> None:
        """Do nothing."""

    def has(self, page: int) -> bool:
        """Return False."""
        return False

    def expect_gradients(self, stored: bool) -> None:
        """Do nothing."""

    def oldest_request(self) -> None:
        """Return that there is none."""
