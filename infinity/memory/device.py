"""Compute devices: streams, events, and host memory for copies to and from a device.

All asynchronous device operations are in this module, and no other module of the package uses `torch.cuda`, except for
random states in checkpoints and `infinity.mesh`. `AcceleratorDevice` uses only functions that `torch.get_device_module`
provides for every accelerator, like FSDP2. Registered host memory, which only CUDA provides, is in `CudaDevice`.
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
"""Stream of the device, of the type that its module defines. ``None`` on the CPU."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 100e-6, 1e-3
"""Limits for the pause between two queries of an event, in seconds. The pause doubles after each query. The shortest
one is the time that one page takes. A query needs the GIL, which delays the thread that launches kernels."""
_LARGEST_PIECE: Final = 64 * GIB
"""Maximum number of bytes per registration. Newer drivers reject single registrations of 512 GiB."""
_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: pinned for every device of this process, whichever was current."""


class DeviceEvent(Protocol):
    """Point on a stream, after all operations that were queued before."""

    def passed(self) -> bool:
        """Return whether the device has reached the event, without blocking."""

    def before(self, stream: Stream) -> None:
        """Make further operations on a stream wait for the event, without blocking the host."""


class Pinned(Protocol):
    """Registered host memory, to and from which copies run asynchronously."""

    @property
    def registered(self) -> bool:
        """``True`` if the memory is registered."""

    def close(self) -> None:
        """Unregister the memory."""


class Device(Protocol):
    """Compute device. All methods are thread-safe."""

    name: torch.device
    """Device as torch names it."""
    asynchronous: bool
    """``True`` if operations return before they have completed."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread. By default, a thread uses the first device."""

    def current(self) -> Stream:
        """Return the current stream of the calling thread."""

    def stream(self, purpose: str) -> Stream:
        """Return the stream for a purpose. Each purpose has its own stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context manager that queues operations of the calling thread on a stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy between host and device or within the device. Shapes are equal, and host tensors are contiguous."""

    def take_copied(self) -> tuple[int, int]:
        """Return the number of bytes copied to the device and from it since the last call."""

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return an event after all operations that a stream has been given."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Prevent reuse of a tensor's memory until a stream has completed its queued operations."""

    def spare_bytes(self) -> int:
        """Return the device memory available for optional buffers in bytes: free memory less a margin."""

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register host memory, in parts that start at multiples of `piece` bytes. Emit a warning if that fails."""


class _Passed:
    """Event of a device whose operations have completed when they return."""

    def passed(self) -> bool:
        """Return ``True``."""
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
    """CPU device. Copies are synchronous, and there are no streams."""

    asynchronous = False

    def __init__(self, name: torch.device) -> None:
        self.name = name

    def enter_thread(self) -> None:
        """Do nothing."""

    def current(self) -> Stream:
        """Return ``None``, like `stream`."""

    def stream(self, purpose: str) -> Stream:
        """Return ``None``, because the CPU has no streams."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy synchronously."""
        target.copy_(source)

    def take_copied(self) -> tuple[int, int]:
        """Return zeros, because the CPU computes in host memory."""
        return 0, 0

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return an event that has passed."""
        return _Passed()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing."""

    def spare_bytes(self) -> int:
        """Return 0, because the CPU computes in host memory."""
        return 0

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Return unregistered memory."""
        return _Unregistered()


class _StreamEvent:
    """Event recorded on a stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def passed(self) -> bool:
        """Return whether the device has reached the event."""
        return bool(self._event.query())

    def before(self, stream: Stream) -> None:
        """Make a stream wait for the event."""
        stream.wait_event(self._event)


class AcceleratorDevice:
    """Any accelerator that torch supports. Host memory is not registered, so copies are not concurrent."""

    asynchronous = True

    def __init__(self, name: torch.device) -> None:
        self._module: Any = torch.get_device_module(name.type)  # e.g. torch.cuda
        index = name.index if name.index is not None else self._module.current_device()
        self.name = name if name.type == "cpu" else torch.device(name.type, index)
        self._streams: dict[str, Stream] = {}  # by purpose, created on first use; guarded by `_lock`
        self._copied = {True: 0, False: 0}  # bytes to the host (True) and from it (False); guarded by `_lock`
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread."""
        self._module.set_device(self.name)

    def current(self) -> Stream:
        """Return the current stream of the calling thread."""
        return self._module.current_stream(self.name)

    def stream(self, purpose: str) -> Stream:
        """Return the stream for a purpose."""
        with self._lock:
            if purpose not in self._streams:
                self._streams[purpose] = self._module.Stream(device=self.name)
            return self._streams[purpose]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context manager that queues operations of the calling thread on a stream."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on a stream."""
        back = self._is_host(target)
        if back or self._is_host(source):
            with self._lock:
                self._copied[back] += target.nbytes
        with self.on(stream):
            # If the dtypes differ, torch copies through a temporary buffer and, on the host, does not wait for that
            # copy.
            target.copy_(source.to(target.dtype), non_blocking=True)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def take_copied(self) -> tuple[int, int]:
        """Return the number of bytes copied to the device and from it since the last call."""
        with self._lock:
            copied, self._copied = self._copied, {True: 0, False: 0}
        return copied[False], copied[True]

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Return an event after all operations that a stream has been given."""
        return _StreamEvent(stream.record_event())

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Make the allocator wait for a stream."""
        tensor.record_stream(stream)

    def spare_bytes(self) -> int:
        """Return free memory less a margin for longer steps, in bytes."""
        free, total = self._memory()
        return max(0, free - device_margin(total))

    def _memory(self) -> tuple[int, int]:
        """Return the number of free bytes and of all bytes."""
        free, total = self._module.mem_get_info(self.name)
        return int(free), int(total)

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Return unregistered memory, because accelerators have no common call that registers memory."""
        return _Unregistered()


class CudaDevice(AcceleratorDevice):
    """GPU of CUDA or ROCm."""

    def _memory(self) -> tuple[int, int]:
        """Return free and total memory within the limit of this process, in bytes."""
        free, total = super()._memory()
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.name) * total)
        return min(free, allowed - torch.cuda.memory_reserved(self.name)), allowed

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register memory with CUDA."""
        self.enter_thread()
        return _Registered(memory, piece, torch.cuda.cudart(), self._clear)  # type: ignore[no-untyped-call]

    def _clear(self) -> None:
        """Clear the error that CUDA keeps after a failed call. Otherwise the next, unrelated call would raise it."""
        try:
            torch.zeros(1, device=self.name)
            torch.cuda.synchronize(self.name)
        except RuntimeError:
            return


class _Registered:
    """Host memory registered with CUDA, piece by piece. If one piece fails, all pieces are unregistered."""

    def __init__(self, memory: memoryview, piece: int, cudart: Any, clear: Callable[[], None]) -> None:
        self._cudart = cudart
        self._addresses: list[int] = []  # of registered pieces
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        step = max(1, _LARGEST_PIECE // piece) * piece
        for offset in range(0, len(memory), step):
            nbytes = min(step, len(memory) - offset)
            status = int(cudart.cudaHostRegister(start + offset, nbytes, _PORTABLE))
            if status:
                clear()
                self.close()
                warnings.warn(
                    f"CUDA did not register {nbytes} bytes of host memory ({_error(cudart, status)}), so copies to and "
                    "from the device are slower. Raise the limit of locked memory (ulimit -l).",
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
    """Return CUDA's description of an error and its number."""
    try:
        return f"{cudart.cudaGetErrorString(cudart.cudaError(status))}, error {status}"
    except (AttributeError, TypeError, ValueError):
        return f"error {status}"


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": CpuDevice, "meta": CpuDevice, "cuda": CudaDevice}
"""Device classes by type. Any other type uses `AcceleratorDevice`. Operations on the meta device do nothing."""


@cache
def open_device(name: torch.device) -> Device:
    """Return the device of this name. Repeated calls return the same object."""
    return KINDS.get(name.type, AcceleratorDevice)(name)


def transfer_bytes(device: Device, nbytes: int, piece: int) -> tuple[torch.Tensor, Pinned]:
    """Return host memory for device copies as a byte tensor, and its registration. See `Device.pin`."""
    memory = transfer_memory(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8), device.pin(memory, piece)


def wait(device_event: DeviceEvent, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Wait until an event has passed. The caller must not hold a lock.

    The host polls, because events have no wait with a timeout.

    Args:
        device_event: Event to wait for.
        timeout: Maximum time to wait, in seconds.
        given_up: Ends the wait when it returns ``True``.

    Returns:
        ``True`` if the event has passed.
    """
    deadline, pause = time.perf_counter() + timeout, _SHORTEST_SLEEP
    while not device_event.passed():
        if given_up() or time.perf_counter() >= deadline:
            return False
        time.sleep(pause)
        interrupts.check()
        pause = min(2 * pause, _LONGEST_SLEEP)
    return True
