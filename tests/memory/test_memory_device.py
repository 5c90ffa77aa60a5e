"""Tests of the device interface: pinning of host memory, waits for events, and the pager with incomplete events."""

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
from infinity.memory import device as device_module
from infinity.memory.device import CudaDevice, Device, wait
from infinity.memory.host_cache import HostCache
from infinity.optim.update_thread import UpdateWorker
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from support.layouts import transformer

PIECE = 4096
PACKAGE = Path(infinity.__file__).parent
SOON, NEVER = 0.05, 300.0
"""Time limits in seconds: one that a test reaches, and one that it does not."""


# Registration #


class Runtime:
    """Fake CUDA runtime that records registrations of host memory."""

    def __init__(self, failing: int = -1) -> None:
        self.failing = failing  # index of the registration that fails, or -1
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
    """Return a factory of CUDA devices over a fake runtime whose pieces hold at most three cache slots."""

    def make(runtime: Runtime) -> SimpleNamespace:
        made = SimpleNamespace(devices=[], cleared=0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "set_device", made.devices.append)
        monkeypatch.setattr(CudaDevice, "_clear", lambda device: setattr(made, "cleared", made.cleared + 1))
        made.device = CudaDevice(torch.device("cuda:1"))
        return made

    assert device_module._LARGEST_PIECE == 64 << 30
    monkeypatch.setattr(device_module, "_LARGEST_PIECE", 3 * PIECE + 100)
    return make


def test_host_memory_is_pinned_in_multiples_of_cache_slots(cuda: Callable[[Runtime], SimpleNamespace]) -> None:
    """Memory is pinned for all devices while this rank's device is current, and unpinned on close."""
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


def test_failed_pinning_releases_all_pieces(cuda: Callable[[Runtime], SimpleNamespace]) -> None:
    """The CUDA error is cleared, and a warning contains it."""
    runtime = Runtime(failing=2)
    made = cuda(runtime)
    with pytest.warns(UserWarning, match=r"12288 bytes.*out of memory: cudaErrorMemoryAllocation, error 2.*ulimit -l"):
        pinned = made.device.pin(memoryview(bytearray(10 * PIECE)), PIECE)
    assert not pinned.registered
    assert len(runtime.registered) == 2
    assert sorted(runtime.unregistered) == [address for address, _, _ in runtime.registered]
    assert made.cleared == 1


# Events #


class ManualEvent:
    """Event that completes when a test sets `open`."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def before(self, stream: object) -> None:
        """Do nothing, because no stream waits for this event."""


def test_wait_ends_when_the_event_completes() -> None:
    gate = ManualEvent()
    threading.Timer(SOON, lambda: setattr(gate, "open", True)).start()
    assert wait(gate, NEVER)


def test_wait_returns_false_after_its_time_limit() -> None:
    began = time.perf_counter()
    assert not wait(ManualEvent(), SOON)
    assert time.perf_counter() - began >= SOON


def test_wait_ends_when_it_is_cancelled() -> None:
    looks = iter([False, False, True])
    assert not wait(ManualEvent(), NEVER, lambda: next(looks))


# The pager #


class ImmediateStore:
    """Store in memory whose transfers complete immediately."""

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
        """Accept any plan, because the store has no size limit."""

    def oldest_request(self) -> tuple[float, str] | None:
        return None


class IgnoringObserver:
    """Observer that ignores all events."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class RecordingCpuDevice(Device):
    """CPU device that records which threads entered it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)


class Bench:
    """Pager over a model with two layers."""

    def __init__(self, timeout: float) -> None:
        self.layout: Layout = transformer(2, 4096, 64 << 10)
        self.device, self.failures = RecordingCpuDevice(), []
        self.store = ImmediateStore()
        host_cache = HostCache(4, self.layout.page_bytes, device=self.device)
        self.pager = Pager(
            self.layout,
            host_cache,
            self.device,
            self.store,
            IgnoringObserver(),
            timeout=timeout,
            failed=self.failures.append,
        )
        self.first, self.second = [page.index for page in self.layout.pages if page.role is Role.PARAM][:2]
        for page in (self.first, self.second):
            self.use(page, Mode.WRITE)

    def use(self, page: int, mode: Mode, event: ManualEvent | None = None) -> None:
        """Use a page, followed by a copy that ends when the event completes."""
        with self.pager.access((Use(page, mode),), planned=False, copies=(lambda: event) if event else None):
            pass


@pytest.fixture
def bench() -> Iterator[Callable[[float], Bench]]:
    """Return a factory of benches, and stop their threads afterwards."""
    made: list[Bench] = []

    def make(timeout: float) -> Bench:
        made.append(Bench(timeout))
        return made[-1]

    yield make
    for each in made:
        each.pager.fail(InfinityError("the test has finished"))
        each.pager._cache.copies.close()


def test_hanging_copy_raises_stall_error(bench: Callable[[float], Bench]) -> None:
    """The error is raised by the thread that waits for the page, and by every later use."""
    made = bench(SOON)
    made.use(made.first, Mode.READ, ManualEvent())
    with pytest.raises(StallError, match="the device to copy"):
        made.use(made.first, Mode.UPDATE)
    assert isinstance(made.failures[0], StallError)
    with pytest.raises(StallError):
        made.use(made.second, Mode.READ)


def test_failure_interrupts_a_wait_for_a_copy(bench: Callable[[float], Bench]) -> None:
    """No thread waits for the device while it holds the lock, so the failure is recorded and raised immediately."""
    made, errors = bench(NEVER), []
    made.use(made.first, Mode.READ, ManualEvent())

    def use() -> None:
        try:
            made.use(made.first, Mode.UPDATE)
        except InfinityError as error:
            errors.append(str(error))

    user = threading.Thread(target=use)
    user.start()
    failer = threading.Thread(target=lambda: made.pager.fail(InfinityError("another rank failed")))
    failer.start()
    failer.join(30)
    user.join(30)
    assert not failer.is_alive()
    assert errors == ["another rank failed"]


def test_modification_waits_for_the_copy_of_a_page(bench: Callable[[float], Bench]) -> None:
    """Reading does not wait."""
    made, gate, changed = bench(NEVER), ManualEvent(), threading.Event()
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
def test_drain_returns_whether_copies_have_ended(ends: bool, bench: Callable[[float], Bench]) -> None:
    """It waits for copies up to the time limit."""
    made, gate = bench(NEVER if ends else SOON), ManualEvent()
    made.use(made.first, Mode.READ, gate)
    if ends:
        threading.Timer(SOON, lambda: setattr(gate, "open", True)).start()
    assert made.pager.drain() is ends


def test_flush_waits_for_copies_from_the_device(bench: Callable[[float], Bench]) -> None:
    """A page is not written to the store while it is being filled."""
    made, gate = bench(NEVER), ManualEvent()
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


def test_update_and_copy_threads_enter_the_device(bench: Callable[[float], Bench]) -> None:
    """A thread that does not enter the device would use the first device."""
    made, gate = bench(NEVER), ManualEvent()
    worker = UpdateWorker(1, made.failures.append, made.device.enter_thread)
    worker.close()
    made.use(made.first, Mode.READ, gate)
    gate.open = True
    assert made.pager.drain()
    assert made.device.threads == ["infinity-update_0", "infinity-copies"]


# Imports of torch.cuda #


def test_torch_cuda_is_used_in_three_modules_only() -> None:
    """Besides the device module, only random states in checkpoints and the mesh use it."""
    named = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    }
    assert named == {"memory/device.py", "checkpoint/model_state.py", "fsdp/mesh.py"}
