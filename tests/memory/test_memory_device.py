"""Tests of the device interface: pinning of host memory, waits for events, and the pager with incomplete events."""

from __future__ import annotations

import ast
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import infinity
from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import InfinityError, StallError
from infinity.memory import device as device_module
from infinity.memory import host_cache as host_cache_module
from infinity.memory.device import AcceleratorDevice, CudaDevice, Device, open_device, opened
from infinity.memory.host_cache import HostCache
from infinity.optim.update_thread import UpdateWorker
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from infinity.schedule.transfers import Transfers
from support.late_copies import ManualEvent
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
        self.device: object = None  # current device when the runtime was last requested

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
        made = SimpleNamespace(devices=["the current device"], cleared=0)

        @contextmanager
        def device(name: torch.device) -> Iterator[None]:
            made.devices.append(name)
            yield
            made.devices.pop()

        def cudart() -> Runtime:
            runtime.device = made.devices[-1]
            return runtime

        monkeypatch.setattr(torch.cuda, "cudart", cudart)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(CudaDevice, "_clear", lambda device: setattr(made, "cleared", made.cleared + 1))
        made.device = CudaDevice(torch.device("cuda:1"))
        return made

    assert device_module._LARGEST_PIECE == 64 << 30
    monkeypatch.setattr(device_module, "_LARGEST_PIECE", 3 * PIECE + 100)
    return make


def test_host_memory_is_pinned_in_multiples_of_cache_slots(cuda: Callable[[Runtime], SimpleNamespace]) -> None:
    """Memory is pinned for all devices while this rank's device is current, and unpinned on close.

    The current device of the caller does not change.
    """
    runtime, memory = Runtime(), memoryview(bytearray(10 * PIECE))
    made = cuda(runtime)
    pinned = made.device.pin(memory, PIECE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert runtime.registered == [(start + 3 * i * PIECE, (3 if i < 3 else 1) * PIECE, 1) for i in range(4)]
    assert (pinned.registered, runtime.device, made.cleared) == (True, torch.device("cuda:1"), 0)
    assert made.devices == ["the current device"]
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


def test_host_cache_is_on_the_numa_node_of_the_gpu(
    cuda: Callable[[Runtime], SimpleNamespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Linux reports the node by PCI address, and -1 if there is only one."""
    device, nodes = cuda(Runtime()).device, []
    bus = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: bus)
    monkeypatch.setattr(device_module, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(host_cache_module, "transfer_memory", lambda size, node: nodes.append(node) or bytearray(size))
    HostCache(1, PIECE, device=device)
    (folder := tmp_path / "0000:1b:00.0").mkdir()
    for node in ("1", "-1"):
        (folder / "numa_node").write_text(f"{node}\n")
        HostCache(1, PIECE, device=device)
    HostCache(1, PIECE, device=Device(torch.device("cpu")))
    assert nodes == [-1, 1, -1, -1]


def test_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened.cache_clear()
    current = iter([1, 0, 1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(current))
    first, second, third = [open_device(torch.device("cuda")) for _ in range(3)]
    assert [first.name, second.name] == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert first is third is open_device(torch.device("cuda:1"))
    opened.cache_clear()


# Captures of CUDA graphs #


def test_own_threads_do_not_disturb_captures_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread changes its capture mode once, after its device became current. Other threads keep theirs."""
    calls: list[tuple[str, object, str]] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
            calls.append((threading.current_thread().name, "mode", mode._obj.value))
            return 0

    def set_device(name: torch.device) -> None:
        calls.append((threading.current_thread().name, "device", name.index))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "Event", lambda **settings: settings)
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    device, stream = CudaDevice(torch.device("cuda:1")), Stream()
    worker = UpdateWorker(1, lambda error: None, device.enter_thread)
    worker.submit(lambda: None)
    worker.close()
    for _ in range(2):
        done, event = threading.Event(), device.record_event(stream)
        event._event.ended.set()
        event.then(lambda _, done=done: done.set())
        assert done.wait(NEVER)
    assert event._event.settings == {"blocking": True}, "the thread that waits must not spin"
    device.end_threads()
    names = ["infinity-update_0", "infinity-events"]
    assert calls == [(name, *call) for name in names for call in (("device", 1), ("mode", 1))]


def test_threads_run_without_a_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm has no such library, and old drivers do not have the function."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    for driver in (SimpleNamespace(), OSError("libcuda.so.1: cannot open shared object file")):
        monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=[driver]))
        CudaDevice(torch.device("cuda:1")).enter_thread()
    assert entered == 2 * [torch.device("cuda:1")]


# Events #


class BlockingEvent:
    """Event of `Stream`, on which a thread can wait without a time limit."""

    def __init__(self, settings: object) -> None:
        self.settings, self.ended = settings, threading.Event()
        self.queries = 0
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        self.queries += 1
        if self.error:
            raise self.error
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.ended.wait()
        if self.error:
            raise self.error


class Stream:
    """Stream whose events end when a test sets them."""

    def record_event(self, event: object) -> BlockingEvent:
        return BlockingEvent(event)


class BlockingDevice(AcceleratorDevice):
    """Accelerator over streams of this module that records the threads that entered it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start a thread that calls a function, and return it with the list that will hold the result or the error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_event_that_has_passed_needs_one_query_and_no_thread() -> None:
    device = BlockingDevice()
    event = device.record_event(Stream())
    event._event.ended.set()
    assert device.wait(event, NEVER)
    assert (event._event.queries, device.threads) == (1, [])


def test_wait_queries_an_event_twice_however_late_it_is() -> None:
    """A thread of the device blocks in the event, and the waiting thread does not query it in the meantime."""
    device = BlockingDevice()
    event = device.record_event(Stream())
    checked = threading.Semaphore(0)
    thread, results = in_thread(lambda: device.wait(event, NEVER, checked.release))
    for _ in range(3):  # checks for errors
        assert checked.acquire(timeout=NEVER)
    event._event.ended.set()
    thread.join()
    assert results == [True]
    assert event._event.queries == 2


def test_streams_do_not_delay_events_of_each_other() -> None:
    """The events of each stream have a thread of their own, which enters the device once."""
    device, first, second = BlockingDevice(), Stream(), Stream()
    late, *ended = [device.record_event(stream) for stream in (first, second, second)]
    order: list[str] = []
    late.then(lambda _: order.append("late"))
    for event in ended:
        event._event.ended.set()
        done = threading.Event()
        event.then(lambda _, done=done: done.set())
        assert done.wait(NEVER)
    assert order == []
    last = device.record_event(first)
    last._event.ended.set()
    last.then(lambda _: done.set())
    done.clear()
    late._event.ended.set()
    assert done.wait(NEVER)
    assert order == ["late"]
    assert device.threads == 2 * ["infinity-events"]


def test_threads_of_a_device_end_unless_the_device_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that are pending at the end are still waited for, and later events start new threads."""
    monkeypatch.setattr(device_module, "_END_SECONDS", SOON)
    device, stream, hanging = BlockingDevice(), Stream(), Stream()
    ended = threading.Semaphore(0)
    late = device.record_event(hanging)
    late.then(lambda _: ended.release())
    hung = device._threads[hanging][0]
    for _ in range(2):
        event = device.record_event(stream)
        event._event.ended.set()
        event.then(lambda _: ended.release())
        assert ended.acquire(timeout=NEVER)
        idle = device._threads[stream][0]
        device.end_threads()
        idle.join(NEVER)
        assert not idle.is_alive()
    assert hung.is_alive()
    late._event.ended.set()
    assert ended.acquire(timeout=NEVER)
    hung.join(NEVER)
    assert not hung.is_alive()
    assert device.threads == 3 * ["infinity-events"]


def test_error_of_the_device_is_raised_by_the_thread_that_waits() -> None:
    device = BlockingDevice()
    event = device.record_event(Stream())
    thread, results = in_thread(lambda: device.wait(event, NEVER))
    event._event.error = RuntimeError("an illegal memory access was encountered")
    event._event.ended.set()
    thread.join()
    assert results == [event._event.error]


def test_wait_returns_false_after_its_time_limit() -> None:
    began = time.perf_counter()
    assert not Device(torch.device("cpu")).wait(ManualEvent(), SOON)
    assert time.perf_counter() - began >= SOON


def test_time_limit_of_a_wait_starts_again_when_the_device_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computation that was queued earlier does not count."""
    monkeypatch.setattr(device_module, "_CHECK_SECONDS", SOON)
    device, looks = Device(torch.device("cpu")), 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        device.progress += looks < 5
        return False

    assert not device.wait(ManualEvent(), 2.5 * SOON, look)
    assert looks == 8, "the fifth look finds the last progress, and the limit is exceeded three looks later"


def test_wait_ends_when_it_is_cancelled() -> None:
    looks = iter([False, False, True])
    assert not Device(torch.device("cpu")).wait(ManualEvent(), NEVER, lambda: next(looks))


def test_wait_is_interrupted_by_ctrl_c() -> None:
    """Nothing but the signal ends the wait."""
    timer = threading.Timer(SOON, lambda: signal.raise_signal(signal.SIGINT))

    def look() -> bool:
        if timer.ident is None:
            timer.start()
        return False

    with pytest.raises(KeyboardInterrupt):
        Device(torch.device("cpu")).wait(ManualEvent(), float("inf"), look)


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


class Bench:
    """Pager over a model with two layers."""

    def __init__(self, timeout: float) -> None:
        self.layout: Layout = transformer(2, 4096, 64 << 10)
        self.device, self.failures = Device(torch.device("cpu")), []
        self.store = ImmediateStore()
        host_cache = HostCache(4, self.layout.page_bytes, device=self.device)
        self.pager = Pager(
            self.layout,
            host_cache.cache_slots,
            self.device,
            self.store,
            Transfers(IgnoringObserver(), timeout=timeout, failed=self.failures.append),
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
        each.pager._cache.close()


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
    gate.set()
    assert changed.wait(30)
    user.join()


@pytest.mark.parametrize("ends", [True, False])
def test_drain_returns_whether_copies_have_ended(ends: bool, bench: Callable[[float], Bench]) -> None:
    """It waits for copies up to the time limit."""
    made, gate = bench(NEVER if ends else SOON), ManualEvent()
    made.use(made.first, Mode.READ, gate)
    if ends:
        threading.Timer(SOON, gate.set).start()
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
    gate.set()
    flusher.join(30)
    assert made.first in made.store.pages


class Progress:
    """Progress of a device that never stops."""

    def __init__(self) -> None:
        self.compared = threading.Semaphore(0)

    def __eq__(self, other: object) -> bool:
        self.compared.release()
        return False

    __hash__ = None


def test_hanging_device_fails_the_run_although_no_thread_waits(bench: Callable[[float], Bench]) -> None:
    """The watchdog reports it, for example while the training thread is blocked in torch."""
    made = bench(SOON)
    made.use(made.first, Mode.READ, ManualEvent())
    while not made.failures:
        time.sleep(SOON)
    assert isinstance(made.failures[0], StallError)


def test_watchdog_counts_from_the_last_progress_of_the_device(bench: Callable[[float], Bench]) -> None:
    made = bench(SOON)
    made.device.progress = progress = Progress()
    made.use(made.first, Mode.READ, ManualEvent())
    for _ in range(20):
        assert progress.compared.acquire(timeout=NEVER)
    assert made.failures == []


def test_wait_for_a_page_counts_from_the_last_copy(bench: Callable[[float], Bench]) -> None:
    """The device may need longer than the time limit for all copies of a page."""
    made, first, second = bench(SOON), ManualEvent(), ManualEvent()
    made.device.progress = Progress()
    for gate in (first, second):
        made.use(made.first, Mode.READ, gate)
    began, transfers = time.perf_counter(), made.pager.transfers
    first.set()
    assert began < transfers.copied < time.perf_counter()
    transfers.copied += NEVER  # as if the copy ended later
    user, results = in_thread(lambda: made.use(made.first, Mode.UPDATE))
    user.join(10 * SOON)
    assert user.is_alive()
    second.set()
    user.join()
    assert results == [None]


def test_copies_that_end_after_close_are_ignored(bench: Callable[[float], Bench]) -> None:
    """The device may respond after the run has given up and closed its store."""
    made, gate = bench(SOON), ManualEvent()
    made.use(made.first, Mode.READ, gate)
    assert not made.pager.drain()
    gate.set()
    assert made.pager._cache.copies == 1


def test_update_and_event_threads_enter_the_device() -> None:
    """A thread that does not enter the device would use the first device."""
    device, done = BlockingDevice(), threading.Event()
    worker = UpdateWorker(1, lambda error: None, device.enter_thread)
    worker.close()
    event = device.record_event(Stream())
    event._event.ended.set()
    event.then(lambda _: done.set())
    assert done.wait(NEVER)
    assert device.threads == ["infinity-update_0", "infinity-events"]


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
