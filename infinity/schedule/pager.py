"""The pager, which executes a plan. No other code changes the location of a page.

The pager consists of parts, each with its own state, all under one lock (`transfers` names the threads that take it):

    Pager --> Cursor --> Cache --> CacheSlots   cache slot of each page, and the reasons to keep the page there
      |                   |
      |                   +------> Transfers    transfers in flight, waiting threads, the first error
      |                   |
      |                   +------> Copies       copies by the device, and the thread that waits for them
      +--> GpuResidentPages                     pages of GPU-resident FSDP modules

`Cache` acquires, releases, prefetches, writes back and evicts pages. `Cursor` knows which pages the plan needs next.
`Pager` is the interface for other packages: accesses of the training thread, reservations for other threads, and
operations between steps.

[Note: GPU-resident FSDP modules] All pages of an FSDP module can be on the device (`set_gpu_resident`). An access to such pages is
not part of a plan, needs no cache slots, and gets the bytes on the device. Otherwise accesses and reservations behave
as for all other pages. The pages are copied into cache slots, one after another, only if modified pages must be in the
store (`flush`) or if the FSDP module is no longer GPU-resident. From the cache slots they are written back in the same
way as any other page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from infinity import interrupts
from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.content.views import Content, bytes_of
from infinity.errors import StallError
from infinity.memory.device import Device, DeviceEvent, wait
from infinity.memory.host_cache import HostCachePart
from infinity.schedule.cache import Cache
from infinity.schedule.cache_slots import CacheSlots, PageState
from infinity.schedule.cursor import Cursor, PlannedAccess
from infinity.schedule.homes import GpuResidentPage, GpuResidentPages
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import PageReaderWriter, PagerObserver, Transfers

_LOOK_SECONDS = 0.5
"""Seconds between checks for a failure while a thread waits for the job of another thread."""
_BROUGHT = 4
"""Number of pages that are read at the same time when an FSDP module becomes GPU-resident. Every host cache has at
least this many cache slots.
"""


class Reservation:
    """Pages that are held later, in a ``with`` block, and whose place in the plan is taken now.

    Updates use reservations, and so does the thread that prefetches weights to the GPU. Life cycle: `Pager.reservation`
    creates a reservation on the training thread, without waiting. The reservation is held between `__enter__` (or
    `hold_at_once`) and `__exit__`, and then returned. Each kind of reservation is held by its own thread or, if updates
    have no thread, by the training thread, one after another in the order in which they were created. Until a
    reservation is returned, the training thread waits before it uses one of the pages. If `__enter__` raises, the
    reservation is never returned, and from then on every wait raises the first error. A reservation does not change
    after it was created.
    """

    def __init__(
        self,
        pager: Pager,
        uses: Access,
        cursor: Cursor | None,
        access: PlannedAccess | None,
        *,
        earlier: Sequence[int],
        threaded: bool,
        copies: Callable[[], DeviceEvent] | None,
    ) -> None:
        self._pager, self._earlier, self._threaded, self._copies = pager, earlier, threaded, copies
        self.uses = uses
        """The pages, as `Pager.access` takes them."""
        self._cursor = cursor
        """Cursor in which the place was taken; None off the plan."""
        self._access = access
        """Access of the plan; None off the plan."""

    def hold_at_once(self) -> list[Content] | None:
        """Hold the pages if that is possible without waiting, and return their bytes. Otherwise return ``None``.

        `__exit__` returns the pages.
        """
        return self._pager._acquire_at_once(self.uses, threaded=self._threaded)

    def __enter__(self) -> list[Content]:
        """Wait for the pages. Return and raise as `Pager.access` does."""
        return self._pager._acquire_reservation(
            self.uses, self._earlier, self._cursor, self._access, threaded=self._threaded
        )

    def __exit__(self, *exception: object) -> None:
        """Return the pages."""
        device_event = self._copies() if self._copies else None
        self._pager._release_reservation(self.uses, self._cursor, self._access, device_event)


class Pager:
    """Brings pages into cache slots ahead of their use and writes modified pages back afterwards.

    Life cycle: without a plan, every access is served on demand, and pages stay until their cache slot is needed.
    `install` sets a plan, which the pager then follows access by access. An access that the plan does not expect
    suspends the plan until the next `begin_step`. `drain` ends the pager. After the first error, every call that can
    wait raises this error.

    `access`, `reservation`, `install`, `begin_step`, `set_gpu_resident`, `flush` and `discard` must be called on the training
    thread. Every attribute is read and changed under the lock of `Transfers`.

    Args:
        layout: pages of this rank.
        host_cache: cache slots for the pages.
        device: device that computes.
        store: storage that pages are read from and written to.
        observer: receiver of telemetry, called under the lock.
        timeout: time limit of a wait, in seconds.
        failed: called once with the first error, from any thread and under the lock. It must not wait.
    """

    def __init__(
        self,
        layout: Layout,
        host_cache: HostCachePart,
        device: Device,
        store: PageReaderWriter,
        observer: PagerObserver,
        *,
        timeout: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self._layout, self._device, self._observer, self._timeout = layout, device, observer, timeout
        self._store = store
        self.transfers = Transfers(observer, timeout=timeout, failed=failed)
        self._cache_slots = CacheSlots(layout.pages, host_cache)
        self._cache = Cache(
            self._cache_slots, self.transfers, store, observer, timeout=timeout, enter_thread=device.enter_thread
        )
        self._gpu_resident_pages = GpuResidentPages(layout, device, observer)
        self._plan: Plan | None = None
        """Plan that was installed last. Changed by `install`, and when a step departs from a predicted plan."""
        self._guessed = False
        """``True`` if this plan is a prediction, because no step is recorded yet. Changed together with `_plan`."""
        self._cursor: Cursor | None = None
        """Position of the step in the plan; None while no plan is followed. Changed by `install`, `begin_step`,
        `drain`, and by an access or reservation that departs from the plan.
        """
        self._waiting = 0
        """Number of reservations that wait until the window reaches them. Changed by the waiting threads."""
        self.reservations = 0
        """Number of reservations that have been created and not returned. Changed by the threads that create and return
        them.
        """

    # Calls from the training loop #

    @contextmanager
    def access(
        self, uses: Access, *, planned: bool = True, copies: Callable[[], DeviceEvent] | None = None
    ) -> Iterator[list[Content]]:
        """Hold the pages of `uses` in memory and return their bytes: one view per use, as long as its page.

        For a GPU-resident FSDP module, the views are tensors on the device, for work on the current stream of this
        thread.

        Args:
            uses: distinct pages that are needed at the same time.
            planned: whether this access is part of a training step. If not, it is served on demand and the plan
                continues.
            copies: called at the end. Returns an event after the copies between the pages and a device. The pages keep
                their cache slots until the device has passed this event. The next use of GPU-resident pages is ordered
                after it.

        Raises:
            CorruptPageError: if a page fails verification.
            StorageError: if a page cannot be read.
            StallError: if a wait exceeds the time limit.
            InfinityError: if the host cache has too few cache slots for the pages that are in use at the same time.
        """
        # Hold Ctrl-C back until the `finally` below is in force. A page that stays pinned never returns its cache slot.
        interrupts.begin()
        try:
            planned = self._acquire(uses, planned=planned)
        except BaseException:
            interrupts.end()
            raise
        try:
            interrupts.end()
            yield self._contents(uses)
        finally:
            self._release(uses, planned=planned, device_event=copies() if copies else None)

    def reservation(
        self, uses: Access, *, threaded: bool, copies: Callable[[], DeviceEvent] | None = None, ahead: bool = False
    ) -> Reservation:
        """Take the place of `uses` in the plan now and hold the pages later. Each thread holds its reservations in
        order.

        Args:
            uses: as for `access`.
            threaded: whether another thread holds the reservation. Its waits do not count as stalls of the training
                thread.
            copies: as for `access`.
            ahead: whether the reservation prefetches weights for a later gather. It is held after the earlier
                reservations of its pages, which another thread holds and modifies, have been returned, and after the
                window has reached it. The training thread waits for this reservation, and therefore gets no further
                ahead of updates than the window allows.

        Raises:
            CorruptPageError, StorageError, StallError: if an earlier operation has failed.
        """
        with self.transfers.lock:
            self.transfers.check()
            cursor = self._follow(uses) if not self._gpu_resident_pages.has(uses) else None
            access = cursor.take(uses) if cursor is not None else None
            self.reservations += 1
            states = [self._cache_slots.pages[use.page] for use in uses]
            # Numbers instead of "no open reservation": only earlier reservations of the pages count, not this one and
            # later ones.
            earlier = [state.returned + state.reservations for state in states] if ahead else ()
            for state in states:
                state.reservations += 1
        return Reservation(self, uses, cursor, access, earlier=earlier, threaded=threaded, copies=copies)

    def reserve_space(self, plan: Plan) -> None:
        """Reserve space on the drives for gradients if the steps of a plan store them, and release it if not.

        Args:
            plan: plan of the next steps.

        Raises:
            BudgetError: if the space is not available.
            StorageError: if a drive fails.
        """
        self._store.expect_gradients(plan.stores_gradients)

    def install(self, plan: Plan | None, *, guessed: bool = False) -> None:
        """Follow a plan from the start of the next step. Raises as `reservation` does.

        Args:
            plan: plan to follow; None serves everything on demand.
            guessed: whether the plan is a prediction, because no step has been recorded yet. A step that departs from
                such a plan ends it.
        """
        with self.transfers.lock:
            self.transfers.check()
            self._cache.drop_claims()
            self._set_plan(plan, guessed=guessed)
            self._cursor = Cursor(plan, self._cache) if plan and plan.trace else None
            if self._cursor is not None:
                # Claim before evicting. Otherwise pages that are in memory and inside the window would be evicted and
                # read again.
                self._cursor.claim_window()
            self._cache.evict_all()
            self._cache.prefetch()

    def _set_plan(self, plan: Plan | None, *, guessed: bool = False) -> None:
        self._plan, self._guessed = plan, guessed
        self._cache.eager = plan is not None
        resident = plan.resident if plan else frozenset()
        for page, state in enumerate(self._cache_slots.pages):
            state.resident = page in resident

    @property
    def failure(self) -> Exception | None:
        """Return the first error, which every call raises, or ``None``."""
        return self.transfers.failure

    def wait_for_device(self, device_event: DeviceEvent, what: str) -> None:
        """Wait until the device has passed an event. May be called from any thread.

        Args:
            device_event: the event.
            what: work of the device before this event, for the error message.

        Raises:
            StallError: if the wait exceeds the time limit.
            Exception: the first error, if an operation fails before or during the wait.
        """
        if not wait(device_event, self._timeout, lambda: self.transfers.failure is not None):
            late = StallError(f"waited {self._timeout:.0f} s for the device to {what}")
            raise self.transfers.failure or late

    def wait_for_job(self, job: Future[Any], cause: str) -> None:
        """Block the training thread until a job of another thread has ended, successfully or not.

        Args:
            job: the job.
            cause: cause of the stall, see `PagerObserver.stalled`.

        Raises:
            Exception: the first error, if an operation fails before or during the wait.
        """
        if job.done():
            return
        began = perf_counter()
        while not wait_for_futures([job], _LOOK_SECONDS).done:
            interrupts.check()
            if self.transfers.failure is not None:
                raise self.transfers.failure
        self._observer.stalled(cause, -1, perf_counter() - began)

    def exchanging(self) -> AbstractContextManager[None]:
        """Return a context in which an update waits for other ranks, without a time limit. For the thread that runs
        updates.
        """
        return self.transfers.exchanging()

    @property
    def between_steps(self) -> bool:
        """Return ``True`` if a plan is followed and a step has just ended. For the training thread."""
        # The lock is not needed: only the training thread changes the cursor and its position.
        return self._cursor is not None and self._cursor.between_steps

    def begin_step(self) -> None:
        """Mark the boundary between two steps. If a step departed from the plan, the next step rejoins it.

        Raises as `reservation` does.
        """
        with self.transfers.lock:
            self.transfers.check()
            if self._cursor is not None and not self.between_steps:
                self._depart("the step ended early")
            plan = self._plan
            if plan is not None and plan.trace and self._cursor is None:
                self._cursor = Cursor(plan, self._cache, first=len(plan.prefix))
                self._cursor.claim_window()

    def flush(self) -> None:
        """Write every modified page and wait until no page is being written. Raises as `access` does."""
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
            newer = self._gpu_resident_pages.newer()
        for page, gpu_page in newer.items():
            self._send(page, gpu_page)
        with self.transfers.lock:
            self._cache.flush()

    # GPU-resident FSDP modules #

    def gpu_resident(self, fsdp_module: int) -> bool:
        """Return ``True`` if an FSDP module is GPU-resident. For the training thread."""
        return fsdp_module in self._gpu_resident_pages.fsdp_modules

    def set_gpu_resident(self, fsdp_modules: frozenset[int]) -> None:
        """Make exactly these FSDP modules GPU-resident. Must be called between steps.

        Args:
            fsdp_modules: indices of FSDP modules.

        Raises:
            torch.OutOfMemoryError: if the device has too little memory. FSDP modules that were GPU-resident before and
                are in `fsdp_modules` stay GPU-resident.
            Exception: as `access`.
        """
        gpu_resident_pages = self._gpu_resident_pages
        if fsdp_modules == gpu_resident_pages.fsdp_modules:
            return
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
        for fsdp_module in gpu_resident_pages.fsdp_modules - fsdp_modules:
            for page, gpu_page in gpu_resident_pages.of(fsdp_module).items():
                if gpu_page.newer:
                    self._send(page, gpu_page)
            with self.transfers.lock:
                gpu_resident_pages.leave(fsdp_module)
        built = {
            fsdp_module: gpu_resident_pages.build(gpu_resident_pages.pages_of(fsdp_module))
            for fsdp_module in sorted(fsdp_modules - gpu_resident_pages.fsdp_modules)
        }
        for fsdp_module, memory in built.items():
            self._bring(fsdp_module, memory)

    def _bring(self, fsdp_module: int, memory: dict[int, GpuResidentPage]) -> None:
        """Make an FSDP module GPU-resident: start to copy the content of its pages to the device."""
        gradients = [page for page in self._layout.pages if page.fsdp_module == fsdp_module and page.role is Role.GRAD]
        with self.transfers.lock:
            gradients = [page for page in gradients if self._cache.has_content(page.index)]
        stored = self._gpu_resident_pages.build(gradients)
        coming = memory | stored
        stream = self._device.stream("stage")
        # The memory may come from the allocator with earlier work of the current stream still queued on it.
        self._device.record_event(self._device.current()).before(stream)
        pages = list(coming)
        for first in range(0, len(pages), _BROUGHT):
            together = pages[first : first + _BROUGHT]
            uses = tuple(Use(page, Mode.CONSUME if page in stored else Mode.READ) for page in together)
            with self.access(uses, planned=False, copies=partial(self._device.record_event, stream)) as contents:
                for page, content in zip(together, contents, strict=True):
                    self._device.copy(coming[page].content, bytes_of(content), stream)
                    self._device.keep(coming[page].content, stream)
        device_event = self._device.record_event(stream)
        for page, gpu_page in coming.items():
            gpu_page.used, gpu_page.newer = device_event, page in stored
        with self.transfers.lock:
            self._gpu_resident_pages.come(fsdp_module, coming)

    def _send(self, page: int, gpu_page: GpuResidentPage) -> None:
        """Start to copy a GPU-resident page into a cache slot, from which it is written. No reservation may be open."""
        back, uses = self._device.stream("back"), (Use(page, Mode.WRITE),)
        with interrupts.held():
            with self.transfers.lock:
                self._cache.acquire(uses, threaded=False)
            try:
                gpu_page.used.before(back)
                self._device.copy(bytes_of(self._cache_slots.content(page)), gpu_page.content, back)
                self._device.keep(gpu_page.content, back)
                gpu_page.used, gpu_page.newer = self._device.record_event(back), False
            except Exception as error:
                # The cache slot has no valid content. Failing here keeps it pinned and stops all writes, so that the
                # previous version in the store is not replaced by garbage.
                self.fail(error)
                raise
            with self.transfers.lock:
                self._cache.release(uses, gpu_page.used)

    def discard(self, pages: Sequence[int]) -> None:
        """Drop the content of pages that will not be read again. Raises as `access` does."""
        with self.transfers.lock:
            for page in pages:
                state = self._cache_slots.pages[page]
                # The store may reuse the extent of the page at once. A transfer still in flight would then read or
                # overwrite the content of another page.
                self.transfers.wait(lambda state=state: not state.reservations, "update", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.reading, "read", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.writing, "write", page)  # type: ignore[misc]
                self._gpu_resident_pages.discard(page)
                self._cache.discard(page)

    def fail(self, error: Exception) -> None:
        """Make every later call, and every current wait, raise `error`. May be called from any thread."""
        with self.transfers.lock:
            self.transfers.fail(error)

    def leave_to_parent(self, error: Exception) -> None:
        """Make every call in a forked child process raise `error`, whatever the threads of the parent were doing at the
        fork.
        """
        self.transfers.leave_to_parent(error)

    def drain(self) -> bool:
        """Wait for all transfers and copies without raising. After a failure, wait only for a short time.

        The pager must not be used afterwards.

        Returns:
            ``True`` if the device no longer uses the host cache.
        """
        with self.transfers.lock:
            self._cursor = None
        return self._cache.drain()

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status: free, resident, streaming, writing."""
        with self.transfers.lock:
            return self._cache_slots.census()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the host cache, by role."""
        with self.transfers.lock:
            return self._cache_slots.held_bytes()

    def in_flight(self) -> dict[str, int]:
        """Return the number of pages that are being read and written."""
        with self.transfers.lock:
            return {"read": self.transfers.reads, "write": self.transfers.writes}

    # Accesses and reservations #

    def _acquire(self, uses: Access, *, planned: bool) -> bool:
        """Acquire pages for the training thread. Return ``True`` if the plan expected them."""
        with self.transfers.lock:
            self.transfers.check()
            cursor = self._follow(uses) if planned and not self._gpu_resident_pages.has(uses) else None
            # Open reservations hold the window back. An access outside of the window must wait for them: if it were
            # served on demand, it would take cache slots that the plan has assigned to other pages, and the bytes of a
            # step would depend on the speed of updates.
            if cursor is not None and not cursor.claimed:
                self.transfers.wait(lambda: cursor.claimed, "update", uses[0].page)
            for use in uses:
                state = self._cache_slots.pages[use.page]
                if state.reservations:
                    self.transfers.wait(lambda state=state: not state.reservations, "update", use.page)  # type: ignore[misc]
            self._holder(uses).acquire(uses, threaded=False)
            return cursor is not None

    def _release(self, uses: Access, *, planned: bool, device_event: DeviceEvent | None) -> None:
        with self.transfers.lock:
            self._holder(uses).release(uses, device_event)
            cursor = self._cursor if planned else None
            self._end(uses, cursor, cursor.take(uses) if cursor is not None else None)
            if self._waiting:
                self.transfers.lock.notify_all()

    def _acquire_reservation(
        self,
        uses: Access,
        earlier: Sequence[int],
        cursor: Cursor | None,
        access: PlannedAccess | None,
        *,
        threaded: bool,
    ) -> list[Content]:
        """Acquire the pages of a reservation and return their bytes.

        Args:
            uses: the pages.
            earlier: for a reservation ahead of a gather: by use, the number of reservations of the page that must have
                been returned since the start.
            cursor: cursor in which the place was taken.
            access: access of the plan.
            threaded: whether this is not the training thread.
        """
        with self.transfers.lock:
            for use, before in zip(uses, earlier, strict=False):
                state = self._cache_slots.pages[use.page]
                left = partial(_has_returned, state, before)
                self.transfers.wait(left, "update", use.page, threaded=threaded)
            if earlier and cursor is not None and access is not None:
                # This wait cannot deadlock: the oldest access that has not ended is always inside the window, so it can
                # always run, and the window moves on until it reaches this access.
                reached = partial(self._has_reached, cursor, access)
                self._waiting += 1
                try:
                    self.transfers.wait(reached, "update", uses[0].page, threaded=threaded)
                finally:
                    self._waiting -= 1
            self._holder(uses).acquire_reservation(uses, threaded=threaded)
        return self._contents(uses)

    def _has_reached(self, cursor: Cursor, access: PlannedAccess) -> bool:
        """Return whether the window has reached an access, or the plan of this access is no longer followed."""
        return cursor is not self._cursor or cursor.reaches(access)

    def _acquire_at_once(self, uses: Access, *, threaded: bool) -> list[Content] | None:
        with self.transfers.lock:
            holder = self._holder(uses)
            if not holder.can_acquire(uses):
                return None
            holder.acquire_reservation(uses, threaded=threaded)
        return self._contents(uses)

    def _release_reservation(
        self, uses: Access, cursor: Cursor | None, access: PlannedAccess | None, device_event: DeviceEvent | None
    ) -> None:
        with self.transfers.lock:
            self.reservations -= 1
            for use in uses:
                state = self._cache_slots.pages[use.page]
                state.reservations -= 1
                state.returned += 1
            self._holder(uses).release_reservation(uses, device_event)
            self._end(uses, cursor, access)
            self.transfers.lock.notify_all()

    def _holder(self, uses: Access) -> Cache | GpuResidentPages:
        """Return the owner of the pages of an access. It changes only while no page of the access is in use or
        reserved.
        """
        return self._gpu_resident_pages if self._gpu_resident_pages.has(uses) else self._cache

    def _contents(self, uses: Access) -> list[Content]:
        """Return the bytes of acquired pages. Does not need the lock."""
        return [*self._holder(uses).contents(uses)]

    def _end(self, uses: Access, cursor: Cursor | None, access: PlannedAccess | None) -> None:
        """Move the window past an access that has ended. Off the plan, evict only consumed pages.

        Args:
            uses: the pages.
            cursor: cursor in which the place was taken. If it is no longer followed, the access counts as off the plan.
            access: access of the plan.
        """
        if access is not None and cursor is not None and cursor is self._cursor:
            cursor.end(access)
        else:
            for use in uses:
                if use.mode is Mode.CONSUME:
                    self._cache.evict(use.page, consumed=True)
        self._cache.prefetch()

    # Following the plan #

    def _follow(self, uses: Access) -> Cursor | None:
        """Return the cursor if it expects `uses` next; otherwise depart from the plan."""
        cursor = self._cursor
        if cursor is not None and cursor.expected != uses:
            self._depart(f"expected {self._describe(cursor.expected)}, got {self._describe(uses)}")
        return self._cursor

    def _depart(self, detail: str) -> None:
        """Stop following the plan until the next step begins. A predicted plan is dropped for good."""
        self._cache.drop_claims()
        self._cursor = None
        if self._guessed:
            self._set_plan(None)
        else:
            self._observer.diverged(detail)

    def _describe(self, uses: Access) -> str:
        return " + ".join(f"{use.mode.value} {self._layout.page_name(use.page)}" for use in uses)


def _has_returned(state: PageState, reservations: int) -> bool:
    return state.returned >= reservations
