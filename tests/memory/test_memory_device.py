"""The room of the device: registration, waits, and what the pager does with marks that are not passed."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import infinity
from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import InfinityError, StallError
from infinity.memory import device as room
from infinity.memory.device import CpuDevice, CudaDevice, wait
from infinity.memory.host_cache import HostCache
from infinity.optim.update_thread import UpdateWorker
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from support.layouts import transformer

PIECE = 4096
PACKAGE = Path(infinity.__file__).parent
SOON, NEVER = 0.05, 300.0
"""Seconds: a time limit that is to be reached, one that is not."""


# Registration #


class Runtime:
    """What CUDA's runtime does with host memory, and what it was asked to."""

    def __init__(self, failing: int = -1) -> None:
        self.failing = failing  # which registration fails; -1: none
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.registered) == self.failing:
            return 2
        self.registered.append((address, nbytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0

    def cudaError(self, status: int) -> str:
        return {2: "cudaErrorMemoryAllocation"}[status]

    def cudaGetErrorString(self, error: str) -> str:
        return f"out of memory: {error}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runtime], SimpleNamespace]:
    """Return what makes a CUDA device over a runtime, with what was done besides;

    largest pieces are 3 cache slots long.
    """

    def make(runtime: Runtime) -> SimpleNamespace:
        made = SimpleNamespace(devices=[], cleared=0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "set_device", made.devices.append)
        monkeypatch.setattr(CudaDevice, "_clear", lambda device: setattr(made, "cleared", made.cleared + 1))
        made.device = CudaDevice(torch.device("cuda:1"))
        return made

    assert room._LARGEST_PIECE == 64 << 30
    monkeypatch.setattr(room, "_LARGEST_PIECE", 3 * PIECE + 100)
    return make


def test_memory_is_registered_in_pieces_of_whole_cache_slots(cuda: Callable[[Runtime], SimpleNamespace]) -> None:
    """For all devices of the process, with this rank's one current; and unregistered so."""
    runtime, memory = Runtime(), memoryview(bytearray(10 * PIECE))
    made = cuda(runtime)
    pinned = made.device.pin(memory, PIECE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert runtime.registered == [(start + 3 * i * PIECE, (3 if i < 3 else 1) * PIECE, 1) for i in range(4)]
    assert (pinned.registered, made.devices, made.cleared) == (True, [torch.device("cuda:1")], 0)
    pinned.close()
    pinned.close()
    assert sorted(runtime.unregistered) == [address for address, _, _ in runtime.registered]
    assert not pinned.registered


def test_a_piece_that_fails_leaves_none(cuda: Callable[[Runtime], SimpleNamespace]) -> None:
    """The error does not stay for the next launch, and a warning says what it was."""
    runtime = Runtime(failing=2)
    made = cuda(runtime)
    with pytest.warns(UserWarning, match=r"12288 bytes.*out of memory: cudaErrorMemoryAllocation, error 2.*ulimit -l"):
        pinned = made.device.pin(memoryview(bytearray(10 * PIECE)), PIECE)
    assert not pinned.registered
    assert len(runtime.registered) == 2
    assert sorted(runtime.unregistered) == [address for address, _, _ in runtime.registered]
    assert made.cleared == 1


# Marks #


class Gate:
    """A mark that is passed when somebody says so."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def before(self, stream: object) -> None:
        """Nothing waits for it here."""


def test_a_wait_ends_when_the_mark_is_passed() -> None:
    """However often it has to look."""
    gate = Gate()
    threading.Timer(SOON, lambda: setattr(gate, "open", True)).start()
    assert wait(gate, NEVER)


def test_a_wait_has_a_time_limit() -> None:
    """And says so."""
    began = time.perf_counter()
    assert not wait(Gate(), SOON)
    assert time.perf_counter() - began >= SOON


def test_a_wait_is_given_up() -> None:
    """When nobody needs it any more."""
    looks = iter([False, False, True])
    assert not wait(Gate(), NEVER, lambda: next(looks))


# The pager #


class Kept:
    """A store that has pages in memory, and is always done."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def read(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        memory[:] = self.pages[page]
        done(None)

    def write(self, page: int, memory: memoryview, done: Callable[[Exception | None], None]) -> None:
        self.pages[page] = bytes(memory)
        done(None)

    def discard(self, page: int) -> None:
        self.pages.pop(page, None)

    def has(self, page: int) -> bool:
        return page in self.pages

    def expect_gradients(self, stored: bool) -> None:
        """Always has room."""

    def oldest_request(self) -> tuple[float, str] | None:
        return None


class Silence:
    """Is told what the pager does."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Entered(CpuDevice):
    """A CPU that notes which threads entered it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)


class Bench:
    """A pager over two pages of weights."""

    def __init__(self, timeout: float) -> None:
        self.layout: Layout = transformer(2, 4096, 64 << 10)
        self.device, self.failures = Entered(), []
        self.store = Kept()
        host_cache = HostCache(4, self.layout.page_bytes, device=self.device)
        self.pager = Pager(
            self.layout, host_cache, self.device, self.store, Silence(), timeout=timeout, failed=self.failures.append
        )
        self.first, self.second = [page.index for page in self.layout.pages if page.role is Role.PARAM][:2]
        for page in (self.first, self.second):
            self.use(page, Mode.WRITE)

    def use(self, page: int, mode: Mode, mark: Gate | None = None) -> None:
        """Use a page, with a copy behind it that has ended when the mark is passed."""
        with self.pager.access((Use(page, mode),), planned=False, copies=(lambda: mark) if mark else None):
            pass


@pytest.fixture
def bench() -> Iterator[Callable[[float], Bench]]:
    """Return what makes a bench; its thread ends."""
    made: list[Bench] = []

    def make(timeout: float) -> Bench:
        made.append(Bench(timeout))
        return made[-1]

    yield make
    for each in made:
        each.pager.fail(InfinityError("the test has ended"))
        each.pager._cache.copies.close()


def test_a_copy_that_never_ends_is_an_error(bench: Callable[[float], Bench]) -> None:
    """For whoever waits for the page, and for everybody from then on."""
    made = bench(SOON)
    made.use(made.first, Mode.READ, Gate())
    with pytest.raises(StallError, match="the device to copy"):
        made.use(made.first, Mode.UPDATE)
    assert isinstance(made.failures[0], StallError)
    with pytest.raises(StallError):
        made.use(made.second, Mode.READ)


def test_a_failure_is_told_while_a_copy_is_waited_for(bench: Callable[[float], Bench]) -> None:
    """Nobody waits for the device under the lock: the failure is noted, and raised, at once."""
    made, told = bench(NEVER), []
    made.use(made.first, Mode.READ, Gate())

    def use() -> None:
        try:
            made.use(made.first, Mode.UPDATE)
        except InfinityError as error:
            told.append(str(error))

    user = threading.Thread(target=use)
    user.start()
    failer = threading.Thread(target=lambda: made.pager.fail(InfinityError("another rank failed")))
    failer.start()
    failer.join(30)
    user.join(30)
    assert not failer.is_alive()
    assert told == ["another rank failed"]


def test_a_page_is_changed_behind_its_copy_only(bench: Callable[[float], Bench]) -> None:
    """Reading it needs no wait."""
    made, gate, changed = bench(NEVER), Gate(), threading.Event()
    made.use(made.first, Mode.READ, gate)
    made.use(made.first, Mode.READ)

    def change() -> None:
        made.use(made.first, Mode.UPDATE)
        changed.set()

    user = threading.Thread(target=change)
    user.start()
    assert not changed.wait(SOON)
    gate.open = True
    assert changed.wait(30)
    user.join()


@pytest.mark.parametrize("ends", [True, False])
def test_drain_says_whether_the_device_is_done(ends: bool, bench: Callable[[float], Bench]) -> None:
    """It waits for copies, as long as everything else is waited for."""
    made, gate = bench(NEVER if ends else SOON), Gate()
    made.use(made.first, Mode.READ, gate)
    if ends:
        threading.Timer(SOON, lambda: setattr(gate, "open", True)).start()
    assert made.pager.drain() is ends


def test_flush_waits_for_what_comes_from_the_device(bench: Callable[[float], Bench]) -> None:
    """A page that is being filled is not written before."""
    made, gate = bench(NEVER), Gate()
    made.pager.flush()
    made.store.pages.clear()
    made.use(made.first, Mode.UPDATE, gate)
    flusher = threading.Thread(target=made.pager.flush)
    flusher.start()
    flusher.join(SOON)
    assert made.first not in made.store.pages
    gate.open = True
    flusher.join(30)
    assert made.first in made.store.pages


def test_threads_enter_the_device(bench: Callable[[float], Bench]) -> None:
    """That of updates, and that which waits for copies: a thread that does not takes the first device."""
    made, gate = bench(NEVER), Gate()
    worker = UpdateWorker(1, made.failures.append, made.device.enter_thread)
    worker.close()
    made.use(made.first, Mode.READ, gate)
    gate.open = True
    assert made.pager.drain()
    assert made.device.threads == ["infinity-update_0", "infinity-copies"]


# The one room #


def test_only_one_room_names_cuda() -> None:
    """But for random states in checkpoints, and the mesh."""
    named = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    }
    assert named == {"memory/device.py", "checkpoint/model_state.py", "fsdp/mesh.py"}
