"""The pager: executes a plan. The only code that changes where a page is.

It is made of parts, each with its own state, all under one lock (`transfers` says which threads take it):

    Pager --> Cursor --> Cache --> Cache slots       which page has which cache slot, and what keeps it there
                           |
                           +-----> Transfers    what is in flight, what waits for it, the first error
      |                    |
      |                    +-----> Copies       what a device copies, and the thread that waits for it
      +--> GpuResidentPages                                pages of FSDP modules that live on the device

`Cache` acquires, releases, prefetches, writes back and evicts; `Cursor` says what the plan wants when; `Pager` is what
others call: an access of the training thread, a reservation for another one, and what happens between steps.

[Note: FSDP modules GPU-resident] An FSDP module can have all of its pages on the device (`house`). An access of such
pages is no part of a
plan, has no cache slots, and gets their bytes there; everything else about accesses and reservations is the same. Only
when what
is modified is to be in the store (`flush`), or an FSDP module is no longer GPU-resident, are pages copied into cache
slots, one after the
other, from where they are written as any page that nothing keeps.
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
"""How often a thread that waits for another one's job looks whether all has failed."""
_BROUGHT = 4
"""Pages of an FSDP module that comes home that are read at once; every host cache has so many cache slots."""


class Reservation:
    """Pages that are held later, for the length of a `with` block; their place in the plan is taken now.

    An update has reservations, and so has what copies weights to a device ahead of their gather. Life cycle: made by
    `Pager.reservation`, on the training thread, which never waits there; held between `__enter__` (or `hold_at_once`)
    and
    `__exit__`, each kind by a thread of its own or, where updates have none, by the training thread, one reservation
    after
    the other in the order in which they were made; then returned. From making to return the training thread waits
    before it uses one of the pages. If `__enter__` raises, the reservation is never returned: from then on every wait
    raises
    the first error. Nothing changes after it has been made.
    """

    def __init__(
        self,
        pager: Pager,
        uses: Access,
        cursor: Cursor | None,
        access: PlannedAccess | None,
        *,
        behind: Sequence[int],
        threaded: bool,
        copies: Callable[[], DeviceEvent] | None,
    ) -> None:
        self._pager, self._behind, self._threaded, self._copies = pager, behind, threaded, copies
        self.uses = uses
        """The pages, as `Pager.access` takes them."""
        self._cursor = cursor
        """In what its place was taken; None off the plan."""
        self._access = access
        """The access of the plan; None off the plan."""

    def hold_at_once(self) -> list[Content] | None:
        """Hold the pages, to be returned by `__exit__`, if there is nothing to wait for; else return None."""
        return self._pager._acquire_at_once(self.uses, threaded=self._threaded)

    def __enter__(self) -> list[Content]:
        """Wait for the pages; return them as `Pager.access` does. Raises what that raises."""
        return self._pager._acquire_reservation(
            self.uses, self._behind, self._cursor, self._access, threaded=self._threaded
        )

    def __exit__(self, *exception: object) -> None:
        """Return the pages."""
        device_event = self._copies() if self._copies else None
        self._pager._release_reservation(self.uses, self._cursor, self._access, device_event)


class Pager:
    """Brings pages into cache slots ahead of their use and writes modified ones behind it.

    Life cycle: without a plan everything is served on demand, and pages stay until their cache slot is wanted.
    `install`
    gives it a plan, which is followed from then on, access by access. One that the plan does not expect ends that until
    the next `begin_step`. `drain` is the end. After the first error every call that can wait raises it.

    `access`, `reservation`, `install`, `begin_step`, `house`, `flush` and `discard` belong to the training thread.
    Every
    attribute is read and changed under the lock of `Transfers`.

    Args:
        layout: pages of this rank.
        host cache: cache slots for them.
        device: what computes.
        store: where pages are read from and written to.
        observer: is told what happens, under the lock.
        timeout: seconds after which a wait is an error.
        failed: is told of the first error, once, from any thread and under the lock; it must not wait.
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
        """The plan that was installed last; changed by `install`, and where a step departs from a guess."""
        self._guessed = False
        """Whether that is for steps of which none has been seen; changed with it."""
        self._cursor: Cursor | None = None
        """Where the step is in it; None while none is followed. Changed by `install`, `begin_step`, `drain`, and by an
        access or reservation that departs from the plan."""
        self._waiting = 0
        """Reservations that wait for the window to come to them; changed by the thread that does."""
        self.reservations = 0
        """Reservations that have been made and not returned; changed by the threads that do either."""

    # What the training loop calls #

    @contextmanager
    def access(
        self, uses: Access, *, planned: bool = True, copies: Callable[[], DeviceEvent] | None = None
    ) -> Iterator[list[Content]]:
        """Hold the pages of `uses` in memory, and return their bytes: one view per use, as long as its page.

        Of an FSDP module that is GPU-resident these are tensors on the device, for what this thread's stream does with
        them.

        Args:
            uses: distinct pages that are needed at the same moment.
            planned: whether this access is part of a training step; else it is served on demand, and the plan goes on.
            copies: called at the end; returns a mark behind the copies between the pages and a device. They keep their
                cache slots until it has been passed, and of pages GPU-resident the next use comes behind it.

        Raises:
            CorruptPageError, StorageError: a page could not be read.
            StallError: a wait took longer than the time limit.
            InfinityError: the host cache has too few cache slots for what is in use at once.
        """
        interrupts.begin()  # until it is sure that what is acquired is released
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
        """Take the place of `uses` in the plan now, to hold the pages later; reservations of one thread are held in
        order.


        Args:
            uses: as for `access`.
            threaded: whether another thread holds them, whose waits are no stalls of the training thread.
            copies: as for `access`.
            ahead: whether it is for a gather that is still to come. It is held when those have been returned that were
                made before on its pages, which another thread holds and changes, and when the window has come to it:
                the training thread, which waits for it, goes no further ahead of updates than that.

        Raises:
            CorruptPageError, StorageError, StallError: something has failed before.
        """
        with self.transfers.lock:
            self.transfers.check()
            cursor = self._follow(uses) if not self._gpu_resident_pages.has(uses) else None
            access = cursor.take(uses) if cursor is not None else None
            self.reservations += 1
            states = [self._cache_slots.pages[use.page] for use in uses]
            behind = [state.returned + state.reservations for state in states] if ahead else ()
            for state in states:
                state.reservations += 1
        return Reservation(self, uses, cursor, access, behind=behind, threaded=threaded, copies=copies)

    def make_room(self, plan: Plan) -> None:
        """Have room on the drives for gradients if steps that follow a plan store them, and give it back if not.

        Raises:
            BudgetError: there is no room. StorageError: a drive failed.
        """
        self._store.expect_gradients(plan.stores_gradients)

    def install(self, plan: Plan | None, *, guessed: bool = False) -> None:
        """Follow a plan from the start of the next step on; None serves everything on demand. Raises as `reservation`.

        Args:
            guessed: whether it is for steps of which none has been seen: what departs from it ends it.
        """
        with self.transfers.lock:
            self.transfers.check()
            self._cache.drop_claims()
            self._set_plan(plan, guessed=guessed)
            self._cursor = Cursor(plan, self._cache) if plan and plan.trace else None
            if self._cursor is not None:
                self._cursor.claim_window()  # before anything is evicted, so that what is here and wanted stays
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
        """The first error, which every call raises; None while there is none."""
        return self.transfers.failure

    def wait_for_device(self, device_event: DeviceEvent, what: str) -> None:
        """Wait until the device has come to a mark. From any thread.

        Args:
            what: the device is to do, for the error.

        Raises:
            StallError: it takes longer than the time limit.
            Exception: the first error, if something has failed, before or meanwhile.
        """
        if not wait(device_event, self._timeout, lambda: self.transfers.failure is not None):
            late = StallError(f"waited {self._timeout:.0f} s for the device to {what}")
            raise self.transfers.failure or late

    def wait_for_job(self, job: Future[Any], cause: str) -> None:
        """Let the training thread wait until a job has ended, well or not, which another thread is to do.

        Args:
            cause: see `PagerObserver.stalled`.

        Raises:
            Exception: the first error, if something has failed, before or meanwhile.
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
        """Return a context in which an update waits for other ranks, for which the time limit is not.

        Of the thread that runs updates.
        """
        return self.transfers.exchanging()

    @property
    def between_steps(self) -> bool:
        """Whether a plan is followed, and a step has just ended. Of the training thread."""
        # No lock: only the training thread changes what it looks at, the cursor and its position.
        return self._cursor is not None and self._cursor.between_steps

    def begin_step(self) -> None:
        """Mark the boundary between two steps: where a step departed from the plan, the next one rejoins it.

        Raises as `reservation`.
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
        """Write every modified page and wait until none is being written. Raises as `access`."""
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
            newer = self._gpu_resident_pages.newer()
        for page, home in newer.items():
            self._send(page, home)
        with self.transfers.lock:
            self._cache.flush()

    # FSDP modules on the device #

    def gpu_resident(self, fsdp_module: int) -> bool:
        """Whether an FSDP module lives on the device. Of the training thread."""
        return fsdp_module in self._gpu_resident_pages.fsdp_modules

    def house(self, fsdp_modules: frozenset[int]) -> None:
        """Let these FSDP modules live on the device from now on, and no others; between steps.

        Raises:
            torch.OutOfMemoryError: the device has no room; those are GPU-resident then that were before and are to
            stay.
            Exception: as `access`.
        """
        gpu_resident_pages = self._gpu_resident_pages
        if fsdp_modules == gpu_resident_pages.fsdp_modules:
            return
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.reservations, "update", -1)
        for fsdp_module in gpu_resident_pages.fsdp_modules - fsdp_modules:
            for page, home in gpu_resident_pages.of(fsdp_module).items():
                if home.newer:
                    self._send(page, home)
            with self.transfers.lock:
                gpu_resident_pages.leave(fsdp_module)
        built = {
            fsdp_module: gpu_resident_pages.build(gpu_resident_pages.pages_of(fsdp_module))
            for fsdp_module in sorted(fsdp_modules - gpu_resident_pages.fsdp_modules)
        }
        for fsdp_module, memory in built.items():
            self._bring(fsdp_module, memory)

    def _bring(self, fsdp_module: int, memory: dict[int, GpuResidentPage]) -> None:
        """Let an FSDP module be GPU-resident: begin to copy there what its pages have."""
        gradients = [page for page in self._layout.pages if page.fsdp_module == fsdp_module and page.role is Role.GRAD]
        with self.transfers.lock:
            gradients = [page for page in gradients if self._cache.has_content(page.index)]
        stored = self._gpu_resident_pages.build(gradients)
        coming = memory | stored
        stream = self._device.stream("stage")
        self._device.record_event(self._device.current()).before(stream)  # behind what the memory was used for before
        pages = list(coming)
        for first in range(0, len(pages), _BROUGHT):
            together = pages[first : first + _BROUGHT]
            uses = tuple(Use(page, Mode.CONSUME if page in stored else Mode.READ) for page in together)
            with self.access(uses, planned=False, copies=partial(self._device.record_event, stream)) as contents:
                for page, content in zip(together, contents, strict=True):
                    self._device.copy(coming[page].content, bytes_of(content), stream)
                    self._device.keep(coming[page].content, stream)
        device_event = self._device.record_event(stream)
        for page, home in coming.items():
            home.used, home.newer = device_event, page in stored
        with self.transfers.lock:
            self._gpu_resident_pages.come(fsdp_module, coming)

    def _send(self, page: int, home: GpuResidentPage) -> None:
        """Begin to copy a page that is GPU-resident into a cache slot, from where it is written.

        No reservation is out.
        """
        back, uses = self._device.stream("back"), (Use(page, Mode.WRITE),)
        with interrupts.held():
            with self.transfers.lock:
                self._cache.acquire(uses, threaded=False)
            try:
                home.used.before(back)
                self._device.copy(bytes_of(self._cache_slots.content(page)), home.content, back)
                self._device.keep(home.content, back)
                home.used, home.newer = self._device.record_event(back), False
            except Exception as error:
                self.fail(error)  # before the cache slot can be written
                raise
            with self.transfers.lock:
                self._cache.release(uses, home.used)

    def discard(self, pages: Sequence[int]) -> None:
        """Drop the content of pages that nobody will read again. Raises as `access`."""
        with self.transfers.lock:
            for page in pages:
                state = self._cache_slots.pages[page]
                # Its extent may be used again at once: nothing may be on its way to or from it.
                self.transfers.wait(lambda state=state: not state.reservations, "update", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.reading, "read", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.writing, "write", page)  # type: ignore[misc]
                self._gpu_resident_pages.discard(page)
                self._cache.discard(page)

    def fail(self, error: Exception) -> None:
        """Let every call raise `error` from now on, and one that waits at once. From any thread."""
        with self.transfers.lock:
            self.transfers.fail(error)

    def leave_to_parent(self, error: Exception) -> None:
        """In a child that was forked: let every call raise `error`, whatever threads of the parent were doing."""
        self.transfers.leave_to_parent(error)

    def drain(self) -> bool:
        """Wait for all transfers and copies without raising, after a failure a moment only; it is not used afterwards.

        Returns:
            Whether the device is done with the host cache.
        """
        with self.transfers.lock:
            self._cursor = None
        return self._cache.drain()

    def census(self) -> dict[str, int]:
        """Return the number of cache slots by status: free, resident, streaming, writing."""
        with self.transfers.lock:
            return self._cache_slots.census()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the host cache by role."""
        with self.transfers.lock:
            return self._cache_slots.held_bytes()

    def in_flight(self) -> dict[str, int]:
        """Return the number of pages that are being read and written."""
        with self.transfers.lock:
            return {"read": self.transfers.reads, "write": self.transfers.writes}

    # Accesses and reservations #

    def _acquire(self, uses: Access, *, planned: bool) -> bool:
        """Acquire pages for the training thread; return whether the plan expected them."""
        with self.transfers.lock:
            self.transfers.check()
            cursor = self._follow(uses) if planned and not self._gpu_resident_pages.has(uses) else None
            if cursor is not None and not cursor.claimed:  # reservations are behind: they hold the window back
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
        behind: Sequence[int],
        cursor: Cursor | None,
        access: PlannedAccess | None,
        *,
        threaded: bool,
    ) -> list[Content]:
        """Acquire the pages of a reservation.

        Args:
            behind: of one for a gather: by use, how many reservations of its page are to have been returned, ever.
            cursor, access: its place in the plan.
        """
        with self.transfers.lock:
            for use, before in zip(uses, behind, strict=False):
                state = self._cache_slots.pages[use.page]
                left = partial(_has_returned, state, before)
                self.transfers.wait(left, "update", use.page, threaded=threaded)
            if behind and cursor is not None and access is not None:
                # The oldest access that has not ended is always inside of the window, so it comes to this one.
                reached = partial(self._has_reached, cursor, access)
                self._waiting += 1
                try:
                    self.transfers.wait(reached, "update", uses[0].page, threaded=threaded)
                finally:
                    self._waiting -= 1
            self._holder(uses).acquire_reservation(uses, threaded=threaded)
        return self._contents(uses)

    def _has_reached(self, cursor: Cursor, access: PlannedAccess) -> bool:
        """Whether the window has come to an access, or the plan in which it has its place is not followed any more."""
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
        """Return what has the pages of an access: it changes only where none of them is used, and none is reserved."""
        return self._gpu_resident_pages if self._gpu_resident_pages.has(uses) else self._cache

    def _contents(self, uses: Access) -> list[Content]:
        """Return the bytes of pages that are acquired: the lock is not needed."""
        return [*self._holder(uses).contents(uses)]

    def _end(self, uses: Access, cursor: Cursor | None, access: PlannedAccess | None) -> None:
        """Move the window on behind an access that has ended. Off the plan, evict only what is dead.

        Args:
            cursor: in what its place was taken; if that is not followed any more, the access counts as off the plan.
            access: the access of the plan.
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
        """Return the cursor if it expects `uses` next; else depart from the plan."""
        cursor = self._cursor
        if cursor is not None and cursor.expected != uses:
            self._depart(f"expected {self._describe(cursor.expected)}, got {self._describe(uses)}")
        return self._cursor

    def _depart(self, detail: str) -> None:
        """Follow the plan no longer, until the next step begins; one that was a guess never again."""
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
