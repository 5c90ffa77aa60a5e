"""The store: versions in extents of their own, checked on every read; folders owned by one run."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from threading import Barrier, Event, Thread, current_thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.errors import BudgetError, ConfigError, CorruptPageError, FolderBusyError, StallError, StorageError
from infinity.io import ThreadEngine
from infinity.store import folder as folders
from infinity.store import page_store as pages_of_store
from infinity.store.extents import (
    Extent,
    ExtentAllocator,
    SlotClass,
    file_sizes,
    further_slots,
    plan_slots,
    respread,
    spread,
)
from infinity.store.folder import FolderLock, allocated_bytes, describe_holder, holders, reserve
from infinity.store.marker import new_run_id
from infinity.store.page_store import PageStore, checksum, lay_out, state_pages
from support.fault_engine import Fault, FaultEngine, FaultKind
from support.layouts import layouts

KIB, MIB = 1 << 10, 1 << 20
SPARE = 2
RETAINED = 2


def page(index: int, role: Role, nbytes: int) -> Page:
    """Return a page of its own segment."""
    return Page(index=index, role=role, fsdp_module=0, segment=index, start=0, count=1024, nbytes=nbytes)


ROLES = (Role.PARAM, Role.UPDATE, Role.GRAD)
PAGES = tuple(page(index, ROLES[index % 3], (4 + 4 * (index % 2)) * KIB) for index in range(9))
SHARES = (2.0, 1.0)
KEPT = [item.index for item in PAGES if item.role is not Role.GRAD]


class Rig:
    """A page store on two files, called synchronously."""

    def __init__(
        self,
        place: Path,
        faults: tuple[Fault, ...] = (),
        checkpointed: dict[int, Any] | None = None,
        hashers: int = 0,
    ) -> None:
        paths, slots = lay_out(PAGES, SHARES, checkpointed or {}, SPARE, RETAINED)
        self.files = [place / f"{index}.pages" for index in range(2)]
        self.sizes = [0, 0]
        self.full = False
        self.allocate(slots)
        self.cut(slots)
        self.engine = FaultEngine(ThreadEngine(4, 1 << 20), 0, faults)
        self.store = PageStore(
            PAGES, paths, self.files, slots, self.engine, self, spare=SPARE,
            name_of=lambda index: f"fsdp_module/page[{index}]", moved=lambda *_: None, timeout=60,
            checkpointed=checkpointed,
            retained=RETAINED, hashers=hashers,
        )  # fmt: skip
        self._area = mmap.mmap(-1, 64 * KIB)

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Make the files long enough for slots."""
        if self.full and slots:
            raise BudgetError("no room")
        for path, size in enumerate(file_sizes(slots, 2)):
            self.sizes[path] = max(self.sizes[path], size)
            reserve(self.files[path], self.sizes[path])

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Make the files no longer than slots need."""
        self.sizes = list(file_sizes(slots, 2))
        for file, size in zip(self.files, self.sizes, strict=True):
            os.truncate(file, size)

    def write(self, index: int, content: bytes) -> None:
        """Store a version and wait for it."""
        self._call(self.store.write, index, content)

    def read(self, index: int) -> bytes:
        """Return the current version's content."""
        return self._call(self.store.read, index, bytes(PAGES[index].nbytes))

    def _call(self, method: Any, index: int, content: bytes) -> bytes:
        memory = memoryview(self._area)[: PAGES[index].nbytes]
        memory[:] = content
        ended, errors = Event(), []

        def done(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        method(index, memory, done)
        assert ended.wait(300)
        if errors[0] is not None:
            raise errors[0]
        return bytes(memory)

    def on_disk(self, extent: Extent) -> bytes:
        """Return the bytes of an extent, past the store."""
        with open(self.files[extent.path], "rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)

    def version(self, index: int) -> Any:
        """Return the current version of a page."""
        return self.store.versions([index])[index]

    def close(self) -> None:
        """Close store and engine."""
        self.store.close()
        self.engine.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A store whose pages all have a first version."""
    made = Rig(tmp_path)
    for item in PAGES:
        made.write(item.index, content_of(item.index, 0))
    yield made
    made.close()


def content_of(index: int, number: int) -> bytes:
    """Return a page's content, another for every version."""
    fsdp_module = f"page {index} version {number:08d} ".encode()
    return (fsdp_module * (PAGES[index].nbytes // len(fsdp_module) + 1))[: PAGES[index].nbytes]


def test_pages_are_hashed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads of their own, not on that of the engine; once those have ended, it does."""
    rig = Rig(tmp_path, hashers=2)
    names: list[str] = []
    both = Barrier(2)

    def together(page: int, content: memoryview) -> int:
        names.append(current_thread().name)
        both.wait(300)
        return checksum(page, content)

    found: SimpleQueue[Exception | None] = SimpleQueue()
    memory = [memoryview(mmap.mmap(-1, 64 * KIB))[: PAGES[index].nbytes] for index in range(2)]
    rig.write(2, content_of(2, 0))
    for move, thread in ((rig.store.write, "infinity-writer"), (rig.store.read, "infinity-verifier")):
        names.clear()
        for index in range(2):
            memory[index][:] = content_of(index, 0) if move == rig.store.write else bytes(PAGES[index].nbytes)
        with monkeypatch.context() as patch:
            patch.setattr(pages_of_store, "checksum", together)
            for index in range(2):
                move(index, memory[index], found.put)
            assert [found.get(timeout=300) for _ in range(2)] == [None, None]
        assert all(name.startswith(thread) for name in names)
        assert len(set(names)) == 2
    assert [bytes(view) for view in memory] == [content_of(index, 0) for index in range(2)]
    extent = rig.version(2).extent
    with open(rig.files[extent.path], "r+b") as file:
        file.seek(extent.offset)
        file.write(b"another")
    with pytest.raises(CorruptPageError):
        rig.read(2)
    rig.store.close()
    assert rig.read(0) == content_of(0, 0)
    rig.engine.close()


class StoreMachine(RuleBasedStateMachine):
    """Writes, failing writes, checkpoints and crashes in any order: what is named is never touched."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.rig = Rig(Path(self.place.name))
        self.number = 0
        self.current: dict[int, bytes] = {}
        self.step = 0
        self.checkpoints: dict[int, dict[int, tuple[Any, bytes]]] = {}

    @rule(index=st.integers(0, len(PAGES) - 1))
    def write(self, index: int) -> None:
        self.number += 1
        self.current[index] = content_of(index, self.number)
        self.rig.write(index, self.current[index])

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.current)))
        assert self.rig.read(index) == self.current[index]

    @precondition(lambda self: any(PAGES[index].role is Role.GRAD for index in self.current))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        gradients = [index for index in sorted(self.current) if PAGES[index].role is Role.GRAD]
        index = data.draw(st.sampled_from(gradients))
        self.rig.store.discard(index)
        del self.current[index]
        assert not self.rig.store.has(index)

    @precondition(lambda self: all(index in self.current for index in KEPT))
    @rule(again=st.booleans())
    def save_checkpoint(self, again: bool) -> None:
        self.step += not (again and self.step in self.checkpoints)
        versions = self.rig.store.versions(KEPT)
        self.rig.store.adopt(self.step, versions)
        self.checkpoints[self.step] = {index: (version, self.current[index]) for index, version in versions.items()}
        for old in sorted(self.checkpoints)[:-RETAINED]:
            del self.checkpoints[old]
        assert self.rig.store.checkpoints == tuple(sorted(self.checkpoints))

    @rule(paths=st.tuples(*[st.integers(0, 1)] * len(PAGES)))
    def spread_anew(self, paths: tuple[int, ...]) -> None:
        self.rig.store.spread_anew(paths)

    @rule(stored=st.booleans())
    def expect_gradients(self, stored: bool) -> None:
        self.rig.store.expect_gradients(stored)

    @rule(index=st.integers(0, len(PAGES) - 1))
    def lies_on_its_path(self, index: int) -> None:
        self.write(index)
        assert self.rig.version(index).extent.path == self.rig.store.paths[index]

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.rig.close()
        self.step = data.draw(st.sampled_from(sorted(self.checkpoints)), "resumed from")
        self.checkpoints = {step: pages for step, pages in self.checkpoints.items() if step <= self.step}
        versions = {
            step: {index: version for index, (version, _) in pages.items()} for step, pages in self.checkpoints.items()
        }
        self.rig = Rig(Path(self.place.name), checkpointed=versions)
        self.current = {index: content for index, (_, content) in self.checkpoints[self.step].items()}

    @invariant()
    def nothing_that_is_named_was_overwritten(self) -> None:
        for pages in self.checkpoints.values():
            for version, content in pages.values():
                assert self.rig.on_disk(version.extent) == content

    @invariant()
    def no_two_versions_share_a_byte(self) -> None:
        named = {index: self.rig.version(index).extent for index in self.current}
        extents = set(named.values())
        extents |= {version.extent for pages in self.checkpoints.values() for version, _ in pages.values()}
        owners: dict[tuple[int, int], Extent] = {}
        for extent in extents:
            assert extent.offset + extent.length <= self.rig.sizes[extent.path]
            for block in range(extent.offset, extent.offset + extent.length, 4 * KIB):
                assert owners.setdefault((extent.path, block), extent) == extent
        assert len(set(named.values())) == len(named)

    def teardown(self) -> None:
        self.rig.close()
        self.place.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class AllocatorMachine(RuleBasedStateMachine):
    """Slots taken and given back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = (
            SlotClass(path=0, length=4096, offset=0, count=3),
            SlotClass(path=0, length=8192, offset=3 * 4096, count=2),
            SlotClass(path=1, length=4096, offset=0, count=2),
        )
        used = Extent(0, 4096, 4096)
        self.allocator = ExtentAllocator(self.classes, [used])
        self.held = [used]

    def room(self, item: SlotClass) -> int:
        """Return how many slots of a class are free."""
        held = [extent for extent in self.held if (extent.path, extent.length) == (item.path, item.length)]
        return item.count - len(held)

    @rule(index=st.integers(0, 2))
    def take(self, index: int) -> None:
        item = self.classes[index]
        if not self.room(item):
            with pytest.raises(StallError, match=str(item.length)):
                self.allocator.take(item.path, item.length, 0.0)
            return
        extent = self.allocator.take(item.path, item.length, 0.0)
        assert extent not in self.held
        assert item.offset <= extent.offset < item.offset + item.count * item.length
        assert (extent.offset - item.offset) % item.length == 0
        self.held.append(extent)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.held))
        self.held.remove(extent)
        self.allocator.give(extent)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=100, deadline=None)


@given(layouts(), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_pages_are_spread_in_proportion(layout: Layout, weights: list[int]) -> None:
    """Each path's bytes of a role are within a page of its share, however far one has come."""
    paths = spread(layout.pages, [float(weight) for weight in weights])
    for role in Role:
        got = [0] * len(weights)
        for item in layout.pages:
            if item.role is role:
                got[paths[item.index]] += item.nbytes
                stripe_weights = [sum(got) * weight / sum(weights) for weight in weights]
                assert all(
                    abs(mine - stripe_weight) <= 1.01 * layout.page_bytes
                    for mine, stripe_weight in zip(got, stripe_weights, strict=True)
                )


@given(layouts(), st.integers(1, 3), st.integers(0, 20), st.integers(1, 3))
def test_slots_do_not_overlap_and_suffice(layout: Layout, paths: int, spare: int, retained: int) -> None:
    """A version of every page and one more per checkpoint, writes in flight; files are no longer than that."""
    state, path_of = state_pages(layout.pages), spread(layout.pages, [1.0] * paths)
    on = [path_of[item.index] for item in state]
    classes = plan_slots(state, on, spare, retained)
    sizes = file_sizes(classes, paths)
    assert sum(sizes) == sum(item.count * item.length for item in classes)
    for path in range(paths):
        spans = sorted((item.offset, item.offset + item.count * item.length) for item in classes if item.path == path)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for path, length in {(item.path, item.length) for item in classes}:
        members = [p for p in state if (path_of[p.index], p.nbytes) == (path, length)]
        changing = sum(not p.fixed for p in members)
        slots = sum(item.count for item in classes if (item.path, item.length) == (path, length))
        in_flight = slots - len(members) - retained * changing
        assert min(spare, 1, changing) <= in_flight <= min(spare, changing / 25 + 1)
    fewer = plan_slots(state, on, spare, retained - 1)
    assert classes[: len(fewer)] == fewer, "who retains more finds all slots of who retains less"


@given(
    st.lists(st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from([4096, 8192, 65536])), st.integers(1, 70)))
)
def test_slots_that_come_one_by_one_are_those_of_all_at_once(added: list[dict[tuple[int, int], int]]) -> None:
    """As many, with room for writes in flight, and none on another."""
    slots: tuple[SlotClass, ...] = ()
    members: Counter[tuple[int, int]] = Counter()
    for more in added:
        slots = (*slots, *further_slots(file_sizes(slots, 3), members, members + Counter(more), 16))
        members += Counter(more)
    pages = [
        Page(index=number, role=Role.ACTIVATION, fsdp_module=0, segment=0, start=0, count=0, nbytes=length)
        for number, (_, length) in enumerate(members.elements())
    ]
    at_once = plan_slots(pages, [path for path, _ in members.elements()], 16, 0)
    assert file_sizes(slots, 3) == file_sizes(at_once, 3)
    spans = sorted((slot.path, slot.offset, slot.offset + slot.length) for item in slots for slot in item)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
    found = Counter((item.path, item.length) for item in slots for _ in range(item.count))
    assert found == Counter((item.path, item.length) for item in at_once for _ in range(item.count))


class Unlimited:
    """Data files of any length."""

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Have room for all slots."""

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Cut nothing."""


def test_pages_that_come_one_by_one_take_no_longer_the_more_there_are(tmp_path: Path) -> None:
    """A forward may have thousands of tensors, each of which has pages of its own."""
    (tmp_path / "0.pages").touch()
    engine = ThreadEngine(1, 1)
    store = PageStore(
        (), (), [tmp_path / "0.pages"], (), engine, Unlimited(), spare=SPARE, name_of=str, moved=lambda *_: None,
        timeout=60, retained=0,
    )  # fmt: skip
    seconds = []
    for index in range(4000):
        began = time.perf_counter()
        store.add([page(index, Role.ACTIVATION, 4 * KIB)], lambda _: 0)
        seconds.append(time.perf_counter() - began)
    assert len(store.paths) == 4000
    assert median(seconds[-500:]) < 5 * median(seconds[:500])
    store.close()
    engine.close()


@given(layouts(), st.lists(st.integers(1, 20), min_size=2, max_size=4), st.data())
def test_as_few_pages_move_as_balance_needs(layout: Layout, before: list[int], data: st.DataObject) -> None:
    """Each path comes within two pages of its new share of every role, and none both gets and loses."""
    after = data.draw(st.lists(st.integers(1, 20), min_size=len(before), max_size=len(before)))
    paths = spread(layout.pages, [float(stripe_weight) for stripe_weight in before])
    moved = respread(layout.pages, paths, [float(stripe_weight) for stripe_weight in after])
    for role in Role:
        mine = [item for item in layout.pages if item.role is role and not item.fixed]
        total = sum(item.nbytes for item in mine)
        for path, stripe_weight in enumerate(after):
            loads = [sum(item.nbytes for item in mine if on[item.index] == path) for on in (paths, moved)]
            wanted = total * stripe_weight / sum(after)
            assert abs(loads[1] - wanted) <= abs(loads[0] - wanted) + layout.page_bytes
            assert abs(loads[1] - wanted) <= 2 * len(after) * layout.page_bytes
            gone = any(paths[item.index] == path != moved[item.index] for item in mine)
            come = any(paths[item.index] != path == moved[item.index] for item in mine)
            assert not (gone and come)


def test_files_grow_no_more_however_often_pages_move(rig: Rig) -> None:
    """Each way round needs its slots once."""
    ways = [(0,) * len(PAGES), (1,) * len(PAGES)]
    rig.store.adopt(1, rig.store.versions(KEPT))
    for paths in ways:
        rig.store.spread_anew(paths)
        for item in PAGES:
            rig.write(item.index, content_of(item.index, 1))
    sizes = list(rig.sizes)
    for number in range(8):
        rig.store.spread_anew(ways[number % 2])
        for item in PAGES:
            rig.write(item.index, content_of(item.index, number))
        rig.store.adopt(2 + number, rig.store.versions(KEPT))
    assert rig.sizes == sizes


def test_a_preferred_checkpoint_outlives_newer_ones(rig: Rig) -> None:
    """Of two that are kept one is the newest, the other the preferred one; without it, the one before."""
    kept = []
    for step, prefer in enumerate(([], [], [1], [1], [7], []), 1):
        rig.write(0, content_of(0, step))
        assert rig.store.retained_with(step, prefer)[-1] == step
        rig.store.adopt(step, rig.store.versions(KEPT), prefer)
        kept.append(rig.store.checkpoints)
    assert kept == [(1,), (1, 2), (1, 3), (1, 4), (4, 5), (5, 6)]


def grads() -> list[int]:
    """Return the pages of gradients."""
    return [item.index for item in PAGES if item.role is Role.GRAD]


def test_gradients_reserve_nothing_until_they_are_stored(tmp_path: Path) -> None:
    """Then an area behind the state; it is given back when a plan stores none and none are there."""
    rig = Rig(tmp_path)
    bare = list(rig.sizes)
    assert sum(bare) == sum(file_sizes(lay_out(PAGES, SHARES, {}, SPARE, RETAINED)[1], 2))
    rig.store.expect_gradients(False)
    assert rig.sizes == bare
    for index in grads():
        rig.write(index, content_of(index, 1))
    grown = list(rig.sizes)
    assert sum(grown) - sum(bare) >= sum(PAGES[index].nbytes for index in grads())
    rig.store.expect_gradients(False)  # they are still there
    assert rig.sizes == grown
    assert [rig.read(index) for index in grads()] == [content_of(index, 1) for index in grads()]
    for index in grads():
        rig.store.discard(index)
    assert rig.sizes == grown, "nothing is done to files where somebody may wait"
    rig.store.expect_gradients(False)
    assert rig.sizes == bare
    assert [file.stat().st_size for file in rig.files] == bare
    rig.store.expect_gradients(True)
    assert rig.sizes == grown
    rig.store.expect_gradients(True)
    for index in grads():
        rig.write(index, content_of(index, 2))
    assert rig.sizes == grown, "grown once, not twice"
    rig.close()


def test_a_gradient_may_come_while_the_area_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that departs from its plan stores one after all: it gets an area of its own, and waits for none."""
    rig = Rig(tmp_path)
    rig.write(grads()[0], content_of(grads()[0], 1))
    rig.store.discard(grads()[0])
    cut, writer = rig.cut, Thread(target=rig.write, args=(grads()[0], content_of(grads()[0], 2)))

    def late(slots: Sequence[SlotClass]) -> None:
        monkeypatch.setattr(rig, "cut", cut)
        writer.start()
        writer.join(0.2)
        cut(slots)

    monkeypatch.setattr(rig, "cut", late)
    rig.store.expect_gradients(False)
    writer.join()
    assert rig.read(grads()[0]) == content_of(grads()[0], 2)
    rig.close()


def test_a_file_grows_behind_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have allocation emulated, by writing to what is allocated; but a hole is filled."""
    asked, allocate = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *call: (asked.append(call[1:]), allocate(*call))[1])
    file = tmp_path / "data"
    reserve(file, MIB)
    reserve(file, 3 * MIB)
    reserve(file, 2 * MIB)
    assert asked == [(0, MIB), (MIB, 2 * MIB)]
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", MIB)
    reserve(tmp_path / "holes", 2 * MIB)
    assert asked[2:] == [(0, 2 * MIB)]
    assert allocated_bytes(tmp_path / "holes") >= 2 * MIB


def test_gradients_without_room_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    """Whether they are expected, or come unexpectedly."""
    rig = Rig(tmp_path)
    rig.write(0, content_of(0, 1))
    rig.full = True
    with pytest.raises(BudgetError, match="no room"):
        rig.store.expect_gradients(True)
    with pytest.raises(BudgetError, match="no room"):
        rig.write(grads()[0], content_of(grads()[0], 1))
    assert rig.read(0) == content_of(0, 1)
    rig.full = False
    rig.write(grads()[0], content_of(grads()[0], 1))
    assert rig.read(grads()[0]) == content_of(grads()[0], 1)
    rig.close()


def test_a_checkpointed_version_outlives_newer_ones(rig: Rig) -> None:
    """Until it is no longer retained; then its slot is used again."""
    first = rig.version(0)
    rig.store.adopt(1, rig.store.versions(KEPT))
    extents = set()
    for number in range(1, 20):
        rig.write(0, content_of(0, number))
        extents.add(rig.version(0).extent)
        assert rig.on_disk(first.extent) == content_of(0, 0)
    assert first.extent not in extents
    rig.store.adopt(2, rig.store.versions(KEPT))
    rig.store.adopt(3, rig.store.versions(KEPT))
    for number in range(20, 40):
        rig.write(0, content_of(0, number))
        extents.add(rig.version(0).extent)
    assert first.extent in extents


def test_a_failed_write_leaves_the_old_version(tmp_path: Path) -> None:
    """The error names the place; content and slots are as before, however often it fails."""
    rig = Rig(tmp_path, (Fault(kind=FaultKind.ENOSPC, at=tuple(range(1, 40))),))
    rig.write(0, content_of(0, 0))
    for number in range(1, 40):
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            rig.write(0, content_of(0, number))
        assert caught.value.path == str(rig.files[0])
    assert rig.read(0) == content_of(0, 0)
    rig.write(0, content_of(0, 50))
    assert rig.read(0) == content_of(0, 50)
    rig.close()


@pytest.mark.parametrize("where", [0, 1000, 4095])
def test_a_flipped_bit_is_named(rig: Rig, where: int) -> None:
    """Page, file and offset are in the error."""
    extent = rig.version(3).extent
    with open(rig.files[extent.path], "r+b") as file:
        file.seek(extent.offset + where)
        byte = file.read(1)[0]
        file.seek(extent.offset + where)
        file.write(bytes([byte ^ 0x10]))
        os.fsync(file.fileno())
    with pytest.raises(CorruptPageError, match=r"fsdp_module/page\[3\]") as caught:
        rig.read(3)
    assert caught.value.page == "fsdp_module/page[3]"
    assert caught.value.path == str(rig.files[extent.path])
    assert caught.value.offset == extent.offset
    assert str(extent.offset) in str(caught.value)
    assert str(rig.files[extent.path]) in str(caught.value)
    assert rig.read(1) == content_of(1, 0)


@pytest.mark.parametrize("kind", [FaultKind.MISDIRECTED, FaultKind.TORN])
def test_a_write_that_lied_is_found(tmp_path: Path, kind: FaultKind) -> None:
    """A write that went elsewhere, or only in part, and reported success."""
    rig = Rig(tmp_path, (Fault(kind=kind, at=(1,)),))
    rig.write(0, content_of(0, 0))
    rig.write(0, content_of(0, 1))
    with pytest.raises(CorruptPageError, match=r"fsdp_module/page\[0\]"):
        rig.read(0)
    rig.close()


def test_a_page_is_not_mistaken_for_another_of_the_same_content() -> None:
    """The checksum depends on the page's index."""
    content = memoryview(bytes(4096))
    assert checksum(1, content) != checksum(2, content)
    assert checksum(1, content) == checksum(1, content)


def test_a_stall_report_names_the_oldest_request(tmp_path: Path) -> None:
    """Operation, offset and path of what has been in flight longest."""
    rig = Rig(tmp_path, (Fault(kind=FaultKind.STUCK, at=(1,)),))
    rig.write(0, content_of(0, 0))
    assert rig.store.oldest_request() is None
    memory = memoryview(mmap.mmap(-1, 4096))
    ended = Event()
    rig.store.read(0, memory, lambda error: ended.set())
    since, said = rig.store.oldest_request() or (0.0, "")
    assert 0 < since <= time.perf_counter()
    assert "read of 4096 bytes" in said
    assert str(rig.files[0]) in said
    rig.engine.release()
    assert ended.wait(300)
    rig.close()


def test_a_held_folder_is_refused_and_says_who(tmp_path: Path) -> None:
    """Run and process of the holder; free again after release."""
    held = FolderLock.acquire([tmp_path], "20300101-000000-abcdef", 0)
    with pytest.raises(FolderBusyError, match=rf"20300101-000000-abcdef.*process {os.getpid()}"):
        FolderLock.acquire([tmp_path], new_run_id(), 0)
    assert "20300101-000000-abcdef" in str(holders(tmp_path)[0])
    held.release()
    held.release()
    assert not holders(tmp_path)
    assert list(tmp_path.iterdir()) == []
    FolderLock.acquire([tmp_path], new_run_id(), 0).release()


def test_a_refused_lock_keeps_none_of_the_paths(tmp_path: Path) -> None:
    """With several paths it is all or nothing."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    held = FolderLock.acquire(paths[1:], new_run_id(), 0)
    with pytest.raises(FolderBusyError):
        FolderLock.acquire(paths, new_run_id(), 0)
    FolderLock.acquire(paths[:1], new_run_id(), 0).release()
    held.release()


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    """The lock of a killed process is free, although its file is still there."""
    code = (
        "import os, signal; from infinity.store.folder import FolderLock\n"
        f"lock = FolderLock.acquire([{str(tmp_path)!r}], 'dead', 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=600)
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    assert "dead" in describe_holder(files[0])
    assert not holders(tmp_path)
    FolderLock.acquire([tmp_path], new_run_id(), 0).release()


def test_a_lock_is_not_taken_on_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder leaves between our open and our lock: nobody else can then get the folder beside us."""
    holder = FolderLock.acquire([tmp_path], "first", 0)
    original = folders.fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        holder.release()
        original(descriptor, operation)

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    second = FolderLock.acquire([tmp_path], "second", 0)
    monkeypatch.undo()
    try:
        with pytest.raises(FolderBusyError, match="second"):
            FolderLock.acquire([tmp_path], "third", 0)
    finally:
        second.release()


def test_an_unwritable_folder_is_named() -> None:
    """A path that cannot be written is a setting that is wrong."""
    with pytest.raises(ConfigError, match="/proc"):
        FolderLock.acquire(["/proc"], new_run_id(), 0)


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """Mount a file system of a few KiB; skip where that is not allowed."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_refused_with_sizes(tmp_path: Path) -> None:
    """What is there and what is needed; no file is left."""
    with small_disk(tmp_path / "small", 512 * KIB) as place:
        with pytest.raises(BudgetError, match=r"has 512 KiB free.*needs 1 MiB") as caught:
            reserve(place / "data", 1024 * KIB)
        assert str(place) in str(caught.value)
        assert list(place.iterdir()) == []
        reserve(place / "data", 256 * KIB)
        assert (place / "data").stat().st_blocks * 512 >= 256 * KIB


def test_a_run_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """Refused before training, and the folder is free and empty afterwards."""
    import infinity
    from support import models
    from support.train import MIB, Paging, Recipe, make_optimizer
    from support.train import settings as configuration

    with small_disk(tmp_path / "nvme0", 1024 * KIB) as place:
        model = models.build("toy")
        optimizer = make_optimizer(Recipe(), model)
        with pytest.raises(BudgetError, match=r"KiB free.*needs.*MiB"):
            infinity.offload(model, optimizer, configuration(tmp_path, Paging(), 64 * MIB))
        assert list(place.iterdir()) == []
