"""The simulated device: dispatch of operations, and replacements for the streams of `torch.cpu`."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity import torch_private
from infinity.memory import device as device_module
from infinity.memory.device import AcceleratorDevice, Pinned
from infinity.optim.slicing_check import _SlicingCheck
from infinity.run import run
from support.device import threads
from support.device.clocks import Actor, Memory, Races
from support.device.memory import MemoryMap
from support.device.streams import LOOKS, Stream, Streams

KINDS = {"order": (False, False), "late": (True, False), "order-updates": (False, True), "late-updates": (True, True)}
"""Kinds of simulated devices: whether copies are delayed, and whether updates run on the device."""
POISON = 0xEE
aten, c10d = torch.ops.aten, torch.ops.c10d
_ONLY_ALLOCATE = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_WAITING = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
"""Operations with a result on the host, which wait for the current stream."""
_WRITTEN_FIRST = (c10d._allgather_base_.default, c10d._reduce_scatter_base_.default)
"""Collectives that write their first argument and read the second. Their schemas do not declare this."""
_CHANGED = (c10d.allreduce_.default, c10d.broadcast_.default)
"""Collectives that read and write their first argument."""


class Simulation:
    """A simulated device. Operations are executed on the CPU.

    Args:
        late: Whether copies between pinned memory and the device are delayed until an operation depends on them. Until
            then, their targets contain `POISON`. Otherwise, copies run immediately, which is also a valid order.
        updates: Whether updates run on the device.
        seed: Seed of the number of event queries that return ``False``.
        looks: Maximum number of queries until an event has completed.
    """

    def __init__(self, *, late: bool, updates: bool = False, seed: int = 0, looks: int = LOOKS) -> None:
        self.late, self.updates = late, updates
        self.races = Races()
        self.streams = Streams(seed, looks)
        self.memory = MemoryMap(self.races, lambda: self.streams.thread.clock)
        self.lock = self.streams.lock
        self.copies = 0  # number of copies between pinned memory and the device
        self.delayed = 0  # number of these copies that were delayed
        self.ended_requests: list[Actor] = []  # actors of NVMe transfers that have ended
        self._targets: list[
            tuple[int, int]
        ] = []  # address ranges that delayed copies have not read yet, which must not be poisoned
        self._local = threading.local()  # state of each thread: `quiet` and `host_only`

    # Threads #

    @property
    def quiet(self) -> bool:
        """Whether this thread executes an operation of the simulation itself."""
        return getattr(self._local, "quiet", False)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Do not track operations of this thread inside of the block."""
        before, self._local.quiet = self.quiet, True
        try:
            yield
        finally:
            self._local.quiet = before

    def _silenced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def silenced(*args: Any) -> Any:
            with self.silence():
                return function(*args)

        return silenced

    @property
    def host_only(self) -> bool:
        """Whether this is a thread of the package, which runs operations on the host unless it uses a stream."""
        return getattr(self._local, "host_only", False)

    @property
    def updating(self) -> bool:
        """Whether this is a thread of the package with a current stream, so that its operations run on the device."""
        return self.host_only and self.streams.current() is not self.streams.default

    def enter_thread(self) -> None:
        """Track the operations of a thread of the package until it ends."""
        if threading.current_thread() is not threading.main_thread():
            self._local.host_only = True
            _Mode(self).__enter__()

    # Operations #

    def operate(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        act: Callable[[], Any],
        *,
        waits: bool,
    ) -> Any:
        """Run an operation on the device or, if its memory is host memory, on the host; record its accesses.

        Args:
            name: Name of the operation.
            reads: Tensors that it reads.
            writes: Tensors that it modifies. Returned tensors are determined from the result.
            act: Function that executes the operation.
            waits: Whether the result is on the host when the operation returns.
        """
        with self.lock:
            stream = self.streams.current()
            read = [part for tensor in reads for part in self.memory.of(tensor)]
            written = [part for tensor in writes for part in self.memory.of(tensor)]
            used = [span.memory for span in (*read, *written)]
            there = self.updating  # numbers, such as step counts, are moved to the device that uses them
            on_host = not there and (self.host_only or any(part.on_host for part in used))
            on_device = [part for part in used if part.owner is not None]
            mine = not on_host and (bool(on_device) or there)
            if on_host and on_device and name == "aten.copy_.default":
                mine, on_host, waits = True, False, True  # the device copies, and the host waits for it
            elif on_host:
                waits = False
            stream.launch()
            if mine:
                stream.run()
        result = act()
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        returned = _plain(result)
        fresh = [tensor for tensor in returned if tensor.untyped_storage()._cdata not in known]
        with self.lock:
            for tensor in fresh:
                self.memory.allocate(tensor.untyped_storage(), stream, name, placed=mine).on_host |= on_host
            if returned and not fresh and not written:
                return result  # a view
            if on_host and on_device:
                self.races.mixed(name, on_device[0], next((part for part in used if part.on_host), None))
            if (
                on_host and name != "aten.copy_.default"
            ):  # all operands are on the host, because an accelerator would raise an error otherwise
                for part in used:
                    part.on_host = part.on_host or part.owner is None
            actor = stream if mine else self.streams.thread
            for part in read:
                self.races.access(actor, part, name, writes=False)
            for part in written:
                if mine:
                    self.memory.place(part.memory, stream)
                self.races.access(actor, part, name, writes=True)
            if name not in _ALLOCATING:
                for tensor in fresh:
                    for part in self.memory.of(tensor):
                        self.races.access(actor, part, name, writes=True)
            if waits:
                stream.synchronize()
        return result

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device on the current stream without waiting for the copy.

        As on an accelerator, host memory that is not pinned is read or written before this method returns.
        """
        with self.lock:
            stream = self.streams.current()
            stream.launch()
            read, written = self.memory.of(source), self.memory.of(target)
            pinned = any(self._is_pinned(part.memory) for part in (*read, *written))
            to_host = any(part.memory.on_host for part in written)
            for part in written:
                if not to_host:
                    self.memory.place(part.memory, stream)
            what = "a copy to the host" if to_host else "a copy to the device"
            for part in read:
                by_host = part.memory.on_host and not self._is_pinned(part.memory)
                self.races.access(self.streams.thread if by_host else stream, part, what, writes=False)
            for part in written:
                self.races.access(stream, part, what, writes=True)
            self.copies += 1
            if not pinned or not self.late:
                stream.run()
                with self.silence(), torch.no_grad():
                    target.copy_(source)
                if not pinned:
                    stream.synchronize()
            else:
                ordered = to_host and all(part.memory.owner is stream for part in read)
                self._delay(target, source, stream, to_host=to_host, kept=ordered)

    def is_of_host(self, *tensors: torch.Tensor) -> bool:
        """Return whether a tensor is in host memory, so that a copy is a transfer between host and device."""
        with self.lock:
            return any(span.memory.on_host for tensor in tensors for span in self.memory.of(tensor))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Implement `record_stream`."""
        with self.lock:
            for part in self.memory.of(tensor):
                part.memory.kept.add(stream)
            if self.late:
                stream.push(lambda: tensor)  # keep the tensor alive until the stream reaches this point

    def _is_pinned(self, memory: Memory) -> bool:
        return any(memory in pinned.pieces for pinned in self.memory.pinned)

    def _delay(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, *, to_host: bool, kept: bool) -> None:
        """Queue a copy. As on an accelerator, the queue does not keep the device tensor alive.

        Args:
            target: Target of the copy.
            source: Source of the copy.
            stream: Stream of the copy.
            to_host: Whether the target is in host memory.
            kept: Whether the memory of `source` cannot be reused before the copy, because reuse is ordered after it.
        """
        self.delayed += 1
        span = source.data_ptr(), source.data_ptr() + source.numel() * source.itemsize
        with self.silence(), torch.no_grad():
            self._poison(target)
        on_device = _Weak(source if to_host else target, keep=kept)
        host = target if to_host else source
        self._targets.append(span)
        del target, source

        def run() -> None:
            self._targets.remove(span)
            with self.silence(), torch.no_grad():
                other = on_device.tensor()
                if other is None and to_host:
                    self._poison(host)  # the memory has been reused
                elif other is not None:
                    (host if to_host else other).copy_(other if to_host else host)

        stream.push(run)

    def _poison(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.itemsize
        if tensor.is_contiguous() and not any(a < stop and start < b for a, b in self._targets):
            tensor.reshape(-1).view(torch.uint8).fill_(POISON)

    # Replacements #

    @contextmanager
    def __call__(self) -> Iterator[Simulation]:
        """Replace the device of this process. Must be entered by the training thread."""
        streams, before = self.streams, dict(device_module.KINDS)
        resize, lazy_init = torch.UntypedStorage.resize_, FSDPCommContext.lazy_init

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            with self.lock:
                if storage.nbytes():
                    self.memory.release(storage)
                found = resize(storage, nbytes)
                if nbytes:
                    stream = streams.current()
                    stream.launch()
                    self.memory.allocate(storage, stream, "a gathered parameter", placed=True)
            return found

        def named(context: FSDPCommContext, device: torch.device) -> None:
            lazy_init(context, device)
            for name, stream in vars(context).items():
                if isinstance(stream, Stream):
                    stream.name = f"FSDP2's {name}"

        device_module.opened.cache_clear()
        with ExitStack() as stack:
            for name, value in {
                "Stream": streams.make_stream,
                "Event": streams.make_event,
                "current_stream": streams.current,
                "stream": streams.on,
                "synchronize": streams.synchronize,
            }.items():
                stack.enter_context(patch.object(torch.cpu, name, value))
            stack.enter_context(patch.object(torch.accelerator, "current_stream", streams.current))
            stack.enter_context(patch.dict(device_module.KINDS, {"cpu": lambda name: SimulatedDevice(name, self)}))
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(patch.object(FSDPCommContext, "lazy_init", named))
            # On the CPU, FSDP2 reduces into reused host buffers, which an accelerator does not have.
            stack.enter_context(patch.object(torch_private, "reuse_reduce_buffers", lambda groups: lambda: None))
            chosen = patch.object(run, "choose_update_device", lambda *_, **__: (self.updates, "set by the simulation"))
            stack.enter_context(chosen)
            # The slicing check runs thousands of operations on small host tensors of its own.
            stack.enter_context(patch.object(_SlicingCheck, "run", self._silenced(_SlicingCheck.run)))
            stack.enter_context(threads.tracked(self))
            stack.enter_context(_Mode(self))
            try:
                yield self
            finally:
                device_module.opened.cache_clear()
        assert before == device_module.KINDS


class SimulatedDevice(AcceleratorDevice):
    """Device of the package that uses simulated streams."""

    def __init__(self, name: torch.device, simulation: Simulation) -> None:
        super().__init__(name)
        self._simulation = simulation

    def enter_thread(self) -> None:
        super().enter_thread()
        self._simulation.enter_thread()

    def stream(self, purpose: str) -> Stream:
        stream = super().stream(purpose)
        stream.name = f"the stream {purpose!r}"
        return stream

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._simulation.keep(tensor, stream)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        low = tensor.data_ptr()
        with self._simulation.lock:
            return any(pinned.at(low, low + 1) for pinned in self._simulation.memory.pinned)

    def spare_bytes(self) -> int:
        return 0  # tests set `memory.device_bytes`

    def pin(self, memory: memoryview, piece: int) -> Pinned:
        frame: Any = sys._getframe(1)
        while "self" not in frame.f_locals:
            frame = frame.f_back
        owner = type(frame.f_locals["self"]).__name__
        with self._simulation.lock:
            return self._simulation.memory.pin(memory, piece, f"memory of {owner}")


class _Mode(TorchDispatchMode):
    """Dispatch mode that tracks all operations of a thread."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that `torch.compile` may be used in this mode, which tracks the operations of compiled graphs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = [kind for kind in types if kind not in (torch.Tensor, torch.nn.Parameter)]
        if made and FakeTensor not in made:
            return NotImplemented  # a wrapper subclass, whose inner operations are dispatched separately
        if made or self._simulation.quiet:
            return func(*args, **kwargs)
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(aten.copy_.default, types, (target, source, *args[2:]), kwargs)
            return None
        queued = func is aten.copy_.default and ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
        if queued and self._simulation.is_of_host(args[0], args[1]):
            self._simulation.copy(args[0], args[1])
            return args[0]
        reads, writes = _accesses(func, args, kwargs)
        return self._simulation.operate(str(func), reads, writes, lambda: func(*args, **kwargs), waits=func in _WAITING)


_ALLOCATING = {str(func) for func in _ONLY_ALLOCATE}


def _plain(values: Any) -> list[torch.Tensor]:
    """Return the plain CPU tensors with memory in a tree of values."""
    leaves = [values] if isinstance(values, torch.Tensor) else tree_leaves(values)
    return [
        value
        for value in leaves
        if type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.untyped_storage().nbytes()
    ]


def _accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    if func in _WRITTEN_FIRST:
        return _plain(args[1]), _plain(args[0])
    if func in _CHANGED:
        return _plain(args[0]), _plain(args[0])
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for number, (name, changed) in enumerate(_arguments(func)):
        value = args[number] if number < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor | list | tuple):
            (writes if changed else reads).extend(_plain(value))
    if func in _ONLY_ALLOCATE:
        return [], writes
    return reads, writes


@functools.cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Return the name of each argument of an operation, and whether it is written."""
    arguments = func._schema.arguments
    return [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in arguments]


class _Weak:
    """A weak reference to a tensor's memory or, if `keep`, a strong one."""

    def __init__(self, tensor: torch.Tensor, *, keep: bool) -> None:
        self._kept = tensor if keep else None
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._nbytes = tensor.untyped_storage().nbytes()

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, or ``None`` if its memory has been released."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._nbytes:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._size, self._stride)


def simulation(kind: str, seed: int = 0, looks: int = LOOKS) -> AbstractContextManager[Simulation]:
    """Return a context in which the CPU is a simulated device of one of `KINDS`. See `Simulation`."""
    late, updates = KINDS[kind]
    return Simulation(late=late, updates=updates, seed=seed, looks=looks)()
