"""Tests of the pager over a slow store: every use sees the newest content, regardless of the order of transfers."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from threading import Event, Lock

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import InfinityError, StallError, StorageError
from infinity.memory.device import open_device
from infinity.memory.host_cache import HostCache
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.planner import Plan, least_cache_slots
from infinity.schedule.trace import Access, Mode, Use
from infinity.schedule.transfers import Transfers
from infinity.schedule.update_schedule import UpdateSchedule, expand
from support.layouts import layouts, steps, transformer, transformer_step, update_schedules
from support.plans import make_plan

GARBAGE = b"\xee" * 8
NO_SHRINK = tuple(phase for phase in Phase if phase not in (Phase.shrink, Phase.explain))  # timing differs each time
Done = Callable[[Exception | None], None]


class SlowStore:
    """Store of eight bytes per page. A read leaves garbage until it ends; a write takes its bytes when it ends."""

    def __init__(self, seed: int = 0, seconds: float = 0.0005) -> None:
        self.content: dict[int, bytes] = {}
        self.wrong: list[str] = []
        self.read_pages: list[int] = []
        self.written_pages: list[int] = []
        self.failing: Exception | None = None
        self.gate = Event()
        self.gate.set()
        self._random, self._seconds, self._lock = random.Random(seed), seconds, Lock()
        self._pool = ThreadPoolExecutor(4)

    def read(self, page: int, memory: memoryview, done: Done) -> None:
        memory[:8] = GARBAGE
        self.read_pages.append(page)
        content = self.content[page]
        self._later(lambda: self._end_read(page, content, memory, done))

    def write(self, page: int, memory: memoryview, done: Done) -> None:
        before = bytes(memory[:8])
        self.written_pages.append(page)
        self._later(lambda: self._end_write(page, memory, before, done))

    def discard(self, page: int) -> None:
        with self._lock:
            self.content.pop(page, None)

    def has(self, page: int) -> bool:
        return page in self.content

    def expect_gradients(self, stored: bool) -> None:
        """Accept any plan, because the store has no size limit."""

    def oldest_request(self) -> tuple[float, str] | None:
        return 0.0, "the request of the test"

    def _later(self, action: Callable[[], None]) -> None:
        delay = self._random.uniform(0, self._seconds)

        def run() -> None:
            self.gate.wait(300)
            time.sleep(delay)
            action()

        self._pool.submit(run)

    def _end_read(self, page: int, content: bytes, memory: memoryview, done: Done) -> None:
        if self.content.get(page) != content:
            self.wrong.append(f"page {page} was discarded or replaced while it was being read")
        memory[:8] = content
        done(self.failing)

    def _end_write(self, page: int, memory: memoryview, before: bytes, done: Done) -> None:
        now = bytes(memory[:8])
        if now != before:
            self.wrong.append(f"page {page} changed while it was being written")
        with self._lock:
            self.content[page] = now
        done(self.failing)

    def close(self) -> None:
        self.gate.set()
        self._pool.shutdown()


class CountingObserver:
    """Counts departures and abandoned transfers, and ignores all other events."""

    def __init__(self) -> None:
        self.departures = 0
        self.given_up: list[str] = []

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Ignored."""

    def fetched(self, result: str, pages: int = 1) -> None:
        """Ignored."""

    def spared(self, nbytes: int) -> None:
        """Ignored."""

    def moving(self, seconds: float) -> None:
        """Ignored."""

    def diverged(self, detail: str) -> None:
        self.departures += 1

    def gave_up(self, op: str, error: Exception) -> None:
        self.given_up.append(op)


class Bench:
    """Pager, and the expected content of every page."""

    def __init__(self, layout: Layout, cache_slots: int, seed: int = 0, timeout: float = 300) -> None:
        self.layout, self.store, self.observer = layout, SlowStore(seed), CountingObserver()
        host_cache = HostCache(cache_slots, layout.page_bytes, device=open_device(torch.device("cpu")))
        self.pager = Pager(
            layout,
            host_cache.cache_slots,
            open_device(torch.device("cpu")),
            self.store,
            Transfers(self.observer, timeout=timeout, failed=lambda _: None),
        )
        self.cache_slots = cache_slots
        self.newest: dict[int, bytes] = {}
        self._number = 0
        self._worker = ThreadPoolExecutor(1)
        self._jobs: list[Future[None]] = []
        self._reservations: deque[tuple[Reservation, Access]] = deque()
        for page in layout.pages:
            if page.role is not Role.GRAD:
                self.access((Use(page.index, Mode.WRITE),), planned=False)

    def access(self, uses: Access, *, planned: bool = True) -> None:
        """Use pages like the training loop: check pages that are read, and replace pages that are modified."""
        self._use(self.pager.access(uses, planned=planned), uses)

    def reservation(self, uses: Access) -> None:
        """Use pages on another thread with random delays."""
        self._reservations.append((self.pager.reservation(uses, threaded=True), uses))
        self._jobs.append(self._worker.submit(self._use_reserved))

    def _use_reserved(self) -> None:
        """Use the next reservation."""
        reservation, uses = self._reservations.popleft()
        with reservation as contents:
            self._check_and_modify(contents, uses, 0.001)

    def _use(self, held: AbstractContextManager[list[memoryview]], uses: Access) -> None:
        with held as contents:
            self._check_and_modify(contents, uses)

    def _check_and_modify(self, contents: list[memoryview], uses: Access, seconds: float = 0) -> None:
        for (page, mode), content in zip(uses, contents, strict=True):
            if mode.fetches:
                assert content[:8].tobytes() == self.newest[page], f"page {page} does not have the newest content"
            time.sleep(random.random() * seconds)
            if mode.modifies:
                self._number += 1
                self.newest[page] = self._number.to_bytes(8)
                content[:8] = self.newest[page]
            if mode is Mode.CONSUME:
                del self.newest[page]

    def drain(self) -> None:
        """Wait for the other thread and raise its errors."""
        for job in self._jobs:
            job.result(20)
        self._jobs.clear()

    def use_all(self, accesses: Iterable[Access], reserved: float = 0) -> None:
        """Perform accesses in order; a fraction `reserved` of the modifying ones runs on the other thread."""
        for access in accesses:
            modifies = any(use.mode.modifies for use in access)
            (self.reservation if modifies and random.random() < reserved else self.access)(access)

    def drop_gradients(self) -> None:
        """Discard gradients like `zero_grad` before a step."""
        self.drain()
        waiting = [page for page in self.newest if self.layout.pages[page].role is Role.GRAD]
        self.pager.discard(waiting)
        for page in waiting:
            del self.newest[page]

    def check(self) -> None:
        """Flush, then compare every page with its expected content."""
        self.pager.flush()
        self.drain()
        assert self.store.wrong == []
        for page, content in self.newest.items():
            assert self.store.content[page] == content
        assert sum(self.pager.census().values()) == self.cache_slots


@contextmanager
def bench(layout: Layout, cache_slots: int, seed: int = 0, timeout: float = 300) -> Iterator[Bench]:
    """Yield a bench, and stop its threads afterwards."""
    made = Bench(layout, cache_slots, seed, timeout)
    try:
        yield made
    finally:
        made._worker.shutdown(cancel_futures=True)
        made.store.close()


@st.composite
def benches_and_plans(draw: st.DrawFn) -> tuple[Layout, Plan]:
    """Draw a layout and a plan of a step for it, with few or many cache slots."""
    layout = draw(layouts(most=80_000))
    events = draw(steps(layout))
    drawn = draw(update_schedules(layout, events))
    update_schedule = replace(drawn, in_forward=frozenset())  # the first step has no gradients of a previous step
    trace = expand(events, layout, update_schedule)
    assume(trace)
    # Another thread may hold a batch at the same time, for which `choose_budget` leaves room
    least = least_cache_slots(max(len(access) for access in trace)) + layout.batch_pages
    return layout, make_plan(trace, layout, draw(st.integers(least, least + len(layout.pages))))


@settings(max_examples=25, deadline=None, phases=NO_SHRINK)
@given(benches_and_plans(), st.integers(0, 1000), st.sampled_from([0, 0.5, 1]))
def test_every_use_sees_the_newest_content(drawn: tuple[Layout, Plan], seed: int, reserved: float) -> None:
    """The first step is recorded, later steps are planned; no page changes while it is being written."""
    layout, plan = drawn
    with bench(layout, plan.cache_slots, seed) as it:
        for cycle in range(5):
            it.use_all(plan.trace, reserved)
            if cycle == 0:
                it.pager.install(plan)
            it.pager.begin_step()
        assert it.observer.departures == 0
        it.check()


@settings(max_examples=25, deadline=None, phases=NO_SHRINK)
@given(benches_and_plans(), st.data())
def test_departures_from_the_plan_are_served(drawn: tuple[Layout, Plan], data: st.DataObject) -> None:
    """The content stays correct with evaluation between accesses, incomplete steps, a different order and flushes."""
    layout, plan = drawn
    chance = random.Random(data.draw(st.integers(0, 10_000)))
    kept = [page.index for page in layout.pages if page.role is not Role.GRAD]
    guessed = data.draw(st.booleans())
    with bench(layout, plan.cache_slots, chance.randrange(1000)) as it:
        it.pager.install(plan, guessed=guessed)
        for _ in range(6):
            stops = chance.randrange(len(plan.trace)) if chance.random() < 0.4 else len(plan.trace)
            for access in plan.trace[:stops]:
                if chance.random() < 0.1:
                    it.access((Use(chance.choice(kept), Mode.READ),), planned=chance.random() < 0.2)
                if chance.random() < 0.02:
                    it.pager.flush()
                it.use_all([access], 0.5)
            if stops < len(plan.trace):
                it.drop_gradients()
            it.pager.begin_step()
        assert not (guessed and it.observer.departures)
        it.check()


def small_bench(timeout: float = 300) -> tuple[Layout, Plan, Bench]:
    """Return a layout, a plan with few cache slots, and a bench for them."""
    layout = transformer(4, 16 * 1024, 64 << 10)
    events = transformer_step(4)
    plan = make_plan(expand(events, layout, UpdateSchedule.of("in_backward", events)), layout, 10)
    return layout, plan, Bench(layout, plan.cache_slots, timeout=timeout)


def test_modification_waits_for_the_write_back() -> None:
    _, _, it = small_bench()
    it.access((Use(0, Mode.UPDATE),))
    it.check()
    it.store.gate.clear()
    it.access((Use(0, Mode.UPDATE),))
    it.pager.install(None)  # writes dirty pages back
    assert it.pager.in_flight() == {"read": 0, "write": 1}
    pool = ThreadPoolExecutor(1)
    update = pool.submit(it.access, (Use(0, Mode.UPDATE),))
    with pytest.raises(TimeoutError):
        update.result(0.1)
    it.store.gate.set()
    update.result(300)
    it.check()
    pool.shutdown()
    it.store.close()


def test_training_continues_during_updates_when_all_pages_are_cached() -> None:
    """Training passes open reservations up to the second next FSDP module, because gradients wait in memory."""
    layout, events = transformer(6, 16 * 1024, 64 << 10), transformer_step(6)
    trace = expand(events, layout, UpdateSchedule.of("in_backward", events))
    plan = make_plan(trace, layout, len(layout.pages))
    runs = [
        (fsdp_module, list(run))
        for fsdp_module, run in groupby(trace, lambda access: layout.pages[access[0].page].fsdp_module)
    ]
    begins = next(n for n, (_, run) in enumerate(runs) if run[0][0].mode is Mode.UPDATE)
    assert [fsdp_module for fsdp_module, _ in runs[begins : begins + 4]] == [
        5,
        3,
        4,
        2,
    ]  # updated, gathered, updated, gathered
    (_, update), (_, near), (_, second_update), (_, far) = runs[begins : begins + 4]
    with bench(layout, plan.cache_slots, timeout=30) as it, ThreadPoolExecutor(2) as pool:
        it.pager.install(plan)
        it.use_all(access for _, run in runs[:begins] for access in run)
        reservations = [it.pager.reservation(uses, threaded=True) for uses in update]
        it.use_all(near)
        waiting = [pool.submit(it.access, tuple(Use(page, Mode.READ) for page, _ in update[0]), planned=False)]
        reservations += [it.pager.reservation(uses, threaded=True) for uses in second_update]
        waiting += [pool.submit(it.use_all, far)]
        _, unfinished = wait(waiting, 0.1)
        assert len(unfinished) == 2
        for reservation in reservations[: len(update)]:
            with reservation:
                pass
        for future in waiting:
            future.result()
        assert it.observer.departures == 0


@pytest.mark.parametrize("op", ["read", "write"])
def test_failed_transfer_is_raised_in_the_training_loop(op: str) -> None:
    """The same error is raised at the next call and at every later one."""
    _, plan, it = small_bench()
    it.check()
    it.pager.install(plan)
    it.store.failing = StorageError(op, "/somewhere", 4096, 512, 5)
    with pytest.raises(StorageError, match=f"{op} of 512 bytes at offset 4096 of /somewhere failed: EIO"):
        it.use_all(plan.trace * 3)
    with pytest.raises(StorageError):
        it.pager.flush()
    with pytest.raises(StorageError):
        it.pager.discard([0])
    it.store.close()


def test_immediately_failed_read_fails_its_own_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine rejects a read at once, this access fails, not the next one."""
    layout, _, it = small_bench()
    it.check()
    requested: list[int] = []

    def read(page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        requested.append(page)
        done(StorageError("read", "/somewhere", 4096, 512, 5))

    monkeypatch.setattr(it.store, "read", read)
    for page in layout.pages:
        if page.role is Role.GRAD:
            continue
        try:
            with it.pager.access((Use(page.index, Mode.READ),), planned=False):
                assert requested == []
        except StorageError:
            break
    assert len(requested) == 1
    it.store.close()


@pytest.mark.parametrize(("transfer", "mode"), [("read", Mode.READ), ("written", Mode.UPDATE)])
def test_stall_error_names_the_transfer_and_the_oldest_request(transfer: str, mode: Mode) -> None:
    """The error is raised after the time limit and counts as a failed transfer."""
    layout, _, it = small_bench(timeout=1)
    it.check()
    if mode is Mode.READ:
        it.store.gate.clear()
        uses = [(Use(page.index, mode),) for page in layout.pages if page.role is not Role.GRAD]
    else:
        uses = [(Use(0, mode),)]
        it.use_all(uses)
        it.store.gate.clear()
        it.pager.install(None)  # writes dirty pages back
    with pytest.raises(StallError, match=f"waited 1 s for a page to be {transfer}; the request of the test"):
        it.use_all(uses)
    assert it.observer.given_up == ["read" if mode is Mode.READ else "write"]
    it.store.close()


def test_waiting_for_other_ranks_does_not_count_as_a_stall() -> None:
    """Waits for a page of an update in an exchange, or for one of its cache slots, are not limited."""
    layout, _, it = small_bench(timeout=1)
    it.check()
    with held_in_exchange(it, layout, seconds=1.5):
        it.access((Use(0, Mode.READ),))  # the page of the update
    with held_in_exchange(it, layout, seconds=1.5):
        others = [page.index for page in layout.pages if page.role is not Role.GRAD][10:20]
        it.access(tuple(Use(page, Mode.READ) for page in others))  # as many pages as cache slots
    it.check()
    it.store.close()


def test_time_limit_restarts_after_an_exchange() -> None:
    """An update that hangs after its exchange is still detected."""
    layout, _, it = small_bench(timeout=1)
    it.check()
    with held_in_exchange(it, layout, seconds=1.5, then=0.3):
        it.access((Use(0, Mode.READ),))
    began = time.monotonic()
    with held_in_exchange(it, layout, seconds=1.5, then=4), pytest.raises(StallError, match="for the update of a page"):
        it.access((Use(0, Mode.READ),))
    assert time.monotonic() - began > 2.4
    it.store.close()


def test_hanging_drive_is_detected_during_an_exchange() -> None:
    """Waits for other ranks do not hide a transfer that never ends."""
    layout, _, it = small_bench(timeout=1)
    it.check()
    with held_in_exchange(it, layout, seconds=8, pages=3):
        it.access((Use(5, Mode.WRITE),), planned=False)
        it.store.gate.clear()
        it.pager.install(None)  # writes the page back
        with pytest.raises(StallError, match="waited 1 s for any page to be read or written; the request of the test"):
            it.access((Use(0, Mode.READ),))
    assert it.observer.given_up == ["write"]
    it.store.close()


@contextmanager
def held_in_exchange(it: Bench, layout: Layout, *, seconds: float, then: float = 0, pages: int = 10) -> Iterator[None]:
    """Hold pages on another thread for `seconds` in an exchange and for `then` after it, or until the body ends."""
    held = [page.index for page in layout.pages if page.role is not Role.GRAD][:pages]
    reservation = it.pager.reservation(tuple(Use(page, Mode.UPDATE) for page in held), threaded=True)
    begun, over = Event(), Event()

    def update() -> None:
        with reservation:
            with it.pager.transfers.exchanging():
                begun.set()
                over.wait(seconds)
            over.wait(then)

    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(update)
        try:
            assert begun.wait(20)
            yield
        finally:
            over.set()
        job.result(20)


@pytest.mark.parametrize("end", ["filled", "released", "dropped"])
def test_page_to_be_overwritten_has_a_reserved_cache_slot(end: str) -> None:
    """Prefetches do not take the slot until the page has been filled or its claim has been released."""
    layout, _, it = small_bench()
    cache, cache_slots = it.pager._cache, it.cache_slots
    *before, filled, later = [page.index for page in layout.pages if page.role is not Role.GRAD][: cache_slots + 1]
    it.check()
    with it.pager.transfers.lock:
        for page in cache._cache_slots.holders():
            cache.evict(page)
        assert len(cache._cache_slots.free) == cache_slots
        it.store.read_pages.clear()
        for page in before:
            cache.claim([Use(page, Mode.READ)])
        cache.claim([Use(filled, Mode.WRITE)])
        cache.claim([Use(later, Mode.READ)])
        cache.prefetch()
        assert it.store.read_pages == before
        assert len(cache._cache_slots.free) == 1
        if end == "filled":
            cache.acquire((Use(filled, Mode.WRITE),), threaded=False)
            cache.release((Use(filled, Mode.WRITE),))
            cache.release_claims([Use(before[0], Mode.READ)])
        elif end == "released":
            cache.release_claims([Use(filled, Mode.WRITE)])
        else:
            cache.drop_claims()
            cache.claim([Use(later, Mode.READ)])
        assert not cache._reserved
    with it.pager.access((Use(before[0], Mode.READ),), planned=False):  # when its read has ended
        pass
    with it.pager.transfers.lock:
        if end == "filled":
            cache.evict(before[0])
        cache.prefetch()
        assert it.store.read_pages[-1] == later
    it.pager.flush()
    it.store.close()


def test_page_waiting_for_a_cache_slot_reserves_no_other() -> None:
    """The page would count twice, and a reservation would remain after it gets its slot."""
    layout, _, it = small_bench()
    cache = it.pager._cache
    page = layout.pages[0].index
    it.check()
    with it.pager.transfers.lock:
        cache.evict(page)
        cache.claim([Use(page, Mode.WRITE)])
        cache._cache_slots.pages[page].pins += 1  # as `acquire` does first
        cache.prefetch()
        cache._cache_slots.pages[page].pins -= 1
        assert not cache._reserved
        cache.release_claims([Use(page, Mode.WRITE)])
    it.store.close()


def test_access_to_more_pages_than_cache_slots_raises() -> None:
    """The error names the setting, and the access does not hang."""
    layout, _, it = small_bench()
    uses = tuple(Use(page.index, Mode.WRITE) for page in layout.pages[:11])
    with pytest.raises(InfinityError, match=r"memory\.host_bytes"):
        it.access(uses)
    it.store.close()


def test_steady_traffic_matches_the_plan() -> None:
    """Steady cycles read and write no more than predicted."""
    layout, plan, it = small_bench()
    it.pager.install(plan)
    cycles = 12
    for cycle in range(cycles + 2):
        if cycle == 2:
            it.store.read_pages.clear()
            it.store.written_pages.clear()
        it.use_all(plan.trace)
        it.pager.begin_step()
    read = sum(layout.pages[page].nbytes for page in it.store.read_pages)
    written = sum(layout.pages[page].nbytes for page in it.store.written_pages)
    ends = plan.cache_slots * layout.page_bytes
    assert 0.9 * cycles * plan.traffic.read_bytes - ends <= read <= cycles * plan.traffic.read_bytes + ends
    assert 0.9 * cycles * plan.traffic.written_bytes - ends <= written <= cycles * plan.traffic.written_bytes + ends
    assert plan.traffic.read_bytes > 3 * ends / cycles
    it.check()
    it.store.close()
