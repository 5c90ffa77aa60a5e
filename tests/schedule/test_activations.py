"""Tests of activation pages: saved tensors are restored in any order, and pages move no more often than necessary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition, Event, Lock, Thread, Timer
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.content.layout import Page
from infinity.deadline import wait_a_while
from infinity.errors import BudgetError, StallError, StorageError
from infinity.memory.device import open_device
from infinity.memory.host_cache import HostCache
from infinity.schedule.activation_pages import ActivationPages, StoredActivation
from infinity.schedule.stack import page_lengths
from infinity.schedule.transfers import Transfers
from support.late_copies import late_copies

PAGE = 8192
CACHE_SLOTS = 6
SPARE = 2


class MemoryStore:
    """Store in memory whose transfers end on another thread, or when the test allows it."""

    def __init__(self) -> None:
        self.stored: dict[int, bytes] = {}
        self.pages: list[Page] = []
        self.read_bytes = self.written_bytes = 0
        self.may_read = Event()
        self.may_read.set()
        self.failing: Exception | None = None
        self.unresponsive = False
        self._lock = Lock()

    def add(self, pages: Any, path_of: Any) -> None:
        assert [page.index for page in pages] == [*range(len(self.pages), len(self.pages) + len(pages))]
        assert {path_of(page) for page in pages} <= {0, 1}
        self.pages += pages

    def read(self, page: int, memory: memoryview, done: Any) -> None:
        def move() -> None:
            assert self.may_read.wait(20)
            memory[:] = self.stored[page]
            self.read_bytes += len(memory)
            done(None)

        Thread(target=move).start()

    def write(self, page: int, memory: memoryview, done: Any) -> None:
        def move() -> None:
            self.stored[page] = bytes(memory)
            self.written_bytes += len(memory)
            done(self.failing)

        if not self.unresponsive:
            Thread(target=move).start()

    def discard(self, page: int) -> None:
        self.stored.pop(page, None)

    def has(self, page: int) -> bool:
        return page in self.stored

    def expect_gradients(self, stored: bool) -> None:
        """Do nothing."""

    def oldest_request(self) -> tuple[float, str] | None:
        return 0.0, "the request of the test"


class Observer:
    """Counts spared bytes."""

    def __init__(self) -> None:
        self.spared_bytes = 0

    def spared(self, nbytes: int) -> None:
        self.spared_bytes += nbytes

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextmanager
def opened(store: MemoryStore | None, timeout: float = 20) -> Iterator[tuple[ActivationPages, Observer]]:
    device, observer = open_device(torch.device("cpu")), Observer()
    host_cache = HostCache(CACHE_SLOTS + 3, PAGE, device=device)
    transfers = Transfers(observer, timeout=timeout, failed=lambda _: None)  # type: ignore[arg-type]
    pages = ActivationPages(
        host_cache.cache_slots[3:],
        PAGE,
        device,
        store,
        [1.0, 3.0],
        transfers,  # type: ignore[arg-type]
    )
    try:
        yield pages, observer
        assert pages.drain()
    finally:
        host_cache.close()


def content(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def loaded(pages: ActivationPages, kept: StoredActivation, nbytes: int) -> torch.Tensor:
    found = torch.empty(nbytes, dtype=torch.uint8)
    pages.load(kept, found)
    return found


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(1, 4 * PAGE)),
            st.tuples(st.sampled_from(["load", "drop"]), st.integers(0, 100)),
            st.tuples(st.just("step"), st.just(0)),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_saved_activations_are_restored(actions: list[tuple[str, int]]) -> None:
    """Tensors can be loaded in any order and repeatedly, and dropped tensors free their pages."""
    store = MemoryStore()
    with opened(store) as (pages, _):
        saved: list[tuple[StoredActivation, torch.Tensor]] = []
        for number, (action, value) in enumerate(actions):
            if action == "keep":
                tensor = content(value, number)
                saved.append((pages.keep(tensor)[0], tensor))
            elif action == "step":
                pages.end_step()
            elif saved and action == "load":
                kept, tensor = saved[value % len(saved)]
                assert torch.equal(loaded(pages, kept, len(tensor)), tensor)
            elif saved:
                del saved[value % len(saved)]
        for kept, tensor in saved:
            assert torch.equal(loaded(pages, kept, len(tensor)), tensor)
        saved.clear()
        kept = tensor = None  # type: ignore[assignment]
        with pages._transfers.lock:
            pages._transfers.lock.wait_for(lambda: not (pages._transfers.writes or pages._transfers.reads), 20)
        pages.end_step()
        assert store.stored == {}
        assert pages.census() == {"free": CACHE_SLOTS, "resident": 0, "streaming": 0, "writing": 0}


@pytest.mark.parametrize("layers", [1, 2, 3, 10])
@pytest.mark.parametrize("nbytes", [PAGE, 2 * PAGE + 100])
def test_stack_writes_and_reads_uncached_pages_once(layers: int, nbytes: int) -> None:
    """The last activations stay cached, and later steps reuse the slots of earlier ones."""
    store = MemoryStore()
    with opened(store) as (pages, observer):
        for _ in range(6):
            moved = store.written_bytes, store.read_bytes, observer.spared_bytes
            stack = [pages.keep(content(nbytes, layer))[0] for layer in range(layers)]
            for layer in reversed(range(layers)):
                assert torch.equal(loaded(pages, stack.pop(), nbytes), content(nbytes, layer))
            used = pages.end_step()
            lengths = [PAGE, PAGE, 4096] if nbytes > PAGE else [PAGE]
            assert page_lengths(nbytes, PAGE) == lengths
            beyond = sum((layers * lengths)[: max(0, layers * len(lengths) - (CACHE_SLOTS - SPARE))])
            assert pages.traffic.written == beyond
            assert min(layers * len(lengths), CACHE_SLOTS - SPARE) <= used // PAGE <= CACHE_SLOTS
            assert pages.traffic.kept == layers * nbytes
            assert store.written_bytes - moved[0] == beyond
            assert store.read_bytes - moved[1] + observer.spared_bytes - moved[2] == beyond
            # Additional pages belong to tensors that were dropped while one of their pages was being written.
            assert len(store.pages) <= layers * len(lengths) + CACHE_SLOTS


def test_full_cache_without_a_store_raises_budget_error() -> None:
    """The error contains the size and the setting to change."""
    with opened(None) as (pages, _):
        kept = [pages.keep(content(PAGE, number))[0] for number in range(CACHE_SLOTS)]
        with pytest.raises(
            BudgetError, match=r'more than the 48 KiB .* activations\.host_bytes .* activations\.tier = "nvme"'
        ):
            pages.keep(content(10, 0))
        for number in reversed(range(CACHE_SLOTS)):
            assert torch.equal(loaded(pages, kept.pop(), PAGE), content(PAGE, number))


def keep_20_tensors(pages: ActivationPages, kept: list[StoredActivation]) -> None:
    for number in range(20):
        kept.append(pages.keep(content(PAGE, number))[0])


def test_drive_error_is_raised_by_every_later_call() -> None:
    store, kept = MemoryStore(), list[StoredActivation]()
    store.failing = StorageError("write", "somewhere", 0, PAGE, 5)
    with opened(store) as (pages, _):
        with pytest.raises(StorageError, match="EIO"):
            keep_20_tensors(pages, kept)
        with pytest.raises(StorageError, match="EIO"):
            pages.keep(content(PAGE, 0))


def test_time_while_stopped_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in a suspended process (Ctrl-Z) does not count, and a response of the drive is processed first."""
    condition, clock = Condition(), [0.0]
    monkeypatch.setattr("infinity.deadline.time.perf_counter", lambda: clock[0])

    def wait(seconds: float, stopped: float) -> None:
        clock[0] += seconds + stopped

    for stopped in (0.0, 3600.0):
        monkeypatch.setattr(condition, "wait", partial(wait, stopped=stopped))
        for seconds in (0.25, 120.0):
            before = clock[0]
            assert wait_a_while(condition, seconds) == pytest.approx(stopped)
            assert clock[0] - before == pytest.approx(min(seconds, 1.0) + stopped)


def test_unresponsive_drive_raises_stall_error() -> None:
    store, kept = MemoryStore(), list[StoredActivation]()
    store.unresponsive = True
    with opened(store, timeout=0.2) as (pages, _):
        with pytest.raises(
            StallError, match="waited 0 s for a free cache slot of the host cache; the request of the test"
        ):
            keep_20_tensors(pages, kept)
        pages._transfers.writes = 0


def test_dropped_activation_is_not_written_during_its_copy() -> None:
    """The device may still use a page of a dropped tensor; the page is freed when the copy has ended."""
    with opened(None) as (pages, _), late_copies() as passed:
        pages.keep(content(PAGE, 0))
        pages.end_step()
        passed.set()
        with pages._transfers.lock:
            assert pages._transfers.lock.wait_for(lambda: not pages._cache.copies, 20)
        assert pages._transfers.failure is None
        pages.end_step()
        assert pages.census()["free"] == CACHE_SLOTS


@given(st.integers(1, 200_000), st.sampled_from([4096, 65536, 1 << 20, 3 * 4096]))
def test_page_lengths_are_few_and_tight(nbytes: int, page_bytes: int) -> None:
    """The pages hold the tensor with little padding."""
    lengths = page_lengths(nbytes, page_bytes)
    assert nbytes <= sum(lengths) < nbytes + max(4096, (nbytes % page_bytes) / 4 + 1)
    assert all(length == page_bytes for length in lengths[:-1])
    assert 0 < lengths[-1] <= page_bytes
    assert lengths[-1] % 4096 == 0
    most = 4 * 8  # four lengths per power of two, from 4 KiB to 1 MiB
    assert len({page_lengths(rest, 1 << 20)[-1] for rest in range(4096, 1 << 20, 4096)}) <= most


def test_varying_lengths_do_not_grow_the_store() -> None:
    """No batch has the length of an earlier one."""
    store = MemoryStore()
    with opened(store) as (pages, _):
        taken = []
        for step in range(40):
            nbytes = 100_000 + 523 * (37 * step % 40)
            stack = [pages.keep(content(nbytes, layer))[0] for layer in range(3)]
            while stack:
                loaded(pages, stack.pop(), nbytes)
            pages.end_step()
            taken.append(sum(page.nbytes for page in store.pages))
        assert taken[-1] == taken[25] < 4 * 3 * 122_000


def test_rejected_activation_changes_no_state() -> None:
    """A caller that drops tensors can continue."""
    store = MemoryStore()
    with opened(store) as (pages, _):
        kept = [pages.keep(content(PAGE, number))[0] for number in range(3)]
        del kept[1:]
        pages.end_step()
        dealt, add = pages._dealt.copy(), store.add

        def add_to_full_drive(pages: Any, path_of: Any) -> None:
            for page in pages:
                path_of(page)
            raise BudgetError("the test drive is full")

        store.add = add_to_full_drive  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(BudgetError):
                pages.keep(content(4 * PAGE, 0))
        store.add = add  # type: ignore[method-assign]
        assert pages._dealt == dealt
        kept.append(pages.keep(content(2 * PAGE, 7))[0])
        assert len(store.pages) == 3
        assert torch.equal(loaded(pages, kept[1], 2 * PAGE), content(2 * PAGE, 7))


def test_reused_activation_is_not_evicted() -> None:
    """An encoder's output, which each decoder layer uses, is neither written nor read."""
    store = MemoryStore()
    with opened(store) as (pages, observer):
        encoder = [pages.keep(content(PAGE, number))[0] for number in range(8)]
        memory, decoder = pages.keep(content(PAGE, 100))[0], []
        for layer in range(8):
            decoder.append(pages.keep(content(PAGE, 200 + layer))[0])
            pages.keep_again(memory)
        for layer in reversed(range(8)):
            assert torch.equal(loaded(pages, decoder.pop(), PAGE), content(PAGE, 200 + layer))
            assert torch.equal(loaded(pages, memory, PAGE), content(PAGE, 100))
        del memory
        for number in reversed(range(8)):
            assert torch.equal(loaded(pages, encoder.pop(), PAGE), content(PAGE, number))
        pages.end_step()
        beyond = (17 - (CACHE_SLOTS - SPARE)) * PAGE
        assert pages.traffic.written == store.written_bytes == beyond
        assert pages.traffic.read == store.read_bytes + observer.spared_bytes == beyond
        assert pages.traffic.kept == 17 * PAGE
        assert pages.traffic.loaded == 24 * PAGE


def cached_pages(pages: ActivationPages, kept: StoredActivation) -> int:
    """Return the number of cached pages of a tensor after all transfers have ended."""
    with pages._transfers.lock:
        assert pages._transfers.lock.wait_for(lambda: not (pages._transfers.reads or pages._transfers.writes), 20)
        return sum(pages._cache_slots.pages[page].cache_slot >= 0 for page in kept.pages)


@pytest.mark.parametrize("again", [False, True])
def test_each_backward_of_a_retained_graph_is_prefetched(again: bool) -> None:
    """Pages are prefetched in the order of backward, and each page is read once per backward."""
    store, nbytes, layers = MemoryStore(), 3 * PAGE, 6
    with opened(store) as (pages, observer):
        memory, stack = pages.keep(content(PAGE, 100))[0], list[StoredActivation]()
        for layer in range(layers):
            stack.append(pages.keep(content(nbytes, layer))[0])
            if again:
                pages.keep_again(memory)
        ahead, read = [], []
        for _ in range(4):
            before = store.read_bytes + observer.spared_bytes
            ahead.append(list[int]())
            for layer in reversed(range(layers)):
                if again:
                    ahead[-1].append(cached_pages(pages, memory))
                    assert torch.equal(loaded(pages, memory, PAGE), content(PAGE, 100))
                ahead[-1].append(cached_pages(pages, stack[layer]))
                assert torch.equal(loaded(pages, stack[layer], nbytes), content(nbytes, layer))
            if not again:
                ahead[-1].append(cached_pages(pages, memory))
                assert torch.equal(loaded(pages, memory, PAGE), content(PAGE, 100))
            cached_pages(pages, memory)
            read.append((store.read_bytes + observer.spared_bytes - before) // PAGE)
        assert ahead[1:] == [ahead[0]] * 3
        assert read == [3 * layers + 1 - (CACHE_SLOTS - SPARE)] * 4


def test_new_activations_evict_prefetched_pages_first() -> None:
    """Tensors saved in the middle of a backward replace pages that were prefetched, after their reads have ended."""
    store = MemoryStore()
    with opened(store) as (pages, _):
        stack = [pages.keep(content(PAGE, number))[0] for number in range(10)]
        cached_pages(pages, stack[0])
        store.may_read.clear()
        for number in (9, 8, 7, 6):
            assert torch.equal(loaded(pages, stack.pop(), PAGE), content(PAGE, number))
        Timer(0.3, store.may_read.set).start()
        stack += [pages.keep(content(PAGE, number))[0] for number in (6, 7, 8, 9)]
        for number in reversed(range(10)):
            assert torch.equal(loaded(pages, stack.pop(), PAGE), content(PAGE, number))
        pages.end_step()
        assert store.written_bytes == pages.traffic.written == (10 - (CACHE_SLOTS - SPARE)) * PAGE


def test_keep_waits_for_memory_that_a_copy_still_uses() -> None:
    """The device still copies dropped tensors."""
    with opened(None) as (pages, _), late_copies() as passed:
        for number in range(CACHE_SLOTS):
            pages.keep(content(PAGE, number))  # and dropped
        Timer(0.3, passed.set).start()
        kept, _ = pages.keep(content(PAGE, 50))
        assert torch.equal(loaded(pages, kept, PAGE), content(PAGE, 50))
