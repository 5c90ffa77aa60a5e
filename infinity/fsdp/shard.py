"""Paged shard: a tensor that has a shape, a dtype and a device, but no storage.

FSDP2 obtains the all-gather input of a shard from `fsdp_pre_all_gather`, which returns another tensor without storage.
When FSDP2 copies this tensor into its all-gather buffer, the shard's pages are copied directly into the buffer. A shard
may therefore span any number of pages, and needs no intermediate buffer. All other operations behave as described for
`PagedTensor`.

In a training step, the weights may be in device memory already, because they were prefetched or are GPU-resident. The
inputs are then ordinary tensors. Only the last shard of an FSDP module still has an input without storage, because
copying it ends the gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from infinity import torch_private
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.shard_io import ShardIO

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ShardHandle:
    """Location and properties of one shard."""

    source: ShardIO
    shard: int
    name: str
    """Name of the parameter, for error messages."""
    padded: torch.Size
    """Shape of the all-gather input."""
    gather_dtype: torch.dtype
    """Dtype of the all-gather input."""
    device: torch.device

    def gather_input(self) -> torch.Tensor:
        """Return the all-gather input, flat. The first shard of an FSDP module begins the gather."""
        weights = self.source.inputs.get(self.shard)
        if weights is None:
            weights = self.source.gather_input(self.shard)
        # A new tensor, because a tensor that was created in inference mode cannot be used outside of it
        return weights if weights is not None else GatherInput.make(self, (self.padded.numel(),))

    def load(self) -> torch.Tensor:
        """Return a copy of the elements without padding, flat, on the compute device."""
        return self.source.load(self.shard).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements by `content`, which has no padding."""
        self.source.save(self.shard, content)

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`."""
        self.source.fail(error)


class PagedShard(PagedTensor):
    """This rank's paged slice of a parameter, or a view of it."""

    handle: ShardHandle

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the all-gather input to FSDP2: this slice in the compute dtype, padded.

        FSDP2 calls this method in the first gather only. See `torch_private.supply_gather_input`.
        """
        return (self.handle.gather_input().view(self.handle.padded),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the gathered parameter to FSDP2: the all-gather output itself, not a copy."""
        (tensor,) = all_gather_outputs
        return None if out is not None else (tensor, ())


class GatherInput(torch.Tensor):
    """All-gather input of a paged shard. Copying it into a buffer reads the shard's pages into that buffer."""

    handle: ShardHandle
    raw: bool

    @staticmethod
    def make(handle: ShardHandle, shape: Sequence[int], raw: bool = False) -> GatherInput:
        """Create the input. If `raw`, its bytes are viewed as uint8, because FSDP2 gathers mixed dtypes as uint8."""
        tensor: GatherInput = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            GatherInput, torch.Size(shape), dtype=torch.uint8 if raw else handle.gather_dtype, device=handle.device
        )
        tensor.handle, tensor.raw = handle, raw
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description with the parameter's name, without loading the shard."""
        return f"GatherInput({self.handle.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Copy the pages on `copy_` and `_foreach_copy_`, and keep views lazy."""
        first = args[0] if args else None
        if func is aten.copy_.default and isinstance(args[1], GatherInput):
            args[1].handle.source.gather_into(args[1].handle.shard, args[0])
            return args[0]
        if func is aten._foreach_copy_.default:
            pairs = [*zip(args[0], args[1], strict=True)]
            dense = [pair for pair in pairs if not isinstance(pair[1], GatherInput)]
            if dense:  # first, because the last shard ends the gather
                func([destination for destination, _ in dense], [source for _, source in dense])
            for destination, source in pairs:
                if isinstance(source, GatherInput):
                    source.handle.source.gather_into(source.handle.shard, destination)
            return None
        if func is torch_private.COPY_IN:
            return torch_private.copy_in(*args)
        if isinstance(first, GatherInput):
            if func is aten.view.default:
                flat = tuple(args[1]) == (-1,)  # FSDP2 requests this view in every gather
                shape = (first.numel(),) if flat else torch.empty(first.shape, device="meta").view(args[1]).shape
                return GatherInput.make(first.handle, shape, first.raw)
            if func is aten.detach.default:
                return GatherInput.make(first.handle, first.shape, first.raw)
            if func is aten.view.dtype and args[1] is torch.uint8:
                if first.raw:
                    return first
                return GatherInput.make(first.handle, (first.numel() * first.handle.gather_dtype.itemsize,), True)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


def _dense(value: Any) -> Any:
    if not isinstance(value, GatherInput):
        return value
    flat = torch.empty(value.handle.padded.numel(), dtype=value.handle.gather_dtype, device=value.device)
    value.handle.source.gather_into(value.handle.shard, flat)
    return (flat.view(torch.uint8) if value.raw else flat).view(value.shape)
