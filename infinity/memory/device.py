"""Compute devices: streams, events, and host memory for copies to and from a device.

This module contains all asynchronous device operations. No other module of the package uses `torch.cuda`, except
`infinity.mesh` and the code that saves random states in checkpoints. Like FSDP2, `AcceleratorDevice` uses only
functions that `torch.get_device_module` provides for every accelerator. `CudaDevice` adds registered host memory, which
only CUDA provides.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import torch

from infinity import interrupts
from infinity.hugepages import transfer_memory
from infinity.memory.limits import device_margin
from infinity.units import GIB

Stream = Any
"""Stream of a device. The device module defines its type, for example `torch.cuda.Stream`. ``None`` on the CPU."""
_CHECK_SECONDS: Final = 0.1
"""Interval in seconds at which a thread that waits for an event checks for errors, interrupts and its time limit."""
_END_SECONDS: Final = 1.0
"""Maximum time to wait for the end of a thread that waits for events, in seconds."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_LARGEST_PIECE: Final = 64 * GIB
"""Maximum number of bytes per registration. Recent drivers reject a single registration of 512 GiB."""
_THREAD_LOCAL: Final = 1
"""`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: captures of CUDA graphs by other threads do not restrict this thread."""
_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: the memory is pinned for all devices of this process, not only for the current one."""


class DeviceEvent:
    """Point on a stream, after all operations that were queued previously.

    An event of this base class has always passed.
    """

    def passed(self) -> bool:
        """Return whether the device has reached the event, without blocking."""
        return True

    def before(self, stream: Stream) -> None:
        """Make all operations that are queued on a stream from now on wait for the event, without blocking the host."""

    def then(self, function: Callable[[Exception | None], None]) -> None:
        """Call a function, from any thread, once the device has passed the event.

        Args:
            function: Function that is called with the device's error or ``None``. It must not raise.
        """
        function(None)


class Pinned:
    """Host memory that may be registered with a device, so that copies to and from it are asynchronous."""

    def __init__(self) -> None:
        self.pieces: list[Callable[[], object]] = []
        """Functions that unregister one registered piece of the memory each."""

    @property
    def registered(self) -> bool:
        """``True`` if the memory is registered."""
        return bool(self.pieces)

    def close(self) -> None:
        """Unregister the memory."""
        while self.pieces:
            self.pieces.pop()()


class Device:
    """Compute device. All methods are thread-safe.

    This base class is the CPU: it computes in host memory, copies synchronously, and has no streams (``None``).
    """

    asynchronous = False
    """``True`` if operations may return before they have completed."""
    progress = 0
    """Number that changes whenever the device passes an event for which a thread waits. Read by any thread."""

    def __init__(self, name: torch.device) -> None:
        self.name = name
        """The corresponding PyTorch device."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread. The default in a new thread is the first device."""

    def current(self) -> Stream:
        """Return the current stream of the calling thread."""

    def stream(self, purpose: str) -> Stream:
        """Return the stream for the given purpose. Each purpose has its own stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context manager that queues operations of the calling thread on a stream."""
        return nullcontext()

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor], stream: Stream = None) -> None:
        """Copy tensors between host and device, or within the device. By default, use the current stream.

        Shapes and dtypes must be equal, and host tensors contiguous.
        """
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def take_copied(self) -> tuple[int, int]:
        """Return the number of bytes copied to the device and from it since the last call."""
        return 0, 0

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Record an event on a stream, after all operations that have been queued so far."""
        return DeviceEvent()

    def wait(self, device_event: DeviceEvent, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the device has passed an event. The caller must not hold a lock.

        Args:
            device_event: Event to wait for.
            timeout: Maximum time without progress of the device, in seconds. The work before the event may include a
                long computation.
            given_up: Function that ends the wait early by returning ``True``.

        Returns:
            ``True`` if the device has passed the event.
        """
        if device_event.passed():
            return True
        ended, errors = threading.Event(), list[Exception | None]()

        def end(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        device_event.then(end)
        progress, quiet = self.progress, 0.0
        pause = min(timeout, _CHECK_SECONDS)
        while not ended.wait(pause):
            interrupts.check()
            # Adding up the pauses excludes the time during which the process was suspended (Ctrl-Z).
            quiet = quiet + pause if progress == self.progress else 0.0
            progress = self.progress
            if given_up() or quiet >= timeout:
                return False
        if (error := errors[0]) is not None:
            raise error
        return device_event.passed()  # also tells sanitizers that this thread continues after the event

    def end_threads(self) -> None:
        """End the threads that wait for events. Later waits start new threads."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Prevent reuse of a tensor's memory until a stream has completed all operations that are queued now."""

    def spare_bytes(self) -> int:
        """Return the number of bytes of device memory for optional buffers, which is the free memory minus a margin."""
        return 0

    def numa_node(self) -> int:
        """Return the NUMA node that the device is connected to, or -1 if there is none or it is unknown."""
        return -1

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register host memory. Emit a warning if registration fails.

        Args:
            memory: Memory to register.
            piece: Size in bytes of the pieces into which the memory is divided. No piece spans two registrations.
        """
        return Pinned()


class _StreamEvent(DeviceEvent):
    __slots__ = ("_device", "_event", "_stream")

    def __init__(self, event: Any, stream: Stream, device: AcceleratorDevice) -> None:
        self._event, self._stream, self._device = event, stream, device

    def passed(self) -> bool:
        return bool(self._event.query())

    def before(self, stream: Stream) -> None:
        stream.wait_event(self._event)

    def then(self, function: Callable[[Exception | None], None]) -> None:
        self._device.run_in_order(self._stream, partial(self._synchronize, function))

    def _synchronize(self, function: Callable[[Exception | None], None]) -> None:
        error = None
        try:
            self._event.synchronize()  # releases the GIL
        except Exception as raised:
            error = raised
        self._device.progress += 1
        function(error)


class AcceleratorDevice(Device):
    """Any accelerator that PyTorch supports.

    Host memory is not registered, because there is no common function for that, so copies do not overlap other work.
    """

    asynchronous = True

    def __init__(self, name: torch.device) -> None:
        super().__init__(name)
        self._module: Any = torch.get_device_module(name.type)  # e.g. torch.cuda
        self._streams: dict[str, Stream] = {}  # by purpose, created on first use; guarded by `_lock`
        # Thread for the events of each stream, started on first use, and functions for it to call; guarded by `_lock`
        self._threads: dict[Stream, tuple[threading.Thread, SimpleQueue[Callable[[], None] | None]]] = {}
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

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor], stream: Stream = None) -> None:
        """Queue copies of several tensors, all in the same direction, on a stream."""
        if targets:
            back = self._is_host(targets[0])
            if back or self._is_host(sources[0]):
                nbytes = sum([target.nbytes for target in targets])
                with self._lock:
                    self._copied[back] += nbytes
            with self.on(stream) if stream is not None else nullcontext():
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def take_copied(self) -> tuple[int, int]:
        """Return the number of bytes copied to the device and from it since the last call."""
        with self._lock:
            copied, self._copied = self._copied, {True: 0, False: 0}
        return copied[False], copied[True]

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Record an event on a stream, after all operations that have been queued so far."""
        return _StreamEvent(stream.record_event(None), stream, self)

    def run_in_order(self, stream: Stream, function: Callable[[], None]) -> None:
        """Call a function that waits for an event of a stream, on a thread that calls one such function at a time.

        Events of other streams do not delay the call.
        """
        with self._lock:
            if stream not in self._threads:
                queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
                queue.put(self.enter_thread)
                thread = threading.Thread(target=_run, args=(queue,), name="infinity-events", daemon=True)
                thread.start()
                self._threads[stream] = thread, queue
            self._threads[stream][1].put(function)

    def end_threads(self) -> None:
        """End the threads that wait for events, unless the device does not respond."""
        with self._lock:
            threads, self._threads = self._threads, {}
            for _, queue in threads.values():
                queue.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread, _ in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Make the allocator wait for a stream before it reuses the memory of a tensor."""
        tensor.record_stream(stream)

    def spare_bytes(self) -> int:
        """Return the free memory minus a margin for longer steps, in bytes."""
        free, total = self._memory()
        return max(0, free - device_margin(total))

    def _memory(self) -> tuple[int, int]:
        """Return free and total memory, in bytes."""
        free, total = self._module.mem_get_info(self.name)
        return int(free), int(total)


def _run(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while function := queue.get():
        with suppress(Exception):  # only `enter_thread` can fail; the next event then reports the device's error
            function()
        del function  # it references the cache slots of the copy


class CudaDevice(AcceleratorDevice):
    """CUDA or ROCm GPU."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, and let other threads capture CUDA graphs.

        While another thread captures a graph in the default mode of `torch.cuda.graph`, CUDA would otherwise fail both
        the capture and most calls of this thread. Does nothing on ROCm.
        """
        super().enter_thread()
        with suppress(OSError, AttributeError):  # no CUDA driver, for example on ROCm
            mode = ctypes.c_int(_THREAD_LOCAL)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def record_event(self, stream: Stream) -> DeviceEvent:
        """Record an event on a stream. A thread that waits for the event does not spin, as `torch.Event` would."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return _StreamEvent(stream.record_event(event), stream, self)

    def _memory(self) -> tuple[int, int]:
        free, total = super()._memory()
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.name) * total)
        return min(free, allowed - torch.cuda.memory_reserved(self.name)), allowed

    def numa_node(self) -> int:
        """Return the NUMA node of the GPU, or -1."""
        bus: Any = torch.cuda.get_device_properties(self.name)
        try:
            address = f"{bus.pci_domain_id:04x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
            return int((_PCI_DEVICES / address / "numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return -1

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        """Register memory with CUDA in pieces. If registering one piece fails, all pieces are unregistered."""
        pinned, start = Pinned(), torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        step = max(1, _LARGEST_PIECE // piece) * piece
        with torch.cuda.device(self.name):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for offset in range(0, len(memory), step):
                nbytes = min(step, len(memory) - offset)
                status = int(cudart.cudaHostRegister(start + offset, nbytes, _PORTABLE))
                if status:
                    self._clear()
                    pinned.close()
                    warnings.warn(
                        f"CUDA could not register {nbytes} bytes of host memory ({_error(cudart, status)}), so copies "
                        "to and from the device block training. Raise the limit on locked memory (ulimit -l).",
                        stacklevel=3,
                    )
                    break
                pinned.pieces.append(partial(cudart.cudaHostUnregister, start + offset))
        return pinned

    def _clear(self) -> None:
        """Clear the error that CUDA stores after a failed call. Otherwise the next, unrelated call would raise it."""
        try:
            torch.zeros(1, device=self.name)
            torch.cuda.synchronize(self.name)
        except RuntimeError:
            return


def _error(cudart: Any, status: int) -> str:
    try:
        return f"{cudart.cudaGetErrorString(cudart.cudaError(status))}, error {status}"
    except (AttributeError, TypeError, ValueError):
        return f"error {status}"


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": Device, "meta": Device, "cuda": CudaDevice}
"""Device classes by device type. All other types use `AcceleratorDevice`. Operations on the meta device do nothing."""


def open_device(name: torch.device) -> Device:
    """Return the compute device for a PyTorch device. Repeated calls return the same object.

    Without an index, `name` means the current device of the calling thread.
    """
    if name.index is None and name.type not in ("cpu", "meta"):
        name = torch.device(name.type, torch.get_device_module(name.type).current_device())
    return opened(name)


@cache
def opened(name: torch.device) -> Device:
    """Return the compute device for a PyTorch device with an index. See `open_device`."""
    return KINDS.get(name.type, AcceleratorDevice)(name)


def transfer_bytes(device: Device, nbytes: int, piece: int) -> tuple[torch.Tensor, Pinned]:
    """Allocate host memory for device copies. Return it as a byte tensor, with its registration (`Device.pin`)."""
    memory = transfer_memory(nbytes, device.numa_node())
    return torch.frombuffer(memory, dtype=torch.uint8), device.pin(memory, piece)
