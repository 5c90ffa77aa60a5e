"""Custom FSDP2 collectives, and access to process groups.

These functions reuse reduction buffers, run code around all-gathers and reduce-scatters, and copy all-gather inputs
that have no storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from statistics import median_high
from typing import Any

import torch

from infinity import heap, hugepages, interrupts
from infinity.torch_private.imports import DefaultAllGather, DefaultReduceScatter, _storage_Use_Count
from infinity.torch_private.names import backward_number, fsdp_params, gathered_shape

_FEW = 2
"""Maximum number of unusually large FSDP modules, such as a root and a separate head, for which freed memory is
returned to the operating system in every backward.
"""


class _Collectives:
    """Custom collectives that stay installed on parameter groups until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (group, attribute, original, replacement)

    def replace(self, group: Any, attribute: str, comm: Any) -> None:
        self._replaced.append((group, attribute, getattr(group, attribute), comm))
        setattr(group, attribute, comm)

    def restore(self) -> None:
        """Restore the original collectives, except where other code has replaced ours in the meantime."""
        for group, attribute, before, comm in reversed(self._replaced):
            if getattr(group, attribute) is comm:
                setattr(group, attribute, before)
        self._replaced.clear()


def reuse_reduce_buffers(groups: Iterable[Any]) -> Callable[[], None]:
    """Reduce gradients on the CPU in buffers that all FSDP modules share, instead of allocating new ones.

    Buffers for unusually large FSDP modules, such as a root with a large vocabulary, are not kept because they would be
    unused for most of a step. If there are few such modules, their buffers are returned to the operating system as soon
    as they are released. Free heap memory is returned before each of these buffers is allocated, because the backward
    of a large root leaves several free blocks of its size.

    In a group with a single rank, gradients are reduced in place, whereas FSDP2 would copy the concatenated gradients
    to a second buffer of the same size. If the user has replaced a group's collective, it is kept.

    Returns:
        A function that restores the original collectives.
    """
    groups = list(groups)
    sizes = [sum(gathered_shape(param).numel() for param in fsdp_params(group)) for group in groups]
    most = 2 * 4 * median_high(sizes)  # largest buffer to keep, in bytes: twice the fp32 size of the median FSDP module
    few = sum(4 * size > most for size in sizes) <= _FEW

    class ReusedBuffers(DefaultReduceScatter):
        def __init__(self) -> None:
            # uint8 buffers, as many as were ever in use at once. A buffer is free if no other tensor shares its memory.
            self._buffers: list[torch.Tensor] = []

        def allocate(
            self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            nbytes = math.prod(map(int, size)) * dtype.itemsize
            if nbytes > most:
                if not few:
                    return torch.empty(tuple(size), dtype=dtype, device=device)
                heap.give_back()
                return torch.frombuffer(hugepages.block(nbytes), dtype=dtype).view(tuple(size))
            free = [buffer for buffer in self._buffers if _is_unused(buffer)]
            chosen = next((buffer for buffer in free if buffer.numel() >= nbytes), None)
            if chosen is None:
                if free:  # replace a buffer that is too small, so that the number of buffers does not grow
                    self._buffers = [buffer for buffer in self._buffers if buffer is not free[0]]
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._buffers.append(chosen)
            return chosen[:nbytes].view(dtype).view(size)

    class InPlace(ReusedBuffers):
        def __init__(self) -> None:
            super().__init__()
            # Input of the reduction whose output is allocated next. It is only used in the same backward, because an
            # interrupted backward may leave its input here.
            self._input: torch.Tensor | None = None
            self._backward = -1

        def allocate(
            self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            output, self._input = self._input, None
            before, self._backward = self._backward, backward_number()
            if (
                before == self._backward
                and output is not None
                and output.shape == torch.Size(map(int, size))
                and output.dtype == dtype
            ):
                return output
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input

    shared, in_place, collectives = ReusedBuffers(), InPlace(), _Collectives()
    for group in groups:
        if group.device.type == "cpu" and type(group._reduce_scatter_comm) is DefaultReduceScatter:
            alone = getattr(group.mesh_info, "shard_mesh_size", 1) == 1
            collectives.replace(group, "_reduce_scatter_comm", in_place if alone else shared)
    return collectives.restore


def watch_collectives(groups: Iterable[Any], during: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run the all-gathers and reduce-scatters of groups inside the context `during()`.

    If the user has replaced a group's collective, it is kept. HSDP's all-reduce cannot be intercepted.

    Returns:
        A function that restores the original collectives.
    """

    class Watched:
        def __init__(self, comm: Any) -> None:
            self._comm = comm
            self.allocate = comm.allocate

        def __call__(self, *args: Any, **settings: Any) -> Any:
            with during():
                return self._comm(*args, **settings)

    class WatchedAllGather(Watched, DefaultAllGather): ...

    class WatchedReduceScatter(Watched, DefaultReduceScatter): ...

    collectives = _Collectives()
    for group in groups:
        if type(group._all_gather_comm) is DefaultAllGather:
            collectives.replace(group, "_all_gather_comm", WatchedAllGather(group._all_gather_comm))
        if isinstance(group._reduce_scatter_comm, DefaultReduceScatter):
            collectives.replace(group, "_reduce_scatter_comm", WatchedReduceScatter(group._reduce_scatter_comm))
    return collectives.restore


def _is_unused(buffer: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of `buffer`."""
    storage = buffer.untyped_storage()
    return bool(_storage_Use_Count(storage._cdata) == 2)  # the buffer and `storage`


COPY_IN = torch.ops.fsdp.all_gather_copy_in.default
"""Operation with which FSDP2 copies the all-gather inputs of an FSDP module into this rank's part of the output, if
there are several ranks.
"""


def copy_in(
    inputs: Sequence[torch.Tensor], output: torch.Tensor, sizes: Sequence[int], numel: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Perform `COPY_IN` as one list operation, so that inputs without storage are never materialized."""
    own = output.narrow(0, numel * rank, numel)
    with interrupts.held(waits=False), torch.no_grad():
        torch._foreach_copy_(list(torch.split(own, list(sizes))), list(inputs))
    return own, output


def process_groups() -> list[Any]:
    """Return all process groups of this process, and their stores."""
    from torch.distributed.distributed_c10d import _world

    return [part for group, (_, store) in _world.pg_map.items() for part in (group, store)]
