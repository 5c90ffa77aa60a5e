"""The device that computes: its streams, marks on them, and host memory that it copies to and from.

What is asynchronous on a device is here and nowhere else, and nothing else in the package names `torch.cuda` (random
states in checkpoints and `infinity.mesh` apart). `AcceleratorDevice` is written with what `torch.get_device_module` has
for
every accelerator, as FSDP2 is; what only CUDA has, registered host memory, is in `CudaDevice`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, Protocol

import torch

from infinity import interrupts
from infinity.hugepages import transfer_memory
from infinity.memory.limits import device_margin
from infinity.units import GIB

Stream = Any
"""A queue of the device, of the kind that its module has; None on the CPU."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 100e-6, 1e-3
"""Seconds between two looks at a mark: twice as many after each, at first as many as a page takes. A look needs the
lock of Python, which the thread that launches kernels has to give up for it."""
_LARGEST_PIECE: Final = 64 * GIB
"""Most bytes that are registered at once: newer drivers refuse single registrations of half a TiB."""
_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: pinned for every device of this process, whichever was current."""


class DeviceEvent(Protocol):
    """A point on a stream, behind all that the stream has been given so far."""

    def passed(self) -> bool:
        """Whether the device has come there; never waits."""

    def before(self, stream: Stream) -> None:
        """Let all that a stream is given from now on wait for it. The host does not wait."""


class Pinned(Protocol):
    """Host memory that is registered, so that copies run beside the host."""

    @property
    def registered(self) -> bool:
        """Whether it is."""

    def close(self) -> None:
        """Unregister it."""


class Device(Protocol):
    """What computes. Every method may be called from any thread."""

    name: torch.device
    """Which one."""
    asynchronous: bool
    """Whether operations are only queued when they return."""

    def enter_thread(self) -> None:
        """Make it this thread's device: a thread that has none takes the first one."""

    def current(self) -> Stream:
        """Return the stream that operations of this thread go to."""

    def stream(self, purpose: str) -> Stream:
        """Return a stream of its own for a purpose, always the same one."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Let operations of this thread go to a stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy between host and device, in either direction, or on the device; of one shape, contiguous on the host."""

    def take_copied(self) -> tuple[int, int]:
        """Return the bytes that were copied to it and from it since the last call."""

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return a mark behind all that a stream has been given."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the memory of a tensor not be used again before a stream has done what it has been given so far."""

    def spare_bytes(self) -> int:
        """Return how much of its memory may be used for what only saves time: what is free but for a margin."""

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register host memory, in parts that begin at multiples of `piece` bytes; warns where that fails."""


class _Passed:
    """The mark of a device that has done everything when a call returns."""

    def passed(self) -> bool:
        """Return True."""
        return True

    def before(self, stream: Stream) -> None:
        """Do nothing."""


class _Unregistered:
    @property
    def registered(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing."""


class CpuDevice:
    """The CPU: copies are done when they return, and there are no streams."""

    asynchronous = False

    def __init__(self, name: torch.device) -> None:
        self.name = name

    def enter_thread(self) -> None:
        """Do nothing."""

    def current(self) -> Stream:
        """Return None, as `stream`."""

    def stream(self, purpose: str) -> Stream:
        """Return None: there is none."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy, at once."""
        target.copy_(source)

    def take_copied(self) -> tuple[int, int]:
        """Return zeros: it computes in the host's memory."""
        return 0, 0

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return a mark that has been passed."""
        return _Passed()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""

    def spare_bytes(self) -> int:
        """Return 0: it computes in the host's memory."""
        return 0

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Do nothing."""
        return _Unregistered()


class _StreamEvent:
    """A mark that is an event of the device."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def passed(self) -> bool:
        """Whether the device has come there."""
        return bool(self._event.query())

    def before(self, stream: Stream) -> None:
        """Let a stream wait for it."""
        stream.wait_event(self._event)


class AcceleratorDevice:
    """Any accelerator that torch has. Host memory is not registered, so copies wait for one another."""

    asynchronous = True

    def __init__(self, name: torch.device) -> None:
        self._module: Any = torch.get_device_module(name.type)  # torch.cuda and its like
        index = name.index if name.index is not None else self._module.current_device()
        self.name = name if name.type == "cpu" else torch.device(name.type, index)
        self._streams: dict[str, Stream] = {}  # by purpose, made when they are first asked for; under `_lock`
        self._copied = {True: 0, False: 0}  # bytes, to the host or from it, since `take_copied`; under `_lock`
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        """Make it this thread's device."""
        self._module.set_device(self.name)

    def current(self) -> Stream:
        """Return the stream that operations of this thread go to."""
        return self._module.current_stream(self.name)

    def stream(self, purpose: str) -> Stream:
        """Return the stream for a purpose."""
        with self._lock:
            if purpose not in self._streams:
                self._streams[purpose] = self._module.Stream(device=self.name)
            return self._streams[purpose]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Let operations of this thread go to a stream."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy."""
        back = self._is_host(target)
        if back or self._is_host(source):
            with self._lock:
                self._copied[back] += target.nbytes
        with self.on(stream):
            # With another dtype torch copies through memory of its own, and on the host does not wait for that copy.
            target.copy_(source.to(target.dtype), non_blocking=True)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def take_copied(self) -> tuple[int, int]:
        """Return the bytes that were copied to the device and from it since the last call."""
        with self._lock:
            copied, self._copied = self._copied, {True: 0, False: 0}
        return copied[False], copied[True]

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return a mark behind all that a stream has been given."""
        return _StreamEvent(stream.record_event())

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the allocator wait for a stream."""
        tensor.record_stream(stream)

    def spare_bytes(self) -> int:
        """Return what is free, less a margin for longer steps."""
        free, total = self._memory()
        return max(0, free - device_margin(total))

    def _memory(self) -> tuple[int, int]:
        """Return the bytes that nobody holds, and those of all memory."""
        free, total = self._module.mem_get_info(self.name)
        return int(free), int(total)

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Do nothing: there is no call for it that all accelerators have."""
        return _Unregistered()


class CudaDevice(AcceleratorDevice):
    """A GPU of CUDA or ROCm."""

    def _memory(self) -> tuple[int, int]:
        """Return what is free and what there is, as far as this process may have it."""
        free, total = super()._memory()
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.name) * total)
        return min(free, allowed - torch.cuda.memory_reserved(self.name)), allowed

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register memory."""
        self.enter_thread()
        return _Registered(memory, piece, torch.cuda.cudart(), self._clear)  # type: ignore[no-untyped-call]

    def _clear(self) -> None:
        """Have an error reported that CUDA keeps for the next call that looks: an innocent one would raise it."""
        try:
            torch.zeros(1, device=self.name)
            torch.cuda.synchronize(self.name)
        except RuntimeError:
            return


class _Registered:
    """Host memory that CUDA has registered, piece by piece; nothing of it stays registered where one piece fails."""

    def __init__(self, memory: memoryview, piece: int, cudart: Any, clear: Callable[[], None]) -> None:
        self._cudart = cudart
        self._addresses: list[int] = []  # of the pieces that are registered
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        step = max(1, _LARGEST_PIECE // piece) * piece
        for offset in range(0, len(memory), step):
            nbytes = min(step, len(memory) - offset)
            status = int(cudart.cudaHostRegister(start + offset, nbytes, _PORTABLE))
            if status:
                clear()
                self.close()
                warnings.warn(
                    f"CUDA did not register {nbytes} bytes of host memory ({_error(cudart, status)}); copies to and "
                    "from the device will be slower: raise the limit of locked memory (ulimit -l)",
                    stacklevel=4,
                )
                return
            self._addresses.append(start + offset)

    @property
    def registered(self) -> bool:
        return bool(self._addresses)

    def close(self) -> None:
        """Unregister all pieces."""
        while self._addresses:
            self._cudart.cudaHostUnregister(self._addresses.pop())


def _error(cudart: Any, status: int) -> str:
    """Return what CUDA says about an error, with its number."""
    try:
        return f"{cudart.cudaGetErrorString(cudart.cudaError(status))}, error {status}"
    except (AttributeError, TypeError, ValueError):
        return f"error {status}"


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": CpuDevice, "meta": CpuDevice, "cuda": CudaDevice}
"""By type of device; any other is an `AcceleratorDevice`. What is on the meta device does nothing at any time."""


@cache
def open_device(name: torch.device) -> Device:
    """Return the device of this name, always the same one."""
    return KINDS.get(name.type, AcceleratorDevice)(name)


def transfer_bytes(device: Device, nbytes: int, piece: int) -> tuple[torch.Tensor, Pinned]:
    """Return host memory that a device copies to and from, as bytes, and its registration; see `Device.pin`."""
    memory = transfer_memory(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8), device.pin(memory, piece)


def wait(device_event: DeviceEvent, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Wait until a mark has been passed; never under a lock.

    The host looks again and again: an event has no wait with a time limit.

    Args:
        timeout: seconds.
        given_up: ends the wait when it is true.

    Returns:
        Whether it has been passed.
    """
    deadline, pause = time.perf_counter() + timeout, _SHORTEST_SLEEP
    while not device_event.passed():
        if given_up() or time.perf_counter() >= deadline:
            return False
        time.sleep(pause)
        interrupts.check()
        pause = min(2 * pause, _LONGEST_SLEEP)
    return True
