"""Module forwards that run slice by slice.

[Note: order of summation] Autograd runs backward in the reverse order of forward. Forward therefore runs the slices
from last to first, so that their gradients are summed from first to last, as in a loop over micro-batches. Reentrant
checkpointing completes the backward of one slice before it begins the next, so each slice adds its gradients in the
reduce dtype, as in FSDP2's gradient accumulation. Non-reentrant checkpointing would let autograd sum them in the
compute dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity import torch_private
from infinity.accumulation.slicing import BatchDim, Call, Slicing, SlicingFinder, flatten
from infinity.errors import ConfigError, UnsupportedError

_log = logging.getLogger("infinity")


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make `module` run `forward` in place of its own forward."""
    module.forward = forward


class SlicedForward:
    """Forward of a module that runs slice by slice. Install it with `replace_forward`.

    Args:
        module: module whose forward is sliced.
        count: number of slices; 0 runs the original forward.
        batch_dim: batch dimension, as in `micro_batches`.
        fsdp_module: FSDP module to which the parameters of `module` belong. The default is `module` itself.
    """

    def __init__(
        self, module: nn.Module, count: int, batch_dim: BatchDim = None, *, fsdp_module: nn.Module | None = None
    ) -> None:
        forward = module.forward
        self.module, self.count = module, count
        self._fsdp_module = module if fsdp_module is None else fsdp_module
        # Original forward, which runs the whole batch.
        self.whole: Callable[..., Any] = forward.whole if isinstance(forward, SlicedForward) else forward
        # Determines the slicing once per kind of call.
        self._finder = SlicingFinder(module, self.whole, batch_dim)
        update_wrapper(self, self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch.

        Raises:
            ConfigError: if the batch cannot be split into equal slices.
            UnsupportedError: if an argument or an output cannot be sliced.
        """
        if not self.count:
            return self.whole(*args, **kwargs)
        call = Call.of(self.whole, args, kwargs)
        slicing = None if self.count == 1 else self._finder.find(self.whole, call, self.count)
        return self.run(self.whole, call, slicing, self.count)

    def run(self, function: Callable[..., Any], call: Call, slicing: Slicing | None, count: int) -> Any:
        """Return the output of a function for the whole batch, computed without slices if `slicing` is ``None``."""
        rebuilds: list[Callable[[Sequence[Any]], Any]] = []
        call_with = call.run  # `checkpoint` must not keep the unsliced arguments alive

        def run_slice(anchor: torch.Tensor, *parts: Any) -> tuple[Any, ...]:
            outputs, rebuild = flatten(call_with(function, parts))
            if not rebuilds:  # all slices, including recomputed ones, return the same structure
                rebuilds.append(rebuild)
            return tuple(outputs)

        if slicing is not None:
            torch_private.add_up_gradients(self._fsdp_module)
        # Keeps a slice in the graph if its parameters require gradients, but its inputs do not.
        anchor = torch.empty(0, requires_grad=any(param.requires_grad for param in self.module.parameters()))
        recompute = torch.is_grad_enabled() and any(
            leaf.requires_grad for leaf in (anchor, *call.leaves) if isinstance(leaf, torch.Tensor)
        )
        slices = [call.leaves] if slicing is None else slicing.split(call.leaves, count)
        outputs = [
            checkpoint(run_slice, anchor, *parts, use_reentrant=True) if recompute else run_slice(anchor, *parts)
            for parts in reversed(slices)  # see [Note: order of summation]
        ]
        return rebuilds[0](outputs[0] if slicing is None else slicing.join(outputs[::-1]))


class SlicedNorm(SlicedForward):
    """Forward of a norm that the root runs after its layers. It is sliced if possible, to save memory."""

    _unsliceable = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch, computed without slices if the norm cannot be sliced."""
        if not self._unsliceable:
            try:
                return super().__call__(*args, **kwargs)
            except (UnsupportedError, ConfigError) as error:
                _log.warning("%s is not sliced and runs on the whole batch: %s", type(self.module).__name__, error)
                self._unsliceable = True
        return self.whole(*args, **kwargs)
