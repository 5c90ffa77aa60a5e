"""Tests of the page store: versions in separate extents, checksums on every read, and folder locks."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, Event, Thread, current_thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.errors import BudgetError, CorruptPageError, FolderBusyError, StallError, StorageError
from infinity.io import ThreadEngine
from infinity.store import folder as folders
from infinity.store import page_store as pages_of_store
from infinity.store.extents import (
    Extent,
    ExtentAllocator,
    SlotClass,
    file_sizes,
    further_slots,
    missing_slots,
    overlapping,
    plan_slots,
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
    """Return a page in a segment of its own."""
    return Page(index=index, role=role, fsdp_module=0, segment=index, start=0, count=1024, nbytes=nbytes)


ROLES = (Role.PARAM, Role.UPDATE, Role.GRAD)
PAGES = tuple(page(index, ROLES[index % 3], (4 + 4 * (index % 2)) * KIB) for index in range(9))
STRIPE_WEIGHTS = (2.0, 1.0)
STATE_PAGES = [item.index for item in PAGES if item.role is not Role.GRAD]


class Rig:
    """Page store on two files with synchronous calls."""

    def __init__(
        self,
        place: Path,
        faults: tuple[Fault, ...] = (),
        checkpointed: dict[int, Any] | None = None,
        hashers: int = 0,
    ) -> None:
        paths, slots = lay_out(PAGES, STRIPE_WEIGHTS, checkpointed or {}, SPARE, RETAINED)
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
        """Extend the files to hold the slots."""
        if self.full and slots:
            raise BudgetError("the test drive is full")
        for path, size in enumerate(file_sizes(slots, 2)):
            self.sizes[path] = max(self.sizes[path], size)
            reserve(self.files[path], self.sizes[path])

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Truncate the files to the size of the slots."""
        self.sizes = list(file_sizes(slots, 2))
        for file, size in zip(self.files, self.sizes, strict=True):
            os.truncate(file, size)

    def write(self, index: int, content: bytes) -> None:
        """Store a version and wait for the write."""
        self._call(self.store.write, index, content)

    def read(self, index: int) -> bytes:
        """Return the content of the current version."""
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
        """Return the bytes of an extent, read without the store."""
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
    """A store in which every page has a first version."""
    made = Rig(tmp_path)
    for item in PAGES:
        made.write(item.index, content_of(item.index, 0))
    yield made
    made.close()


def content_of(index: int, number: int) -> bytes:
    """Return the content of one version of a page; every version differs."""
    pattern = f"page {index} version {number:08d} ".encode()
    return (pattern * (PAGES[index].nbytes // len(pattern) + 1))[: PAGES[index].nbytes]


def test_slots_that_overlap_extents_of_checkpoints_do_not_count() -> None:
    """Checkpoints of another page size may occupy parts of slots."""
    length = 4096
    slots, used = SlotClass(path=0, length=length, offset=0, count=4), Extent(0, length // 2, length)
    more = missing_slots([slots], {(0, length): 4}, [used])
    assert [(item.offset, item.count) for item in more] == [(4 * length, 1)]  # two slots and the extent remain
    assert not missing_slots([slots], {(0, length): 4}, [Extent(0, length, length)])
    assert overlapping([used, Extent(0, length, length)]) == Extent(0, length, length)
    assert overlapping([Extent(0, 0, length), Extent(0, length, length), Extent(1, 0, length)]) is None


def test_pages_are_hashed_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums run on hash threads; after these threads have ended, they run on the engine's thread."""
    rig = Rig(tmp_path, hashers=2)
    names: list[str] = []
    both = Barrier(2)

    def hash_together(page: int, content: memoryview) -> int:
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
            patch.setattr(pages_of_store, "checksum", hash_together)
            for index in range(2):
                move(index, memory[index], found.put)
            assert [found.get(timeout=300) for _ in range(2)] == [None, None]
        assert all(name.startswith(thread) for name in names)
        assert len(set(names)) == 2
    assert [bytes(view) for view in memory] == [content_of(index, 0) for index in range(2)]
    extent = rig.version(2).extent
    with open(rig.files[extent.path], "r+b") as file:
        file.seek(extent.offset)
        file.write(b"different")
    with pytest.raises(CorruptPageError):
        rig.read(2)
    rig.store.close()
    assert rig.read(0) == content_of(0, 0)
    rig.engine.close()


class StoreMachine(RuleBasedStateMachine):
    """Writes, failing writes, checkpoints and crashes in any order never overwrite a checkpointed version."""

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

    @precondition(lambda self: all(index in self.current for index in STATE_PAGES))
    @rule(again=st.booleans())
    def save_checkpoint(self, again: bool) -> None:
        self.step += not (again and self.step in self.checkpoints)
        versions = self.rig.store.versions(STATE_PAGES)
        self.rig.store.adopt(self.step, versions)
        self.checkpoints[self.step] = {index: (version, self.current[index]) for index, version in versions.items()}
        for old in sorted(self.checkpoints)[:-RETAINED]:
            del self.checkpoints[old]
        assert self.rig.store.checkpoints == tuple(sorted(self.checkpoints))

    @rule(stored=st.booleans())
    def expect_gradients(self, stored: bool) -> None:
        self.rig.store.expect_gradients(stored)

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
    def checkpointed_versions_are_not_overwritten(self) -> None:
        for pages in self.checkpoints.values():
            for version, content in pages.values():
                assert self.rig.on_disk(version.extent) == content

    @invariant()
    def versions_do_not_overlap(self) -> None:
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


def test_used_slots_are_not_taken() -> None:
    """If no slot is freed in time, an error is raised."""
    used = Extent(0, 4096, 4096)
    allocator = ExtentAllocator((SlotClass(path=0, length=4096, offset=0, count=3),), [used])
    assert {allocator.take(0, 4096, 0.0).offset for _ in range(2)} == {0, 8192}
    with pytest.raises(StallError, match="4096"):
        allocator.take(0, 4096, 0.0)
    allocator.give(used)
    assert allocator.take(0, 4096, 0.0) == used


@given(layouts(), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_pages_follow_the_stripe_weights(layout: Layout, weights: list[int]) -> None:
    """In every prefix of the pages, each path's bytes of a role are within one page of its stripe weight."""
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
    """Each page has a slot per retained checkpoint, one for its current version and some for writes in flight."""
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
    assert classes[: len(fewer)] == fewer, "the slots for more retained checkpoints must include the slots for fewer"


@given(
    st.lists(st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from([4096, 8192, 65536])), st.integers(1, 70)))
)
def test_incremental_slots_equal_slots_planned_at_once(added: list[dict[tuple[int, int], int]]) -> None:
    """Adding pages in several calls yields as many slots as one call, and no slots overlap."""
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


def test_preferred_checkpoint_is_retained(rig: Rig) -> None:
    """Two checkpoints are retained: the newest one, and the preferred one or else the previous one."""
    kept = []
    for step, prefer in enumerate(([], [], [1], [1], [7], []), 1):
        rig.write(0, content_of(0, step))
        assert rig.store.retained_with(step, prefer)[-1] == step
        rig.store.adopt(step, rig.store.versions(STATE_PAGES), prefer)
        kept.append(rig.store.checkpoints)
    assert kept == [(1,), (1, 2), (1, 3), (1, 4), (4, 5), (5, 6)]


def gradient_pages() -> list[int]:
    """Return the indices of the gradient pages."""
    return [item.index for item in PAGES if item.role is Role.GRAD]


def test_gradient_area_is_reserved_on_demand(tmp_path: Path) -> None:
    """The area is released when the plan stores no gradients and no gradient is stored."""
    rig = Rig(tmp_path)
    bare = list(rig.sizes)
    assert sum(bare) == sum(file_sizes(lay_out(PAGES, STRIPE_WEIGHTS, {}, SPARE, RETAINED)[1], 2))
    rig.store.expect_gradients(False)
    assert rig.sizes == bare
    for index in gradient_pages():
        rig.write(index, content_of(index, 1))
    grown = list(rig.sizes)
    assert sum(grown) - sum(bare) >= sum(PAGES[index].nbytes for index in gradient_pages())
    rig.store.expect_gradients(False)  # gradients are still stored
    assert rig.sizes == grown
    assert [rig.read(index) for index in gradient_pages()] == [content_of(index, 1) for index in gradient_pages()]
    for index in gradient_pages():
        rig.store.discard(index)
    assert rig.sizes == grown, "discard must not change the files, because other threads may be waiting"
    rig.store.expect_gradients(False)
    assert rig.sizes == bare
    assert [file.stat().st_size for file in rig.files] == bare
    rig.store.expect_gradients(True)
    assert rig.sizes == grown
    rig.store.expect_gradients(True)
    for index in gradient_pages():
        rig.write(index, content_of(index, 2))
    assert rig.sizes == grown, "the files must grow only once"
    rig.close()


def test_gradient_can_be_written_while_the_area_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that departs from its plan stores a gradient in a new area and does not wait for the release."""
    rig = Rig(tmp_path)
    rig.write(gradient_pages()[0], content_of(gradient_pages()[0], 1))
    rig.store.discard(gradient_pages()[0])
    cut, writer = rig.cut, Thread(target=rig.write, args=(gradient_pages()[0], content_of(gradient_pages()[0], 2)))

    def late(slots: Sequence[SlotClass]) -> None:
        monkeypatch.setattr(rig, "cut", cut)
        writer.start()
        writer.join(0.2)
        cut(slots)

    monkeypatch.setattr(rig, "cut", late)
    rig.store.expect_gradients(False)
    writer.join()
    assert rig.read(gradient_pages()[0]) == content_of(gradient_pages()[0], 2)
    rig.close()


def test_reserve_allocates_only_the_missing_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems emulate allocation by writing, so only new ranges are allocated; holes are filled."""
    calls, allocate = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *call: (calls.append(call[1:]), allocate(*call))[1])
    file = tmp_path / "data"
    reserve(file, MIB)
    reserve(file, 3 * MIB)
    reserve(file, 2 * MIB)
    assert calls == [(0, MIB), (MIB, 2 * MIB)]
    (tmp_path / "holes").write_bytes(b"x" * 4096)  # as a copied run may be
    os.truncate(tmp_path / "holes", MIB)
    reserve(tmp_path / "holes", 2 * MIB)
    assert (tmp_path / "holes").read_bytes() == b"x" * 4096 + bytes(2 * MIB - 4096)
    assert calls[2:] == [(0, 2 * MIB)]
    assert allocated_bytes(tmp_path / "holes") >= 2 * MIB


def test_gradients_on_a_full_drive_raise_without_data_loss(tmp_path: Path) -> None:
    """Both an expected and an unexpected gradient raise BudgetError."""
    rig = Rig(tmp_path)
    rig.write(0, content_of(0, 1))
    rig.full = True
    with pytest.raises(BudgetError, match="the test drive is full"):
        rig.store.expect_gradients(True)
    with pytest.raises(BudgetError, match="the test drive is full"):
        rig.write(gradient_pages()[0], content_of(gradient_pages()[0], 1))
    assert rig.read(0) == content_of(0, 1)
    rig.full = False
    rig.write(gradient_pages()[0], content_of(gradient_pages()[0], 1))
    assert rig.read(gradient_pages()[0]) == content_of(gradient_pages()[0], 1)
    rig.close()


def test_checkpointed_version_is_kept_until_retention_ends(rig: Rig) -> None:
    """The slot is reused after the last checkpoint that refers to it has been dropped."""
    first = rig.version(0)
    rig.store.adopt(1, rig.store.versions(STATE_PAGES))
    extents = set()
    for number in range(1, 20):
        rig.write(0, content_of(0, number))
        extents.add(rig.version(0).extent)
        assert rig.on_disk(first.extent) == content_of(0, 0)
    assert first.extent not in extents
    rig.store.adopt(2, rig.store.versions(STATE_PAGES))
    rig.store.adopt(3, rig.store.versions(STATE_PAGES))
    for number in range(20, 40):
        rig.write(0, content_of(0, number))
        extents.add(rig.version(0).extent)
    assert first.extent in extents


def test_failed_write_keeps_the_old_version(tmp_path: Path) -> None:
    """The error reports the file, and repeated failures consume no slots."""
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


def test_failed_lock_releases_all_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    held = FolderLock.acquire(paths[1:], new_run_id(), 0)
    with pytest.raises(FolderBusyError):
        FolderLock.acquire(paths, new_run_id(), 0)
    FolderLock.acquire(paths[:1], new_run_id(), 0).release()
    held.release()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """The lock file still exists, but the operating system has released the lock."""
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


def test_lock_on_a_removed_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the holder removes its file between our open and our lock, a third process must not get the folder as well."""
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
