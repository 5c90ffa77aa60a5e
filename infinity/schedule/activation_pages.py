"""Pages for activations that forward saves for backward. Pages that do not fit into the host cache are stored on NVMe.

[Note: a stack] in `stack` describes the order in which pages are written and read.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.content.layout import Page
from infinity.content.views import bytes_of
from infinity.errors import BudgetError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.cache import Cache
from infinity.schedule.cache_slots import CacheSlots
from infinity.schedule.stack import SPARE_CACHE_SLOTS, activation_page, page_lengths
from infinity.schedule.trace import Mode, Use
from infinity.schedule.transfers import PageReaderWriter, Transfers
from infinity.units import format_size


@dataclass(frozen=True, kw_only=True)
class ActivationTraffic:
    """Activation traffic of a step in bytes."""

    kept: int = 0
    """Bytes copied from the device into pages."""
    loaded: int = 0
    """Bytes copied from pages to the device."""
    written: int = 0
    """Bytes of pages written to the drives."""
    read: int = 0
    """Bytes of pages read from the drives, including reads that were avoided because the page was still being
    written.
    """


class StoredActivation:
    """The stored bytes of one tensor. Its pages are freed when this object is garbage collected.

    All saved tensors that cover the same memory range share it, whatever their shapes.
    """

    __slots__ = ("__weakref__", "_given_up", "modified", "pages")

    def __init__(self, pages: tuple[int, ...], given_up: deque[tuple[int, ...]]) -> None:
        self.pages = pages
        """Numbers of the tensor's pages, in the order of its bytes. Constant."""
        self.modified = False
        """Whether the memory was modified before the copy completed. Set by `SavedActivations`."""
        self._given_up = given_up

    def __del__(self) -> None:
        # The garbage collector may run this on any thread at any time, even on a thread that holds a lock. Therefore
        # this method must not acquire a lock; appending to a deque is atomic.
        self._given_up.append(self.pages)


class ActivationPages:
    """Stores the bytes of tensors in pages until backward needs them.

    Only one thread at a time may use an instance: the training thread or, while the training thread waits for it,
    autograd's device thread. Every attribute except `_free` and `_given_up` is read and changed under the lock of
    `Transfers`.

    Args:
        slots: memory of the cache slots.
        store: store to which pages are written. If ``None``, all pages must fit into the cache slots.
        shares: stripe weights of the store's NVMe paths.
    """

    def __init__(
        self,
        slots: Sequence[memoryview],
        page_bytes: int,
        device: Device,
        store: PageReaderWriter | None,
        shares: Sequence[float],
        transfers: Transfers,
    ) -> None:
        self.device = device.name
        """Device on which the tensors are stored."""
        self._page_bytes, self._device, self._store, self._transfers = page_bytes, device, store, transfers
        self._shares = shares
        self._dealt = [0.0] * len(shares)
        """Number of bytes in pages that are assigned to each path."""
        self._pages: list[Page] = []
        """All pages, by number. The list grows to the peak number of pages in use."""
        self._cache_slots = CacheSlots(self._pages, slots)
        self._cache = Cache(self._cache_slots, transfers, store, device, named=False, setting="activations.host_bytes")
        self._cache.eager = True
        self._free: dict[int, deque[int]] = defaultdict(deque)
        """Free pages by page length, oldest first. There are only a few different lengths."""
        self._given_up: deque[tuple[int, ...]] = deque()
        """Pages of garbage-collected tensors that `_reap` has not freed yet."""
        self._stack: dict[int, tuple[int, ...]] = {}
        """Pages of each tensor, keyed by the tensor's first page, in the order in which the tensors were last kept."""
        self._again: set[int] = set()
        """First pages of tensors that were kept more than once and are therefore loaded more than once."""
        self._loaded: set[int] = set()
        """First pages of tensors that have been loaded and were not kept again. Only another backward pass through the
        same graph would load them again.
        """
        self._unwritten: dict[int, None] = {}
        """Pages that stay in their cache slots because they have not been written, oldest first."""
        self._claimed: set[int] = set()
        """Pages that have been requested because backward needs them soon."""
        self._most = len(slots) - SPARE_CACHE_SLOTS
        """Maximum number of pages that stay in their cache slots at the same time. Constant."""
        self.traffic = ActivationTraffic()
        """Traffic of the last step, which serves as the prediction for similar steps. Changed by `end_step`."""
        self._moved: Counter[str] = Counter()
        """Traffic of the current step so far, by field of `ActivationTraffic`, except for `read`."""
        self._fetched = 0
        """Value of `Cache.fetched_bytes` when the current step began."""
        self._used = 0
        """Peak number of cache slots in use in the current step so far."""

    def keep(self, content: torch.Tensor) -> tuple[StoredActivation, DeviceEvent]:
        """Copy the bytes of a tensor into pages.

        Args:
            content: one-dimensional tensor of bytes on the device. Its content must not change, and its memory must not
                be reused, until the device has passed the returned event.

        Returns:
            The stored activation, and an event recorded after the copy.

        Raises:
            BudgetError: if there is no space for the bytes.
            StorageError, CorruptPageError, StallError: if a drive fails.
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
                self._evict_oldest()
                self._cache.acquire(use, threaded=False)
                self._cache_slots.pages[page].resident = True
                self._unwritten[page] = None
                self._used = max(self._used, self._cache_slots.count - len(self._cache_slots.free))
            (memory,) = self._cache.contents(use)
            self._device.copy_all([bytes_of(memory)[: len(part)]], [part], stream)
            device_event = self._device.record_event(stream)
            with self._transfers.lock:
                self._cache.release(use, device_event)
        return kept, device_event

    def keep_again(self, kept: StoredActivation) -> None:
        """Move a tensor to the top of the stack, because backward needs it before all tensors that were kept after it.
        [Note: a stack]
        """
        with self._transfers.lock:
            self._stack[kept.pages[0]] = self._stack.pop(kept.pages[0])
            self._again.add(kept.pages[0])
            for page in kept.pages:
                if page in self._unwritten:
                    del self._unwritten[page]
                    self._unwritten[page] = None

    def load(self, kept: StoredActivation, into: torch.Tensor) -> None:
        """Copy the bytes of a stored tensor to the device, on the current stream.

        Args:
            into: one-dimensional tensor of bytes on the device that receives the bytes.

        Raises:
            StorageError, CorruptPageError, StallError: if a drive fails.
        """
        stream = self._device.current()
        with self._transfers.lock:
            self._reap()
            self._moved["loaded"] += into.numel()
            all_loaded = len(self._loaded) == len(self._stack) - len(self._again)
            if kept.pages[0] in self._loaded or all_loaded:  # another backward pass through the same graph begins
                self._loaded.clear()
            if kept.pages[0] not in self._again:
                self._loaded.add(kept.pages[0])
            wanted = self._from(kept)
            stays = kept.pages[0] in self._again and len(kept.pages) < self._most  # the tensor will be loaded again
        for number, page in enumerate(kept.pages):
            use = (Use(page, Mode.READ),)
            with self._transfers.lock:
                begin = 0 if stays else number
                self._want(wanted[begin : begin + self._most])
                self._cache.acquire(use, threaded=False)
            part = into[number * self._page_bytes : (number + 1) * self._page_bytes]
            (memory,) = self._cache.contents(use)
            self._device.copy_all([part], [bytes_of(memory)[: len(part)]], stream)
            device_event = self._device.record_event(stream)
            with self._transfers.lock:
                self._cache.release(use, device_event)

    def end_step(self) -> int:
        """Update `traffic` at the end of a step, and return the peak size in bytes of the cache slots in use."""
        with self._transfers.lock:
            self._reap()
            before, self._fetched = self._fetched, self._cache.fetched_bytes
            self.traffic = ActivationTraffic(**self._moved, read=self._fetched - before)
            self._moved.clear()
            used, self._used = self._used, 0
            return used * self._page_bytes

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status. See `CacheSlots.census`."""
        with self._transfers.lock:
            return self._cache_slots.census()

    def drain(self) -> bool:
        """Wait for all transfers and copies. See `Cache.drain`. The instance must not be used afterwards."""
        return self._cache.drain()

    # Pages #

    def _new_pages(self, nbytes: int) -> tuple[int, ...]:
        with self._transfers.lock:
            self._reap()
        lengths = page_lengths(nbytes, self._page_bytes)
        begin = len(self._pages)
        more = [activation_page(number, length) for number, length in enumerate(self._missing(lengths), begin)]
        if more and self._store is not None:
            dealt = self._dealt.copy()
            try:
                self._store.add(more, self._path_of)  # without the lock, because files grow
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
        """Return the length of each page that is missing because there are too few free pages of this length."""
        missing = Counter(lengths)
        for length in missing:
            missing[length] -= len(self._free[length])
        return list((+missing).elements())

    def _path_of(self, page: Page) -> int:
        """Assign a page to the path that will then have the fewest bytes relative to its stripe weight."""
        path = min(range(len(self._shares)), key=lambda k: (self._dealt[k] + page.nbytes) / self._shares[k])
        self._dealt[path] += page.nbytes
        return path

    def _reap(self) -> None:
        """Free the pages of tensors that have been garbage collected. The caller must hold the lock."""
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
                    self._cache.release_claims([Use(page, Mode.READ)])
            if any(pages[page].reading or pages[page].writing or pages[page].pins for page in numbers):
                # A drive or a device still uses these cache slots, so try again later. `Cache.discard` would free the
                # slots immediately, and the transfers in flight would corrupt the next pages in the slots.
                self._given_up.append(numbers)
                continue
            for page in numbers:
                pages[page].resident = False
                self._cache.discard(page)
                self._free[self._pages[page].nbytes].append(page)
        self._cache.prefetch()

    def _evict_oldest(self) -> None:
        """Write out the oldest pages until there is room for one more page. The caller must hold the lock.

        Raises:
            BudgetError: if there is no room and no store.
            InfinityError, CorruptPageError, StorageError, StallError: in the same cases as `Cache.acquire`.
        """
        self._reap()
        if self._store is None:
            while not self._cache_slots.free:
                # The device may still be copying pages of tensors that have been garbage collected.
                if not (self._given_up and self._cache.copies):
                    raise BudgetError(
                        f"activations need more than the {format_size(self._cache_slots.count * self._page_bytes)} of "
                        "host memory reserved for them; increase activations.host_bytes or set "
                        'activations.tier = "nvme"'
                    )
                self._cache.wait_for_cache_slot()
                self._reap()
            return
        while len(self._unwritten) >= self._most:
            page = next(iter(self._unwritten))
            use = (Use(page, Mode.READ),)
            # Wait until the device has copied the whole page into its cache slot, because `evict` below ignores pinned
            # pages.
            self._cache.acquire(use, threaded=False)
            self._cache.release(use)
            del self._unwritten[page]
            self._cache_slots.pages[page].resident = False
            self._moved["written"] += self._pages[page].nbytes
            self._cache.evict(page)

    # Prefetching in backward #

    def _from(self, kept: StoredActivation) -> list[int]:
        """Return the pages of a tensor and of the tensors that backward needs next, up to the number of cache slots.

        After this tensor, backward needs the tensors above it in the stack that were kept again and still exist, and
        then the tensors below it. Tensors that have already been loaded are skipped. The caller must hold the lock.
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
        """Replace the set of requested pages, and start reading the new ones. The caller must hold the lock."""
        wanted = set(pages)
        self._cache.release_claims(Use(page, Mode.READ) for page in self._claimed - wanted)
        self._cache.claim(Use(page, Mode.READ) for page in pages if page not in self._claimed)
        self._claimed = wanted
        self._cache.prefetch()
