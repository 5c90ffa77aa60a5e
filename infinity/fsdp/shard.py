"""The paged shard: a tensor with shape, dtype and device, but no storage.

FSDP2 asks it for its all-gather input (`fsdp_pre_all_gather`); the answer is another tensor without storage
that copies itself, page by page, into the buffer that FSDP2 has allocated. So no shard is ever assembled in
between, a shard may cross any number of pages, and a cache slot is held exactly as long as its bytes are copied.
All else that is done to a shard is done as `PagedTensor` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from infinity import torch_private
from infinity.fsdp.paged_tensor import PagedTensor

aten = torch.ops.aten


class ShardSource(Protocol):
    """Who knows the content of a shard."""

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the all-gather input of a shard (compute dtype, padded) into a flat tensor."""

    def load(self, shard: int) -> torch.Tensor:
        """Return the real elements of a shard in the dtype it is trained in, shape (numel,)."""

    def save(self, shard: int, content: torch.Tensor) -> None:
        """Replace the real elements of a shard."""


@dataclass(frozen=True, eq=False)
class ShardHandle:
    """Where one shard is.

    `padded` is the shape of its all-gather input, `gather_dtype` the dtype of that; `device` the compute device.
    """

    source: ShardSource
    """Who has its content."""
    shard: int
    """Its number in the layout."""
    name: str
    """Of the parameter, for errors."""
    padded: torch.Size
    gather_dtype: torch.dtype
    device: torch.device

    def load(self) -> torch.Tensor:
        """Return a copy of the real elements, flat, on the compute device."""
        return self.source.load(self.shard).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the real elements."""
        self.source.save(self.shard, content)


class PagedShard(PagedTensor):
    """This rank's slice of a parameter, paged, or a view of it."""

    handle: ShardHandle

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Answer FSDP2 with what it is to gather: this slice in the compute dtype, padded."""
        return (GatherInput(self.handle, self.handle.padded),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Answer FSDP2 with the gathered parameter: the output of the all-gather itself."""
        (tensor,) = all_gather_outputs
        return None if out is not None else (tensor, (tensor,))


# FSDP2 asks for it at every gather of every parameter, and to inspect a function takes longer than to answer.
PagedShard.fsdp_pre_all_gather.__signature__ = inspect.signature(PagedShard.fsdp_pre_all_gather)  # type: ignore[attr-defined]


class GatherInput(torch.Tensor):
    """The all-gather input of a paged shard: copies itself out of the pages when FSDP2 copies it."""

    handle: ShardHandle
    raw: bool

    @staticmethod
    def __new__(cls: type[GatherInput], handle: ShardHandle, shape: Sequence[int], raw: bool = False) -> GatherInput:
        """Make the input; `raw` is the same bytes seen as uint8 (FSDP2 gathers mixed dtypes that way)."""
        dtype = torch.uint8 if raw else handle.gather_dtype
        tensor: GatherInput = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=handle.device
        )  # type: ignore[attr-defined]
        tensor.handle, tensor.raw = handle, raw
        return tensor

    def __init__(self, *args: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the shard."""
        return f"GatherInput({self.handle.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def copy_into(self, destination: torch.Tensor) -> None:
        """Copy the shard's pages into `destination`."""
        flat = destination.view(-1)
        self.handle.source.gather_into(self.handle.shard, flat.view(self.handle.gather_dtype) if self.raw else flat)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Copy out on `copy_` and `_foreach_copy_`; keep views lazy."""
        first = args[0] if args else None
        if func is aten.copy_.default and isinstance(args[1], GatherInput):
            args[1].copy_into(args[0])
            return args[0]
        if func is aten._foreach_copy_.default:
            for destination, source in zip(args[0], args[1], strict=True):
                if isinstance(source, GatherInput):
                    source.copy_into(destination)
                else:
                    destination.copy_(source)
            return None
        if func is torch_private.COPY_IN:
            return torch_private.copy_in(*args)
        if isinstance(first, GatherInput):
            if func is aten.view.default:
                return GatherInput(first.handle, _viewed(first.shape, args[1]), first.raw)
            if func is aten.detach.default:
                return GatherInput(first.handle, first.shape, first.raw)
            if func is aten.view.dtype and args[1] is torch.uint8:
                if first.raw:
                    return first
                return GatherInput(first.handle, (first.numel() * first.handle.gather_dtype.itemsize,), True)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


def _viewed(shape: torch.Size, wanted: Sequence[int]) -> Sequence[int]:
    """Return the shape that a tensor of a shape has when it is viewed as another; FSDP2 always asks for a flat one."""
    return (shape.numel(),) if tuple(wanted) == (-1,) else torch.empty(shape, device="meta").view(wanted).shape


def _dense(value: Any) -> Any:
    if not isinstance(value, GatherInput):
        return value
    flat = torch.empty(value.handle.padded.numel(), dtype=value.handle.gather_dtype, device=value.device)
    value.handle.source.gather_into(value.handle.shard, flat)
    return (flat.view(torch.uint8) if value.raw else flat).view(value.shape)
