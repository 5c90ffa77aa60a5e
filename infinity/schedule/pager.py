"""The pager: executes a plan. The only code that changes where a page is.

[Note: states of a page] A page has at most one frame. With a frame it is READING (a fetch is under way), or
its content is valid; it may be dirty (newer than the store) and it may be being written at the same time.
Without a frame its content is in the store. Three counters keep a frame in place: pins (in use now), claims
(uses inside the plan's window; the last one of a page that the plan keeps is left for the next) and residency.
A frame is given up when all three are gone: at once if the content is clean or dead, after the write if it is dirty.

[Note: threads] `access`, `lease`, `install` and `flush` belong to the training thread. Completions arrive on the
store's threads and only touch state under `_changed`'s lock. Content is never copied under the lock.

[Note: leases] A lease takes its place in the plan when it is made, and never waits; another thread holds the pages
later, one lease after the other. The window begins at the oldest access that has not ended, of either thread; claims of
those behind it that have ended are given up when it comes to them. So the training thread goes ahead of the other one
as far as the window reaches, and what is moved does not depend on how fast either is. Leased pages are waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Protocol

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import InfinityError, StallError
from infinity.memory.arena import Arena
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode, Use

_LAST_SECONDS = 5.0
_WAITS = {
    "read": "a page to be read",
    "write": "a page to be written",
    "arena": "a free frame of the arena",
    "update": "the update of a page",
}


class PageReaderWriter(Protocol):
    """What the pager needs of a store."""

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Fetch and verify a page, then call `done` from any thread."""

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        """Store a page, then call `done` from any thread."""

    def discard(self, page: int) -> None:
        """Forget the stored version of a page."""

    def has(self, page: int) -> bool:
        """Whether a version is stored."""

    def oldest_request(self) -> str:
        """Describe the request that has been in flight longest."""


class DeviceEvent(Protocol):
    """A point on a device stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class PagerObserver(Protocol):
    """Who is told what the pager did (telemetry)."""

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """The training thread waited.

        Args:
            cause: ``read``, ``write``, ``arena`` or ``update``.
            page: what it needed, or -1.
        """

    def fetched(self, result: str) -> None:
        """A page was needed; `result` is ``hit``, ``late`` or ``miss``."""

    def moving(self, seconds: float) -> None:
        """Pages have been on their way for so much longer; from any thread, one at a time."""

    def spared(self, nbytes: int) -> None:
        """A planned read was not needed: the page comes back while it is still being written."""

    def diverged(self, detail: str) -> None:
        """The step departed from the plan's trace."""

    def gave_up(self, op: str, error: Exception) -> None:
        """A transfer (`op` is ``read`` or ``write``) was waited for longer than the time limit; from any thread."""


@dataclass(slots=True)
class _Slot:
    """Where one page is."""

    frame: int = -1
    reading: bool = False
    writing: bool = False
    dirty: bool = False
    pins: int = 0
    claims: int = 0
    leases: int = 0


@dataclass(eq=False)
class _Taken:
    """An access of a plan whose place has been taken, by the training thread or by a lease."""

    position: int
    uses: Access
    ended: bool = False


@dataclass
class _Following:
    """Progress along a plan, in positions that are not wrapped.

    `position` is the next access, `cursor` the last one claimed; `taken` has, in order, the accesses before `position`
    from the first one on that has not ended.
    """

    plan: Plan
    position: int = 0
    cursor: int = -1
    taken: deque[_Taken] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)

    @property
    def expected(self) -> Access:
        return self.plan.access(self.position)

    @property
    def reach(self) -> int:
        return self.plan.reach_at(self.taken[0].position if self.taken else self.position)

    def take(self) -> _Taken:
        """Take the place of the next access."""
        self.taken.append(_Taken(self.position, self.expected))
        self.position += 1
        return self.taken[-1]


class Lease:
    """Pages that are held on another thread, once they are there, for the length of a `with` block."""

    def __init__(
        self, pager: Pager, uses: Access, following: _Following | None, taken: _Taken | None, *, beside: bool
    ) -> None:
        self.uses, self.following, self.taken, self.beside = uses, following, taken, beside
        self._pager = pager

    def hold_at_once(self) -> list[memoryview] | None:
        """Hold the pages, to be let go by `__exit__`, if there is nothing to wait for; else return None."""
        return self._pager._hold_at_once(self)

    def __enter__(self) -> list[memoryview]:
        """Wait for the pages; return them as `Pager.access` does. Raises what that raises."""
        return self._pager._hold(self)

    def __exit__(self, *exception: object) -> None:
        """Let go of the pages."""
        self._pager._give_back(self)


class Pager:
    """Brings pages into frames ahead of their use and writes modified ones behind it.

    `failed` is told, from any thread, of the first error; from then on every call raises it.
    """

    def __init__(
        self,
        layout: Layout,
        arena: Arena,
        store: PageReaderWriter,
        observer: PagerObserver,
        *,
        timeout: float,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._layout, self._arena, self._store, self._observer = layout, arena, store, observer
        self._timeout, self._failed = timeout, failed
        self._slots = [_Slot() for _ in layout.pages]
        self._free = list(range(arena.frames))[::-1]
        self._owner = [-1] * arena.frames
        self._resident: frozenset[int] = frozenset()
        self._following: _Following | None = None
        self._installed: Plan | None = None
        self._changed = Condition()
        self._failure: Exception | None = None
        self._leaving: deque[tuple[DeviceEvent, Access]] = deque()
        self._reads = 0
        self._writes = 0
        self._moving_since = 0.0
        self._leases = 0
        self._held_leases = 0
        self._returned = 0  # transfers and held leases that have ended: each may leave a frame
        self._awaited = 0  # frames that somebody waits for: they come before those for fetches

    # What the training loop calls #

    @contextmanager
    def access(
        self, uses: Access, *, planned: bool = True, leaves: Callable[[], DeviceEvent | None] | None = None
    ) -> Iterator[list[memoryview]]:
        """Hold the pages of `uses` in memory, and return their bytes.

        Args:
            uses: distinct pages that are needed at the same moment.
            planned: whether this access is part of a training step (else it is served beside the plan).
            leaves: called at the end; an event that it returns keeps the frames until a device copy has left them.

        Raises:
            CorruptPageError, StorageError: a page could not be brought in.
            StallError: a transfer took longer than the time limit.
        """
        planned = self._begin(uses, planned)
        try:
            yield [self._content(use.page) for use in uses]
        finally:
            self._end(uses, planned, leaves() if leaves else None)

    def lease(self, uses: Access, *, beside: bool) -> Lease:
        """Take the place of `uses` in the plan now, to hold the pages later; leases are used in order.

        Args:
            uses: as for `access`.
            beside: whether another thread holds them, whose waits are no stalls of the training thread.

        Raises:
            StorageError, StallError: something has failed before.
        """
        with self._changed:
            self._check()
            following = self._place(uses)
            taken = following.take() if following is not None else None
            self._leases += 1
            for use in uses:
                self._slots[use.page].leases += 1
        return Lease(self, uses, following, taken, beside=beside)

    def _hold(self, lease: Lease) -> list[memoryview]:
        with self._changed:
            self._bring_in(lease.uses, beside=lease.beside)
            self._held_leases += 1
        return [self._content(use.page) for use in lease.uses]

    def _hold_at_once(self, lease: Lease) -> list[memoryview] | None:
        with self._changed:
            slots = [(self._slots[use.page], use.mode) for use in lease.uses]
            if any(slot.frame < 0 or slot.reading or (slot.writing and mode.modifies) for slot, mode in slots):
                return None
            return self._hold(lease)

    def _give_back(self, lease: Lease) -> None:
        with self._changed:
            self._leases -= 1
            self._held_leases -= 1
            self._returned += 1
            for use in lease.uses:
                slot = self._slots[use.page]
                slot.leases -= 1
                slot.pins -= 1
                self._mark(use)
            self._ended(lease.uses, lease.taken if lease.following is self._following else None)
            self._changed.notify_all()

    def install(self, plan: Plan | None) -> None:
        """Follow a plan from the start of the next step on; None serves everything on demand."""
        with self._changed:
            self._check()
            self._drop_claims()
            self._installed = plan
            self._resident = plan.resident if plan else frozenset()
            self._following = _Following(plan) if plan and plan.trace else None
            self._claim_window()  # first, so that what is here and wanted stays
            for page in self._holders():
                self._settle(page)
            self._pump()

    @property
    def between_steps(self) -> bool:
        """Whether a plan is followed, and a step has just ended."""
        return self._following is not None and self._following.plan.ends_step(self._following.position)

    def begin_step(self) -> None:
        """Mark the boundary between two steps; a step that departed from the plan rejoins it here."""
        with self._changed:
            self._check()
            following = self._following
            if self._installed is None or not self._installed.trace:
                return
            if following is not None and following.plan.ends_step(following.position):
                return
            if following is not None:
                self._diverge("the step ended early")
            first = len(self._installed.prefix)
            self._following = _Following(self._installed, position=first, cursor=first - 1)
            self._claim_window()

    def flush(self) -> None:
        """Write every modified page and wait until nothing is in flight."""
        with self._changed:
            self._wait(lambda: not self._leases, "update", -1)
            while self._let_go(wait=True):
                pass
            while True:
                self._check()
                for page in self._holders():
                    slot = self._slots[page]
                    if slot.dirty and not slot.writing:
                        self._start_write(page)
                if not self._writes:
                    return
                self._wait(lambda: not self._writes, "write", -1)

    def discard(self, pages: Sequence[int]) -> None:
        """Drop the content of pages that nobody will read again."""
        with self._changed:
            for page in pages:
                slot = self._slots[page]
                # Its extent may be used again at once: nothing may be on its way to or from it.
                self._wait(lambda slot=slot: not slot.leases, "update", page)  # type: ignore[misc]
                self._wait(lambda slot=slot: not (slot.writing or slot.reading), "write", page)  # type: ignore[misc]
                slot.dirty = False
                if slot.frame >= 0 and not slot.pins:
                    self._release_frame(page)
                self._store.discard(page)

    def fail(self, error: Exception) -> None:
        """Let every call raise `error` from now on, and one that waits at once. From any thread."""
        with self._changed:
            self._note(error)
            self._changed.notify_all()

    def leave_to_parent(self, error: Exception) -> None:
        """In a child that was forked: let every call raise `error`, whatever threads of the parent were doing."""
        self._changed = Condition()  # that of the parent may be held for ever, by a thread that is not here
        self._failure = error

    def drain(self) -> None:
        """Wait for all transfers without raising, after a failure a moment only; the pager is not used afterwards."""
        with self._changed:
            timeout = self._timeout if self._failure is None else min(self._timeout, _LAST_SECONDS)
            self._drop_claims()
            self._following = None
            self._leaving.clear()
            self._changed.wait_for(lambda: not self._writes and not self._reads, timeout)

    def census(self) -> dict[str, int]:
        """Return the number of frames by status: free, resident, streaming, writing."""
        with self._changed:
            counts = {"free": len(self._free), "resident": 0, "streaming": 0, "writing": 0}
            for page in self._holders():
                slot = self._slots[page]
                status = "writing" if slot.writing else "resident" if page in self._resident else "streaming"
                counts[status] += 1
            return counts

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of pages in the arena by role."""
        with self._changed:
            held = {role.value: 0 for role in Role}
            for page in self._holders():
                held[self._layout.pages[page].role.value] += self._layout.pages[page].nbytes
            return held

    def in_flight(self) -> dict[str, int]:
        """Return the number of pages that are being read and written."""
        with self._changed:
            return {"read": self._reads, "write": self._writes}

    # One access #

    def _begin(self, uses: Access, planned: bool) -> bool:
        """Hold pages for the training thread; return whether the plan expected them."""
        with self._changed:
            self._check()
            self._let_go(wait=False)
            following = self._place(uses) if planned else None
            if following is not None:
                self._wait(lambda: following.cursor >= following.position, "update", uses[0].page)
            for use in uses:
                slot = self._slots[use.page]
                self._wait(lambda slot=slot: not slot.leases, "update", use.page)  # type: ignore[misc]
            self._bring_in(uses, beside=False)
            return following is not None

    def _place(self, uses: Access) -> _Following | None:
        """Return what is being followed if it expects `uses` next; else give it up."""
        following = self._following
        if following is not None and following.expected != uses:
            self._diverge(self._describe(following.expected, uses))
        return self._following

    def _bring_in(self, uses: Access, *, beside: bool) -> None:
        """Pin pages in frames; wait until they are read, and those to be modified are not on their way to the store."""
        self._check()
        for use in uses:
            self._slots[use.page].pins += 1
        try:
            for use in uses:
                self._bring(use, beside=beside)
            for use in uses:
                slot = self._slots[use.page]
                self._wait(lambda slot=slot: not slot.reading, "read", use.page, beside=beside)  # type: ignore[misc]
                if use.mode.modifies:
                    self._wait(lambda slot=slot: not slot.writing, "write", use.page, beside=beside)  # type: ignore[misc]
        except BaseException:
            for use in uses:
                self._slots[use.page].pins -= 1
            raise

    def _bring(self, use: Use, *, beside: bool) -> None:
        slot = self._slots[use.page]
        fetch = slot.frame < 0 and use.mode.fetches and self._store.has(use.page)
        if use.mode.fetches:
            self._observer.fetched("miss" if fetch else "late" if slot.reading else "hit")
        if slot.frame < 0:
            self._await_frame(use.page, beside=beside)
        if slot.frame < 0:  # while waiting, a completion may have fetched this very page
            self._occupy(use.page, self._free.pop())
            if fetch:
                self._start_read(use.page)

    def _end(self, uses: Access, planned: bool, event: DeviceEvent | None) -> None:
        with self._changed:
            if event is not None:
                self._leaving.append((event, uses))
            for use in uses:
                self._slots[use.page].pins -= event is None
                self._mark(use)
            following = self._following
            self._ended(uses, following.take() if planned and following is not None else None)

    def _ended(self, uses: Access, taken: _Taken | None) -> None:
        """Give up what nobody keeps, if the plan has come so far; without one, pages stay until frames are wanted."""
        following = self._following
        if taken is None or following is None:
            for use in uses:
                if use.mode is Mode.CONSUME:
                    self._settle(use.page, dead=True)
        else:
            taken.ended = True
            while following.taken and following.taken[0].ended:
                self._leave(following, following.taken.popleft())
        self._pump()

    def _leave(self, following: _Following, taken: _Taken) -> None:
        """Let the window go on behind an access."""
        for use in taken.uses:
            slot = self._slots[use.page]
            slot.claims = max(0, slot.claims - (not following.plan.keeps(taken.position, use.page)))
        self._claim_window()
        for use in taken.uses:
            self._settle(use.page, dead=use.mode is Mode.CONSUME)

    def _mark(self, use: Use) -> None:
        """Note what a use that has ended means for the content of its page."""
        if use.mode.modifies:
            self._slots[use.page].dirty = True
        elif use.mode is Mode.CONSUME:
            self._slots[use.page].dirty = False
            self._store.discard(use.page)

    def _let_go(self, *, wait: bool) -> bool:
        """Unpin frames that device copies have left, oldest first; return whether there was one."""
        found = False
        while self._leaving and (self._leaving[0][0].query() or (wait and not found)):
            event, uses = self._leaving.popleft()
            event.synchronize()
            found = True
            for use in uses:
                self._slots[use.page].pins -= 1
                if self._installed is not None:
                    self._settle(use.page)
        return found

    def _content(self, page: int) -> memoryview:
        return self._arena.view(self._slots[page].frame, self._layout.pages[page].nbytes)

    # Claims: what the plan's window wants in memory #

    def _claim_window(self) -> None:
        following = self._following
        if following is None:
            return
        while following.cursor < following.reach:
            following.cursor += 1
            for use in following.plan.access(following.cursor):
                slot = self._slots[use.page]
                slot.claims += not following.plan.has_kept(following.cursor, use.page)  # else its last use left its own
                if slot.claims == 1 and use.mode.fetches:
                    if slot.frame < 0:
                        following.waiting.append(use.page)
                    elif slot.writing:
                        self._observer.spared(self._layout.pages[use.page].nbytes)
        self._pump()

    def _pump(self) -> None:
        """Start the fetches that the window wants, as far as there are frames."""
        following = self._following
        while following is not None and following.waiting:
            page = following.waiting[0]
            slot = self._slots[page]
            if slot.frame < 0 and slot.claims and self._store.has(page):
                while len(self._free) <= self._awaited:
                    if not self._evict_clean():
                        return
                self._occupy(page, self._free.pop())
                self._start_read(page)
            following.waiting.popleft()

    def _drop_claims(self) -> None:
        for slot in self._slots:
            slot.claims = 0
        if self._following is not None:
            self._following.waiting.clear()

    def _diverge(self, detail: str) -> None:
        self._drop_claims()
        self._following = None
        self._observer.diverged(detail)

    def _describe(self, expected: Access, found: Access) -> str:
        def names(access: Access) -> str:
            return " + ".join(f"{use.mode.value} {self._layout.page_name(use.page)}" for use in access)

        return f"expected {names(expected)}, got {names(found)}"

    # Frames #

    def _holders(self) -> list[int]:
        return [page for page in self._owner if page >= 0]

    def _settle(self, page: int, *, dead: bool = False) -> None:
        """Give up the frame of a page that nobody keeps, writing it first if it is dirty."""
        slot = self._slots[page]
        if slot.frame < 0 or slot.pins or slot.reading or slot.writing:
            return
        if not dead and (slot.claims or page in self._resident):
            return
        if slot.dirty:
            self._start_write(page)
        elif not (dead and slot.claims):
            self._release_frame(page)

    def _occupy(self, page: int, frame: int) -> None:
        self._slots[page].frame = frame
        self._owner[frame] = page

    def _release_frame(self, page: int) -> None:
        slot = self._slots[page]
        self._owner[slot.frame] = -1
        self._free.append(slot.frame)
        slot.frame = -1
        self._changed.notify_all()

    def _evict_clean(self) -> bool:
        """Free the frame of some page that is clean and that nobody keeps."""
        for page in self._holders():
            slot = self._slots[page]
            if not (slot.pins or slot.claims or slot.dirty or slot.reading or slot.writing) and (
                page not in self._resident
            ):
                self._release_frame(page)
                return True
        return False

    def _await_frame(self, page: int, *, beside: bool) -> None:
        """Wait until a frame is free (or the page has one), writing and, off the plan, taking from later pages."""
        slot = self._slots[page]
        while slot.frame < 0 and not self._free and not self._evict_clean():
            self._check()
            if self._let_go(wait=not self._writes and not self._reads):
                continue
            if not self._writes:
                self._write_some()
            idle = not (self._writes or self._held_leases)  # frames that come back by themselves are waited for
            if idle and not self._steal() and not self._reads:
                raise InfinityError(
                    f"all {self._arena.frames} frames of the arena are in use at once; set memory.host_bytes higher"
                )
            if not self._free:
                self._awaited += 1
                try:
                    self._wait(
                        lambda before=self._returned: bool(self._free) or self._returned != before,  # type: ignore[misc]
                        "arena",
                        page,
                        beside=beside,
                    )
                finally:
                    self._awaited -= 1

    def _write_some(self) -> None:
        """Start writing a few dirty pages that nobody keeps."""
        started = 0
        for page in self._holders():
            slot = self._slots[page]
            if slot.dirty and not (slot.pins or slot.claims or slot.writing) and page not in self._resident:
                self._start_write(page)
                started += 1
                if started == 4:
                    return

    def _steal(self) -> bool:
        """Take the frame of a page that the plan wants later, or that it wants to keep."""
        for kept in (False, True):
            for page in reversed(self._holders()):
                slot = self._slots[page]
                if slot.pins or slot.reading or slot.writing or (page in self._resident) is not kept:
                    continue
                if slot.dirty:
                    self._start_write(page)
                else:
                    self._release_frame(page)
                return True
        return False

    # Transfers #

    def _start_read(self, page: int) -> None:
        slot = self._slots[page]
        slot.reading, slot.dirty = True, False
        self._book_moving()
        self._reads += 1
        memory = self._content(page)

        def done(error: Exception | None) -> None:
            with self._changed:
                slot.reading = False
                self._book_moving()
                self._reads -= 1
                self._returned += 1
                self._note(error)
                self._settle(page)
                self._changed.notify_all()

        self._store.read(page, memory, done)

    def _start_write(self, page: int) -> None:
        slot = self._slots[page]
        slot.writing, slot.dirty = True, False
        self._book_moving()
        self._writes += 1
        memory = self._content(page)

        def done(error: Exception | None) -> None:
            with self._changed:
                slot.writing = False
                self._book_moving()
                self._writes -= 1
                self._returned += 1
                if error is not None:
                    slot.dirty = True  # the frame still has the only copy
                    self._note(error)
                elif self._installed is not None:  # without a plan, pages stay until their frame is wanted
                    self._settle(page)
                self._pump()
                self._changed.notify_all()

        self._store.write(page, memory, done)

    def _book_moving(self) -> None:
        """Report for how long pages have been on their way, before their number changes."""
        now = time.perf_counter()
        if self._reads or self._writes:
            self._observer.moving(now - self._moving_since)
        self._moving_since = now

    def _note(self, error: Exception | None) -> None:
        if error is not None and self._failure is None:
            self._failure = error
            self._failed(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, ready: Callable[[], bool], cause: str, page: int, *, beside: bool = False) -> None:
        if ready():
            return
        started = time.perf_counter()
        finished = self._changed.wait_for(lambda: ready() or self._failure is not None, self._timeout)
        if not beside:
            self._observer.stalled(cause, page, time.perf_counter() - started)
        self._check()
        if not finished:
            error = StallError(f"waited {self._timeout:.0f} s for {_WAITS[cause]}; {self._store.oldest_request()}")
            if self._reads or self._writes:
                self._observer.gave_up("read" if cause == "read" or not self._writes else "write", error)
            self._note(error)
            self._check()
