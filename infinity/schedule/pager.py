"""The pager, which executes a plan. No other code moves pages between the store, the host cache and the device.

The pager consists of the following parts. Each has its own state, and a single lock protects all of them (`transfers`
lists the threads that take it):

    Pager --> Cursor --> Cache --> CacheSlots   cache slot of each page, and the reasons to keep the page there
      |                   |
      |                   +------> Transfers    transfers in flight, waiting threads, the first error
      |
      +--> GpuResidentPages                     pages of GPU-resident FSDP modules

`Cache` acquires, releases, prefetches, writes back and evicts pages. `Cursor` knows which pages the plan needs next.
`Pager` is the interface for other packages: it provides accesses for the training thread, reservations for other
threads, and operations that run between steps.

An *access* needs a few pages in memory at the same time. A *reservation* is an access that takes place later, usually
on another thread. `cache` and `cursor` define the other terms.

[Note: GPU-resident FSDP modules] `set_gpu_resident` moves all pages of an FSDP module to the device. An access to such
pages is not part of a plan, needs no cache slots, and returns bytes that are on the device. In all other respects,
accesses and reservations work as they do for other pages. The pages are copied back into cache slots, one after
another, only when modified pages must be stored (`flush`) or when the FSDP module stops being GPU-resident. From the
cache slots, they are written back like any other page.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch

from infinity import interrupts
from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.content.views import Content, bytes_of
from infinity.errors import StallError
from infinity.memory.device import Device, DeviceEvent
from infinity.schedule.cache import Cache
from infinity.schedule.cache_slots import CacheSlots
from infinity.schedule.cursor import Cursor, PlannedAccess
from infinity.schedule.homes import GpuResidentMemory, GpuResidentPages
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import PageReaderWriter, Transfers

_FAILURE_CHECK_SECONDS = 0.5
"""Interval, in seconds, at which the training thread checks for failures while it waits for a job of another thread."""
_PAGES_READ_TOGETHER = 4
"""Number of pages that are read concurrently when an FSDP module becomes GPU-resident. Every host cache has at least
this many cache slots.
"""


Reservation = AbstractContextManager[list[Content]]
"""An access that has its place in the plan and holds its pages later, in a ``with`` block. See `Pager.reservation`."""


class Pager:
    """Reads pages into cache slots before they are used, and writes modified pages back afterwards.

    Life cycle: without a plan, pages are read on demand and stay in memory until their cache slot is needed. `install`
    sets a plan, which the pager then follows access by access. An access that the plan does not expect suspends the
    plan until the next `begin_step`. `drain` shuts the pager down. After an error, every call that can wait raises the
    first error, usually a `CorruptPageError`, `StorageError` or `StallError`.

    `access`, `reservation`, `install`, `begin_step`, `set_gpu_resident`, `flush` and `discard` must be called on the
    training thread. Every attribute is read and changed under the lock of `Transfers`.

    Args:
        slots: memory of the cache slots.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[memoryview],
        device: Device,
        store: PageReaderWriter,
        transfers: Transfers,
    ) -> None:
        self._layout, self._device, self._store, self.transfers = layout, device, store, transfers
        self._cache_slots = CacheSlots(layout.pages, slots)
        self._cache = Cache(self._cache_slots, transfers, store, device)
        self._gpu_resident_pages = GpuResidentPages(layout, device, transfers.observer)
        self._plan: Plan | None = None
        """Plan that was installed most recently. Changed by `install`, and cleared when a step departs from a predicted
        plan.
        """
        self._guessed = False
        """``True`` if `_plan` is a prediction because no step has been recorded yet. Changed together with `_plan`."""
        self._cursor: Cursor | None = None
        """Position of the current step in the plan, or ``None`` while no plan is followed. Changed by `install`, by
        `begin_step`, by `drain`, and by an access or reservation that departs from the plan.
        """
        self._waiting = 0
        """Number of reservations that are waiting for the window to reach them. Changed by the waiting threads."""
        self.reservations = 0
        """Number of outstanding reservations: created, but not yet returned. Changed by the threads that create and
        return them.
        """

    # Calls from the training loop #

    @contextmanager
    def access(
        self, uses: Access, *, planned: bool = True, copies: Callable[[], DeviceEvent] | None = None
    ) -> Iterator[list[Content]]:
        """Hold pages in memory and return their bytes as one view per use, each of the length of its page.

        For a GPU-resident FSDP module, the views are tensors on the device. Use them only on the current stream of the
        calling thread.

        Args:
            planned: whether this access is part of a training step. If not, its pages are read on demand, and the
                position in the plan does not change.
            copies: function that is called at the end of the access and returns an event recorded after all copies
                between the pages and a device. The pages keep their cache slots until the device has passed this event.
                The next use of GPU-resident pages is ordered after it.

        Raises:
            CorruptPageError: if a page fails verification.
            StorageError: if a page cannot be read.
            StallError: if a wait exceeds the time limit.
            InfinityError: if more pages are in use at the same time than the host cache has cache slots.
        """
        # Defer Ctrl-C until the `finally` clause below is in effect. A page that stays pinned would never release its
        # cache slot.
        interrupts.begin()
        try:
            holder, cursor = self._acquire(uses, planned=planned)
        except BaseException:
            interrupts.end()
            raise
        try:
            interrupts.end()
            yield [*holder.contents(uses)]
        finally:
            device_event = copies() if copies else None
            with self.transfers.lock:
                # An abandoned gather may end late, when `_holder` already returns a different object
                holder.release(uses, device_event)
                # After an interrupt, a gather may end only when another step has begun
                self._end(uses, cursor.take(uses) if cursor is not None and cursor is self._cursor else None)
                if self._waiting:
                    self.transfers.lock.notify_all()

    def reservation(
        self,
        uses: Access,
        *,
        threaded: bool,
        copies: Callable[[], DeviceEvent] | None = None,
        planned: bool = True,
        ahead: bool = False,
        ordered: Container[int] = (),
    ) -> Reservation:
        """Return a reservation, which takes its place in the plan now and holds its pages later, in a ``with`` block.

        Updates use reservations, and so does the thread that prefetches weights to the GPU. This method does not wait.
        The update thread and the thread that prefetches weights each hold their reservations one at a time, in the
        order in which they were created. If updates have no thread of their own, the training thread holds their
        reservations. Before the training thread uses a page, it waits until all reservations of the page have been
        returned, at the end of their ``with`` blocks. If a block cannot be entered, the reservation is never returned,
        and every later wait raises the first error.

        Args:
            threaded: whether a thread other than the training thread holds the reservation. Waits on such a thread do
                not count as stalls of the training thread.
            copies: function with the same meaning as for `access`.
            planned: whether the reservation is part of a training step, as for `access`.
            ahead: whether the reservation prefetches weights for a later gather. Before it holds its pages, such a
                reservation waits until all earlier reservations of these pages have been returned by the updates that
                modify them, and until the window has reached it. The training thread waits for the prefetch, so it runs
                ahead of updates no further than the window allows.
            ordered: pages whose copies from the device are ordered by the device, so that no thread waits for them.
        """
        with self.transfers.lock:
            self.transfers.check()
            holder = self._holder(uses)
            cursor = self._follow(uses) if planned and holder is self._cache else None
            access = cursor.take(uses) if cursor is not None else None
            self.reservations += 1
            states = [self._cache_slots.pages[use.page] for use in uses]
            # Later reservations of the same pages must not be waited for, so record how many earlier ones there are in
            # total.
            earlier = [state.returned + state.reservations for state in states] if ahead else ()
            for state in states:
                state.reservations += 1
        return self._reserved(uses, holder, access, earlier, threaded=threaded, copies=copies, ordered=ordered)

    def reserve_space(self, plan: Plan) -> None:
        """Reserve drive space for gradients if the steps of a plan store gradients. Otherwise release this space.

        Raises:
            BudgetError: if the space is not available.
            StorageError: if a drive fails.
        """
        self._store.expect_gradients(plan.stores_gradients)

    def install(self, plan: Plan | None, *, guessed: bool = False) -> None:
        """Follow a plan from the start of the next step.

        Args:
            plan: plan to follow, or ``None`` to read all pages on demand.
            guessed: whether the plan is a prediction because no step has been recorded yet. If a step departs from such
                a plan, the pager discards the plan.
        """
        with self.transfers.lock:
            self.transfers.check()
            self._cache.drop_claims()
            self._set_plan(plan, guessed=guessed)
            self._cursor = Cursor(plan, self._cache) if plan and plan.trace else None
            if self._cursor is not None:
                # Claim pages before evicting any. Otherwise pages of the window that are already in memory would be
                # evicted and read again.
                self._cursor.claim_window()
            for page in self._cache_slots.holders():
                self._cache.evict(page)
            self._cache.prefetch()

    def _set_plan(self, plan: Plan | None, *, guessed: bool = False) -> None:
        self._plan, self._guessed = plan, guessed
        self._cache.eager = plan is not None
        resident = plan.resident if plan else frozenset()
        for page, state in enumerate(self._cache_slots.pages):
            state.resident = page in resident

    @property
    def failure(self) -> Exception | None:
        """First error, which every later call raises, or ``None``."""
        return self.transfers.failure

    def wait_for_device(self, device_event: DeviceEvent, what: str) -> None:
        """Wait until the device has passed an event. This method may be called from any thread.

        Args:
            what: description of the device's work before this event, for the error message.

        Raises:
            StallError: if the device makes no progress within the time limit.
        """
        if not self._device.wait(device_event, self.transfers.timeout, lambda: self.transfers.failure is not None):
            late = StallError(f"waited {self.transfers.timeout:.0f} s for the device to {what}")
            raise self.transfers.failure or late

    def wait_for_job(self, job: Future[Any], cause: str) -> None:
        """Block the training thread until a job of another thread has finished, successfully or not.

        Args:
            cause: cause of the stall that is reported to `Ledger.stalled`.
        """
        if job.done():
            return
        began = perf_counter()
        while not wait_for_futures([job], _FAILURE_CHECK_SECONDS).done:
            interrupts.check()
            if self.transfers.failure is not None:
                raise self.transfers.failure
        self.transfers.observer.stalled(cause, -1, perf_counter() - began)

    @property
    def between_steps(self) -> bool:
        """``True`` if a plan is followed and a step has just ended. Read only on the training thread."""
        # The lock is not needed: only the training thread changes the cursor and its position.
        return self._cursor is not None and self._cursor.between_steps

    def begin_step(self) -> None:
        """Mark the boundary between two steps. If the previous step departed from the plan, follow the plan again."""
        with self.transfers.lock:
            self.transfers.check()
            if self._cursor is not None and not self.between_steps:
                self._depart("the step ended early")
            plan = self._plan
            if plan is not None and plan.trace and self._cursor is None:
                self._cursor = Cursor(plan, self._cache, first=len(plan.prefix))
                self._cursor.claim_window()

    def flush(self) -> None:
        """Write back all modified pages and wait until all writes have ended. Raises the same exceptions as
        `access`.
        """
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
            newer = self._gpu_resident_pages.newer()
        for page, memory in newer.items():
            self._send(page, memory)
        with self.transfers.lock:
            self._cache.flush()

    # GPU-resident FSDP modules #

    def gpu_resident(self, fsdp_module: int) -> bool:
        """Return ``True`` if an FSDP module is GPU-resident. Must be called on the training thread."""
        return fsdp_module in self._gpu_resident_pages.fsdp_modules

    def set_gpu_resident(self, fsdp_modules: frozenset[int]) -> None:
        """Make the given FSDP modules GPU-resident, and no others. Must be called between steps.

        Raises:
            torch.OutOfMemoryError: if the device has too little memory. FSDP modules in `fsdp_modules` that were
                already GPU-resident stay GPU-resident.
            CorruptPageError, StorageError, StallError, InfinityError: in the same cases as `access`.
        """
        gpu_resident_pages = self._gpu_resident_pages
        if fsdp_modules == gpu_resident_pages.fsdp_modules:
            return
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
        for fsdp_module in gpu_resident_pages.fsdp_modules - fsdp_modules:
            for page, memory in gpu_resident_pages.of(fsdp_module).items():
                if page in memory.newer:
                    self._send(page, memory)
            with self.transfers.lock:
                gpu_resident_pages.remove(fsdp_module)
        built = {
            fsdp_module: gpu_resident_pages.build(gpu_resident_pages.pages_of(fsdp_module))
            for fsdp_module in sorted(fsdp_modules - gpu_resident_pages.fsdp_modules)
        }
        for fsdp_module, empty in built.items():
            self._bring(fsdp_module, empty)

    def joined_pages(self, fsdp_module: int) -> list[tuple[Page, Content]]:
        """Return the joined pages of a GPU-resident FSDP module with their bytes, during an access to some of them."""
        with self.transfers.lock:
            return self._gpu_resident_pages.joined(fsdp_module)

    def gpu_resident_weights(self, fsdp_module: int) -> Mapping[int, torch.Tensor]:
        """Return the weights of a GPU-resident FSDP module by shard, during an access to their pages."""
        with self.transfers.lock:
            return self._gpu_resident_pages.weights(fsdp_module)

    def _bring(self, fsdp_module: int, memory: dict[int, GpuResidentMemory]) -> None:
        """Make an FSDP module GPU-resident. The copies to the device are only queued when this method returns."""
        gradients = [page for page in self._layout.fsdp_module_pages[fsdp_module] if page.role is Role.GRAD]
        with self.transfers.lock:
            gradients = [page for page in gradients if self._cache.has_content(page.index)]
        stored = self._gpu_resident_pages.build(gradients)
        coming = memory | stored
        stream = self._device.stream("stage")
        # The allocator may have handed out memory on which the current stream still has work queued.
        self._device.record_event(self._device.current()).before(stream)
        pages = list(coming)
        for first in range(0, len(pages), _PAGES_READ_TOGETHER):
            together = pages[first : first + _PAGES_READ_TOGETHER]
            uses = tuple(Use(page, Mode.CONSUME if page in stored else Mode.READ) for page in together)
            with self.access(uses, planned=False, copies=partial(self._device.record_event, stream)) as contents:
                for page, content in zip(together, contents, strict=True):
                    self._device.copy_all(*_copies(coming[page].arrays[page], content), stream)
                    self._device.keep(coming[page].memory, stream)
        device_event = self._device.record_event(stream)
        for page, whole in coming.items():
            whole.used[page] = device_event
            if page in stored:
                whole.newer.add(page)
        with self.transfers.lock:
            self._gpu_resident_pages.add(fsdp_module, coming)

    def _send(self, page: int, memory: GpuResidentMemory) -> None:
        """Start copying a GPU-resident page into a cache slot, from which it will be written. No reservation may be
        outstanding.
        """
        back, uses = self._device.stream("back"), (Use(page, Mode.WRITE),)
        with interrupts.held():
            with self.transfers.lock:
                self._cache.acquire(uses, threaded=False)
            try:
                memory.used[page].before(back)
                there, here = _copies(memory.arrays[page], self._cache_slots.pages[page].content)
                self._device.copy_all(here, there, back)
                self._device.keep(memory.memory, back)
                memory.used[page] = self._device.record_event(back)
                memory.newer.discard(page)
            except Exception as error:
                # The cache slot has no valid content. Failing here keeps the page pinned and stops all writes, so that
                # garbage does not replace the previous version in the store.
                self.fail(error)
                raise
            with self.transfers.lock:
                self._cache.release(uses, memory.used[page])

    def discard(self, pages: Sequence[int]) -> None:
        """Drop the content of pages that will not be read again. Raises the same exceptions as `access`."""
        with self.transfers.lock:
            for page in pages:
                state = self._cache_slots.pages[page]
                # The store may reuse the extent of the page immediately. A transfer still in flight would then read or
                # overwrite the content of another page.
                self.transfers.wait(lambda state=state: not state.reservations, "update", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.reading, "read", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.writing, "write", page)  # type: ignore[misc]
                self._gpu_resident_pages.discard(page)
                self._cache.discard(page)

    def fail(self, error: Exception) -> None:
        """Make all current waits and all later calls raise `error`. May be called from any thread."""
        with self.transfers.lock:
            self.transfers.fail(error)

    def drain(self) -> bool:
        """Wait for all transfers and copies. See `Cache.drain`. The pager must not be used afterwards."""
        with self.transfers.lock:
            self._cursor = None
        return self._cache.drain()

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status: ``free``, ``resident``, ``streaming`` or ``writing``."""
        with self.transfers.lock:
            return self._cache_slots.census()

    def held_bytes(self) -> dict[str, int]:
        """Return the number of bytes that pages occupy in the host cache, by role."""
        with self.transfers.lock:
            return self._cache_slots.held_bytes()

    def in_flight(self) -> dict[str, int]:
        """Return the numbers of pages that are currently being read and written."""
        with self.transfers.lock:
            return {"read": self.transfers.reads, "write": self.transfers.writes}

    # Accesses and reservations #

    def _acquire(self, uses: Access, *, planned: bool) -> tuple[Cache | GpuResidentPages, Cursor | None]:
        """Acquire pages for the training thread. Return their holder, and the cursor if the access follows the plan."""
        with self.transfers.lock:
            self.transfers.check()
            holder = self._holder(uses)
            cursor = self._follow(uses) if planned and holder is self._cache else None
            # The window cannot advance past an outstanding reservation. An access outside the window must wait for the
            # reservation: if its pages were read on demand, they would take cache slots that the plan has assigned to
            # other pages, and the number of bytes per step would depend on the speed of updates.
            if cursor is not None and not cursor.reaches(cursor.position):
                self.transfers.wait(lambda: cursor.reaches(cursor.position), "update", uses[0].page)
            for use in uses:
                state = self._cache_slots.pages[use.page]
                if state.reservations:
                    self.transfers.wait(lambda state=state: not state.reservations, "update", use.page)  # type: ignore[misc]
            holder.acquire(uses, threaded=False)
            return holder, cursor

    @contextmanager
    def _reserved(
        self,
        uses: Access,
        holder: Cache | GpuResidentPages,
        access: PlannedAccess | None,
        earlier: Sequence[int],
        *,
        threaded: bool,
        copies: Callable[[], DeviceEvent] | None,
        ordered: Container[int],
    ) -> Iterator[list[Content]]:
        """Hold the pages of a reservation.

        Args:
            holder: object that holds the pages. It changes only while none of them is in use or reserved.
            access: place of the reservation in the plan, or ``None`` off the plan.
            earlier: total number of reservations of each page that must have been returned before. Empty unless the
                reservation prefetches weights for a later gather.
        """
        with self.transfers.lock:
            for use, before in zip(uses, earlier, strict=False):
                state = self._cache_slots.pages[use.page]
                if state.returned < before:
                    self.transfers.wait(
                        lambda state=state, before=before: state.returned >= before,  # type: ignore[misc]
                        "update", use.page, threaded=threaded,
                    )  # fmt: skip
            if earlier and access is not None:
                # This wait cannot deadlock: the oldest unfinished access is always inside the window and can therefore
                # run, and when it ends the window advances, until it reaches this access.
                cursor, position = access.cursor, access.position
                self._waiting += 1
                try:
                    self.transfers.wait(
                        lambda: cursor is not self._cursor or cursor.reaches(position),
                        "update", uses[0].page, threaded=threaded,
                    )  # fmt: skip
                finally:
                    self._waiting -= 1
            holder.acquire(uses, threaded=threaded, ordered=ordered, reserved=True)
        contents = [*holder.contents(uses)]
        try:
            yield contents
        finally:
            self._release_reservation(uses, holder, access, copies() if copies else None)

    def _release_reservation(
        self,
        uses: Access,
        holder: Cache | GpuResidentPages,
        access: PlannedAccess | None,
        device_event: DeviceEvent | None,
    ) -> None:
        with self.transfers.lock:
            self.reservations -= 1
            for use in uses:
                state = self._cache_slots.pages[use.page]
                state.reservations -= 1
                state.returned += 1
            holder.release(uses, device_event, reserved=True)
            self._end(uses, access)
            self.transfers.lock.notify_all()

    def _holder(self, uses: Access) -> Cache | GpuResidentPages:
        """Return the object that holds the pages of an access. It changes only while no page of the access is in use or
        reserved.
        """
        return self._gpu_resident_pages if self._gpu_resident_pages.has(uses) else self._cache

    def _end(self, uses: Access, access: PlannedAccess | None) -> None:
        """Advance the window after an access has ended. Off the plan, only evict consumed pages.

        If the pager no longer follows the cursor in which the access took its place, the access is off the plan.
        """
        if access is not None and access.cursor is self._cursor:
            access.cursor.end(access)
        else:
            for use in uses:
                if use.mode is Mode.CONSUME:
                    self._cache.evict(use.page, consumed=True)
        self._cache.prefetch()

    # Following the plan #

    def _follow(self, uses: Access) -> Cursor | None:
        """Return the cursor if the plan expects `uses` next. Otherwise depart from the plan and return ``None``."""
        cursor = self._cursor
        if cursor is not None and cursor.expected != uses:
            self._depart(f"expected {self._describe(cursor.expected)}, got {self._describe(uses)}")
        return self._cursor

    def _depart(self, detail: str) -> None:
        """Stop following the plan until the next step begins. A predicted plan is discarded permanently."""
        self._cache.drop_claims()
        self._cursor = None
        if self._guessed:
            self._set_plan(None)
        else:
            self.transfers.observer.diverged(detail)

    def _describe(self, uses: Access) -> str:
        return " + ".join(f"{use.mode.value} {self._layout.page_name(use.page)}" for use in uses)


def _copies(arrays: Mapping[int, torch.Tensor], content: Content) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the arrays of a page on the device, and views of the same bytes in its cache slot."""
    return [*arrays.values()], [bytes_of(content, offset, part.numel()) for offset, part in arrays.items()]
