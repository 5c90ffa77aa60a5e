"""The paged shard: a tensor with shape, dtype and device, but no storage.

FSDP2 asks it for its all-gather input (`fsdp_pre_all_gather`); the answer is another tensor without storage
that copies itself, page by page, into the buffer that FSDP2 has allocated. So no shard is ever assembled in
between, a shard may cross any number of pages, and a frame is held exactly as long as its bytes are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from infinity.errors import UnsupportedError
from infinity.fsdp.gradient import written

aten = torch.ops.aten


class ShardSource(Protocol):
    """Who knows the content of a shard."""

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the all-gather input of a shard (compute dtype, padded) into a flat tensor."""

    def load(self, shard: int) -> torch.Tensor:
        """Return the real elements of a shard in the dtype it is trained in, shape (numel,)."""

    def save(self, shard: int, content: torch.Tensor) -> None:
        """Replace the real elements of a shard."""


class PagedShard(torch.Tensor):
    """This rank's slice of a parameter, paged. `shape` may be a prefix of the padded slice.

    FSDP2 pads, narrows and flattens the local tensor of an unevenly sharded parameter; those stay paged.
    Any other operation loads the real elements first.
    """

    source: ShardSource
    shard: int
    padded: torch.Size
    gather_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls: type[PagedShard],
        source: ShardSource,
        shard: int,
        shape: Sequence[int],
        padded: torch.Size,
        dtype: torch.dtype,
        gather_dtype: torch.dtype,
        device: torch.device,
    ) -> PagedShard:
        """Make a shard of `shape`; `padded` is the shape of its all-gather input."""
        tensor: PagedShard = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)  # type: ignore[attr-defined]
        tensor.source, tensor.shard, tensor.padded, tensor.gather_dtype = source, shard, padded, gather_dtype
        return tensor

    def __init__(self, *args: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the shard without loading it."""
        return f"PagedShard(shard={self.shard}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _reshaped(self, shape: Sequence[int]) -> PagedShard:
        return PagedShard(self.source, self.shard, shape, self.padded, self.dtype, self.gather_dtype, self.device)

    def _loaded(self) -> torch.Tensor:
        content = self.source.load(self.shard)
        if content.numel() < self.numel():  # the padded form: its tail is padding
            content = torch.cat([content, content.new_zeros(self.numel() - content.numel())])
        return content[: self.numel()].view(self.shape)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Answer FSDP2 with what it is to gather: this slice in the compute dtype, padded."""
        return (GatherInput(self, self.padded),), None

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Keep shapes paged, write through `copy_`, load for everything else."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, PagedShard):
            if func is aten.detach.default:
                return first._reshaped(first.shape)
            if func is aten.view.default:
                shape = torch.empty(first.shape, device="meta").view(args[1]).shape
                return first._reshaped(shape)
            if func is aten.new_zeros.default and tuple(args[1]) == tuple(first.padded) != tuple(first.shape):
                return first._reshaped(args[1])  # FSDP2 re-pads an unevenly sharded parameter
            if func is aten.slice.Tensor and _is_prefix(first, args[1:]):
                return first._reshaped(func(torch.empty(first.shape, device="meta"), *args[1:]).shape)
            if func is aten.copy_.default:
                if not (isinstance(args[1], PagedShard) and args[1].shard == first.shard):
                    first.source.save(first.shard, _dense(args[1]).reshape(-1).to(first.dtype))
                return first
        if func._schema.is_mutable and any(isinstance(arg, PagedShard) for arg in written(func, args, kwargs)):
            raise UnsupportedError(
                f"{func} would change an offloaded parameter in place; build the new value and use p.copy_(value) "
                "under torch.no_grad()"
            )
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


class GatherInput(torch.Tensor):
    """The all-gather input of a paged shard: copies itself out of the pages when FSDP2 copies it."""

    paged: PagedShard
    raw: bool

    @staticmethod
    def __new__(cls: type[GatherInput], paged: PagedShard, shape: Sequence[int], raw: bool = False) -> GatherInput:
        """Make the input; `raw` is the same bytes seen as uint8 (FSDP2 gathers mixed dtypes that way)."""
        dtype = torch.uint8 if raw else paged.gather_dtype
        tensor: GatherInput = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=paged.device
        )  # type: ignore[attr-defined]
        tensor.paged, tensor.raw = paged, raw
        return tensor

    def __init__(self, *args: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the shard."""
        return f"GatherInput(shard={self.paged.shard}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def copy_into(self, destination: torch.Tensor) -> None:
        """Copy the shard's pages into `destination`."""
        flat = destination.view(-1)
        self.paged.source.gather_into(self.paged.shard, flat.view(self.paged.gather_dtype) if self.raw else flat)

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
        if isinstance(first, GatherInput):
            if func is aten.view.default:
                return GatherInput(first.paged, torch.empty(first.shape, device="meta").view(args[1]).shape, first.raw)
            if func is aten.detach.default:
                return GatherInput(first.paged, first.shape, first.raw)
            if func is aten.view.dtype and args[1] is torch.uint8:
                if first.raw:
                    return first
                return GatherInput(first.paged, (first.numel() * first.paged.gather_dtype.itemsize,), True)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


def _dense(value: Any) -> Any:
    if isinstance(value, PagedShard):
        return value._loaded()
    if isinstance(value, GatherInput):
        dtype, size = value.paged.gather_dtype, value.paged.padded.numel()
        flat = torch.empty(size, dtype=dtype, device=value.device)
        value.paged.source.gather_into(value.paged.shard, flat)
        return (flat.view(torch.uint8) if value.raw else flat).view(value.shape)
    return value


def _is_prefix(tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether slice(dim, start, end, step) keeps the first elements in memory order."""
    given = dict(zip(("dim", "start", "end", "step"), args, strict=False))
    dim, start, step = given.get("dim", 0), given.get("start"), given.get("step", 1)
    return dim == 0 and start in (None, 0) and step == 1
