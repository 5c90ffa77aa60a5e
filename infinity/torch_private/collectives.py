"""Replace the collectives of FSDP2: reuse reduction buffers, time all-gathers and reduce-scatters, copy without storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from statistics import median_high
from typing import Any

import torch

from infinity import heap, hugepages
from infinity.torch_private.imports import DefaultAllGather, DefaultReduceScatter, _storage_Use_Count
from infinity.torch_private.names import backward_number, fsdp_params, full_shape

_FEW = 2
"""FSDP modules much larger than most for which freed memory is given back, in every backward:

a root, and a head beside it.
"""


class _Collectives:
    """Collectives that were put in place of those of groups, until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (group, attribute, what was there, what is there now)

    def replace(self, group: Any, attribute: str, comm: Any) -> None:
        self._replaced.append((group, attribute, getattr(group, attribute), comm))
        setattr(group, attribute, comm)

    def restore(self) -> None:
        """Put back what was there, where nobody has replaced it since."""
        for group, attribute, before, comm in reversed(self._replaced):
            if getattr(group, attribute) is comm:
                setattr(group, attribute, before)
        self._replaced.clear()


def reuse_reduce_buffers(groups: Iterable[Any]) -> Callable[[], None]:
    """Let groups on the CPU reduce gradients in memory that is used again, instead of fresh memory for every FSDP
    module.

    What FSDP modules need that are much larger than most, such as a root with a large vocabulary, is not kept: it would
    be
    unused for all of a step but an instant. Where these are few, the kernel has it back at once, and what else is free
    in the heap before it: behind the backward of such a root, several pieces of its size. A group of one rank reduces
    in place: FSDP2 brings the gradients together, and would copy them to as much memory again. A group whose collective
    somebody has replaced keeps that one.

    Returns:
        What ends it.
    """
    groups = list(groups)
    sizes = [sum(full_shape(param).numel() for param in fsdp_params(group)) for group in groups]
    most = 2 * 4 * median_high(sizes)  # bytes of a buffer that is kept: twice what most FSDP modules need, in fp32
    few = sum(4 * size > most for size in sizes) <= _FEW

    class ReusedBuffers(DefaultReduceScatter):
        def __init__(self) -> None:
            # Uint8, all that were ever needed at once; free where nobody else refers to them.
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
                if free:  # the largest FSDP module decides how large they are, the largest number at once how many
                    self._buffers = [buffer for buffer in self._buffers if buffer is not free[0]]
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._buffers.append(chosen)
            return chosen[:nbytes].view(dtype).view(size)

    class InPlace(ReusedBuffers):
        def __init__(self) -> None:
            super().__init__()
            # What was allocated as the input of a reduction whose output is allocated next, and in which backward: one
            # that was interrupted in between leaves its input here.
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
    """Let groups run their all-gathers and reduce-scatters inside of `during()`.

    A group whose collective somebody has replaced keeps that one. The all-reduce of HSDP cannot be reached.

    Returns:
        What ends it.
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
    """Whether no other tensor lies in the memory of this one."""
    storage = buffer.untyped_storage()
    return bool(_storage_Use_Count(storage._cdata) == 2)  # the buffer and `storage`


COPY_IN = torch.ops.fsdp.all_gather_copy_in.default
"""With several ranks: copies the all-gather inputs of an FSDP module into this rank's part of what will be gathered."""


def copy_in(
    inputs: Sequence[torch.Tensor], output: torch.Tensor, sizes: Sequence[int], numel: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `COPY_IN`, one input after the other: one without memory copies itself, and is never there as a whole."""
    own = output.narrow(0, numel * rank, numel)
    with torch.no_grad():
        for destination, source in zip(torch.split(own, list(sizes)), inputs, strict=True):
            destination.copy_(source)
    return own, output


def process_groups() -> list[Any]:
    """Return all process groups of this process, and their stores."""
    from torch.distributed.distributed_c10d import _world

    return [part for group, (_, store) in _world.pg_map.items() for part in (group, store)]


# torch.optim.Optimizer #
