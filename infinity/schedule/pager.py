"""The pager: executes a plan. The only code that changes where a page is.

It is made of parts, each with its own state, all under one lock (`transfers` says which threads take it):

    Pager --> Cursor --> Cache --> Frames       which page has which frame, and what keeps it there
                           |
                           +-----> Transfers    what is in flight, what waits for it, the first error
      |                    |
      |                    +-----> Copies       what a device copies, and the thread that waits for it
      +--> Homes                                pages of units that live on the device

`Cache` acquires, releases, prefetches, writes back and evicts; `Cursor` says what the plan wants when; `Pager` is what
others call: an access of the training thread, a lease for another one, and what happens between steps.

[Note: units at home] A unit can have all of its pages on the device (`house`). An access of such pages is no part of a
plan, has no frames, and gets their bytes there; everything else about accesses and leases is the same. Only when what
is modified is to be in the store (`flush`), or a unit is no longer at home, are pages copied into frames, one after the
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
from infinity.memory.arena import ArenaPart
from infinity.memory.device import Device, Mark, wait
from infinity.schedule.cache import Cache
from infinity.schedule.cursor import Cursor, PlannedAccess
from infinity.schedule.frames import Frames, PageState
from infinity.schedule.homes import Home, Homes
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import PageReaderWriter, PagerObserver, Transfers

_LOOK_SECONDS = 0.5
"""How often a thread that waits for another one's job looks whether all has failed."""
_BROUGHT = 4
"""Pages of a unit that comes home that are read at once; every arena has so many frames."""


class Lease:
    """Pages that are held later, for the length of a `with` block; their place in the plan is taken now.

    An update has leases, and so has what copies weights to a device ahead of their gather. Life cycle: made by
    `Pager.lease`, on the training thread, which never waits there; held between `__enter__` (or `hold_at_once`) and
    `__exit__`, each kind by a thread of its own or, where updates have none, by the training thread, one lease after
    the other in the order in which they were made; then returned. From making to return the training thread waits
    before it uses one of the pages. If `__enter__` raises, the lease is never returned: from then on every wait raises
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
        copies: Callable[[], Mark] | None,
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
        return self._pager._acquire_lease(self.uses, self._behind, self._cursor, self._access, threaded=self._threaded)

    def __exit__(self, *exception: object) -> None:
        """Return the pages."""
        mark = self._copies() if self._copies else None
        self._pager._release_lease(self.uses, self._cursor, self._access, mark)


class Pager:
    """Brings pages into frames ahead of their use and writes modified ones behind it.

    Life cycle: without a plan everything is served on demand, and pages stay until their frame is wanted. `install`
    gives it a plan, which is followed from then on, access by access. One that the plan does not expect ends that until
    the next `begin_step`. `drain` is the end. After the first error every call that can wait raises it.

    `access`, `lease`, `install`, `begin_step`, `house`, `flush` and `discard` belong to the training thread. Every
    attribute is read and changed under the lock of `Transfers`.

    Args:
        layout: pages of this rank.
        arena: frames for them.
        device: what computes.
        store: where pages are read from and written to.
        observer: is told what happens, under the lock.
        timeout: seconds after which a wait is an error.
        failed: is told of the first error, once, from any thread and under the lock; it must not wait.
    """

    def __init__(
        self,
        layout: Layout,
        arena: ArenaPart,
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
        self._frames = Frames(layout.pages, arena)
        self._cache = Cache(
            self._frames, self.transfers, store, observer, timeout=timeout, enter_thread=device.enter_thread
        )
        self._homes = Homes(layout, device, observer)
        self._plan: Plan | None = None
        """The plan that was installed last; changed by `install`, and where a step departs from a guess."""
        self._guessed = False
        """Whether that is for steps of which none has been seen; changed with it."""
        self._cursor: Cursor | None = None
        """Where the step is in it; None while none is followed. Changed by `install`, `begin_step`, `drain`, and by an
        access or lease that departs from the plan."""
        self._waiting = 0
        """Leases that wait for the window to come to them; changed by the thread that does."""
        self.leases = 0
        """Leases that have been made and not returned; changed by the threads that do either."""

    # What the training loop calls #

    @contextmanager
    def access(
        self, uses: Access, *, planned: bool = True, copies: Callable[[], Mark] | None = None
    ) -> Iterator[list[Content]]:
        """Hold the pages of `uses` in memory, and return their bytes: one view per use, as long as its page.

        Of a unit that is at home these are tensors on the device, for what this thread's stream does with them.

        Args:
            uses: distinct pages that are needed at the same moment.
            planned: whether this access is part of a training step; else it is served on demand, and the plan goes on.
            copies: called at the end; returns a mark behind the copies between the pages and a device. They keep their
                frames until it has been passed, and of pages at home the next use comes behind it.

        Raises:
            CorruptPageError, StorageError: a page could not be read.
            StallError: a wait took longer than the time limit.
            InfinityError: the arena has too few frames for what is in use at once.
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
            self._release(uses, planned=planned, mark=copies() if copies else None)

    def lease(
        self, uses: Access, *, threaded: bool, copies: Callable[[], Mark] | None = None, ahead: bool = False
    ) -> Lease:
        """Take the place of `uses` in the plan now, to hold the pages later; leases of one thread are held in order.


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
            cursor = self._follow(uses) if not self._homes.has(uses) else None
            access = cursor.take(uses) if cursor is not None else None
            self.leases += 1
            states = [self._frames.pages[use.page] for use in uses]
            behind = [state.returned + state.leases for state in states] if ahead else ()
            for state in states:
                state.leases += 1
        return Lease(self, uses, cursor, access, behind=behind, threaded=threaded, copies=copies)

    def make_room(self, plan: Plan) -> None:
        """Have room on the drives for gradients if steps that follow a plan store them, and give it back if not.

        Raises:
            BudgetError: there is no room. StorageError: a drive failed.
        """
        self._store.expect_gradients(plan.stores_gradients)

    def install(self, plan: Plan | None, *, guessed: bool = False) -> None:
        """Follow a plan from the start of the next step on; None serves everything on demand. Raises as `lease`.

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
        for page, state in enumerate(self._frames.pages):
            state.resident = page in resident

    @property
    def failure(self) -> Exception | None:
        """The first error, which every call raises; None while there is none."""
        return self.transfers.failure

    def wait_for_device(self, mark: Mark, what: str) -> None:
        """Wait until the device has come to a mark. From any thread.

        Args:
            what: the device is to do, for the error.

        Raises:
            StallError: it takes longer than the time limit.
            Exception: the first error, if something has failed, before or meanwhile.
        """
        if not wait(mark, self._timeout, lambda: self.transfers.failure is not None):
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

        Raises as `lease`.
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
            self.transfers.wait(lambda: not self.leases, "update", -1)
            newer = self._homes.newer()
        for page, home in newer.items():
            self._send(page, home)
        with self.transfers.lock:
            self._cache.flush()

    # Units on the device #

    def at_home(self, unit: int) -> bool:
        """Whether a unit lives on the device. Of the training thread."""
        return unit in self._homes.units

    def house(self, units: frozenset[int]) -> None:
        """Let these units live on the device from now on, and no others; between steps.

        Raises:
            torch.OutOfMemoryError: the device has no room; those are at home then that were before and are to stay.
            Exception: as `access`.
        """
        homes = self._homes
        if units == homes.units:
            return
        with self.transfers.lock:
            self.transfers.wait(lambda: not self.leases, "update", -1)
        for unit in homes.units - units:
            for page, home in homes.of(unit).items():
                if home.newer:
                    self._send(page, home)
            with self.transfers.lock:
                homes.leave(unit)
        built = {unit: homes.build(homes.pages_of(unit)) for unit in sorted(units - homes.units)}
        for unit, memory in built.items():
            self._bring(unit, memory)

    def _bring(self, unit: int, memory: dict[int, Home]) -> None:
        """Let a unit be at home: begin to copy there what its pages have."""
        gradients = [page for page in self._layout.pages if page.unit == unit and page.role is Role.GRAD]
        with self.transfers.lock:
            gradients = [page for page in gradients if self._cache.has_content(page.index)]
        stored = self._homes.build(gradients)
        coming = memory | stored
        stream = self._device.stream("stage")
        self._device.mark(self._device.current()).before(stream)  # behind what the memory was used for before
        pages = list(coming)
        for first in range(0, len(pages), _BROUGHT):
            together = pages[first : first + _BROUGHT]
            uses = tuple(Use(page, Mode.CONSUME if page in stored else Mode.READ) for page in together)
            with self.access(uses, planned=False, copies=partial(self._device.mark, stream)) as contents:
                for page, content in zip(together, contents, strict=True):
                    self._device.copy(coming[page].content, bytes_of(content), stream)
                    self._device.keep(coming[page].content, stream)
        mark = self._device.mark(stream)
        for page, home in coming.items():
            home.used, home.newer = mark, page in stored
        with self.transfers.lock:
            self._homes.come(unit, coming)

    def _send(self, page: int, home: Home) -> None:
        """Begin to copy a page that is at home into a frame, from where it is written. No lease is out."""
        back, uses = self._device.stream("back"), (Use(page, Mode.WRITE),)
        with interrupts.held():
            with self.transfers.lock:
                self._cache.acquire(uses, threaded=False)
            try:
                home.used.before(back)
                self._device.copy(bytes_of(self._frames.content(page)), home.content, back)
                self._device.keep(home.content, back)
                home.used, home.newer = self._device.mark(back), False
            except Exception as error:
                self.fail(error)  # before the frame can be written
                raise
            with self.transfers.lock:
                self._cache.release(uses, home.used)

    def discard(self, pages: Sequence[int]) -> None:
        """Drop the content of pages that nobody will read again. Raises as `access`."""
        with self.transfers.lock:
            for page in pages:
                state = self._frames.pages[page]
                # Its extent may be used again at once: nothing may be on its way to or from it.
                self.transfers.wait(lambda state=state: not state.leases, "update", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.reading, "read", page)  # type: ignore[misc]
                self.transfers.wait(lambda state=state: not state.writing, "write", page)  # type: ignore[misc]
                self._homes.discard(page)
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
            Whether the device is done with the arena.
        """
        with self.transfers.lock:
            self._cursor = None
        return self._cache.drain()

    def census(self) -> dict[str, int]:
        """Return the number of frames by status: free, resident, streaming, writing."""
        with self.transfers.lock:
            return self._frames.census()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the arena by role."""
        with self.transfers.lock:
            return self._frames.held_bytes()

    def in_flight(self) -> dict[str, int]:
        """Return the number of pages that are being read and written."""
        with self.transfers.lock:
            return {"read": self.transfers.reads, "write": self.transfers.writes}

    # Accesses and leases #

    def _acquire(self, uses: Access, *, planned: bool) -> bool:
        """Acquire pages for the training thread; return whether the plan expected them."""
        with self.transfers.lock:
            self.transfers.check()
            cursor = self._follow(uses) if planned and not self._homes.has(uses) else None
            if cursor is not None and not cursor.claimed:  # leases are behind: they hold the window back
                self.transfers.wait(lambda: cursor.claimed, "update", uses[0].page)
            for use in uses:
                state = self._frames.pages[use.page]
                if state.leases:
                    self.transfers.wait(lambda state=state: not state.leases, "update", use.page)  # type: ignore[misc]
            self._holder(uses).acquire(uses, threaded=False)
            return cursor is not None

    def _release(self, uses: Access, *, planned: bool, mark: Mark | None) -> None:
        with self.transfers.lock:
            self._holder(uses).release(uses, mark)
            cursor = self._cursor if planned else None
            self._end(uses, cursor, cursor.take(uses) if cursor is not None else None)
            if self._waiting:
                self.transfers.lock.notify_all()

    def _acquire_lease(
        self,
        uses: Access,
        behind: Sequence[int],
        cursor: Cursor | None,
        access: PlannedAccess | None,
        *,
        threaded: bool,
    ) -> list[Content]:
        """Acquire the pages of a lease.

        Args:
            behind: of one for a gather: by use, how many leases of its page are to have been returned, ever.
            cursor, access: its place in the plan.
        """
        with self.transfers.lock:
            for use, before in zip(uses, behind, strict=False):
                state = self._frames.pages[use.page]
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
            self._holder(uses).acquire_lease(uses, threaded=threaded)
        return self._contents(uses)

    def _has_reached(self, cursor: Cursor, access: PlannedAccess) -> bool:
        """Whether the window has come to an access, or the plan in which it has its place is not followed any more."""
        return cursor is not self._cursor or cursor.reaches(access)

    def _acquire_at_once(self, uses: Access, *, threaded: bool) -> list[Content] | None:
        with self.transfers.lock:
            holder = self._holder(uses)
            if not holder.can_acquire(uses):
                return None
            holder.acquire_lease(uses, threaded=threaded)
        return self._contents(uses)

    def _release_lease(
        self, uses: Access, cursor: Cursor | None, access: PlannedAccess | None, mark: Mark | None
    ) -> None:
        with self.transfers.lock:
            self.leases -= 1
            for use in uses:
                state = self._frames.pages[use.page]
                state.leases -= 1
                state.returned += 1
            self._holder(uses).release_lease(uses, mark)
            self._end(uses, cursor, access)
            self.transfers.lock.notify_all()

    def _holder(self, uses: Access) -> Cache | Homes:
        """Return what has the pages of an access: it changes only where none of them is used, and none is leased."""
        return self._homes if self._homes.has(uses) else self._cache

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


def _has_returned(state: PageState, leases: int) -> bool:
    return state.returned >= leases
