"""The forward of a module, slice by slice.

[Note: order of summation] In backward autograd runs first what was made last. Slices run last to first in forward, so
their gradients are added up first to last, as a loop over micro-batches adds them. The reentrant form of checkpointing
ends the backward of one slice before that of the next, so that each adds its gradients to the others in the reduce
dtype, as FSDP2 does when it accumulates. The other form would add them up inside of autograd, in the compute dtype.
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
    """Have a module called with another forward."""
    module.forward = forward


class SlicedForward:
    """The forward of a module, slice by slice."""

    def __init__(
        self, module: nn.Module, count: int, batch_dim: BatchDim = None, *, fsdp_module: nn.Module | None = None
    ) -> None:
        """Take over from the forward that `module` has.

        Args:
            module: its forward runs slice by slice.
            count: how many slices; 0: none, the module's own forward runs.
            batch_dim: as `micro_batches` takes it.
            FSDP module: `fully_shard` was called on it, and it gathers the module's parameters; None: the module
            itself.
        """
        forward = module.forward
        self.module, self.count = module, count
        self._fsdp_module = module if fsdp_module is None else fsdp_module
        # The forward of the module itself, for a whole batch.
        self.whole: Callable[..., Any] = forward.whole if isinstance(forward, SlicedForward) else forward
        # Finds out, once per kind of call, how batches are sliced.
        self._finder = SlicingFinder(module, self.whole, batch_dim)
        update_wrapper(self, self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the whole batch gives.

        Raises:
            ConfigError: the batch cannot be split.
            UnsupportedError: an argument or an output cannot be.
        """
        if not self.count:
            return self.whole(*args, **kwargs)
        call = Call.of(self.whole, args, kwargs)
        slicing = None if self.count == 1 else self._finder.find(self.whole, call, self.count)
        return self.run(self.whole, call, slicing, self.count)

    def run(self, function: Callable[..., Any], call: Call, slicing: Slicing | None, count: int) -> Any:
        """Return what a function returns for all slices; without a slicing, for the whole as one."""
        rebuilds: list[Callable[[Sequence[Any]], Any]] = []
        call_with = call.run  # what checkpoints keep has no part in the arguments themselves

        def run_slice(anchor: torch.Tensor, *parts: Any) -> tuple[Any, ...]:
            outputs, rebuild = flatten(call_with(function, parts))
            if not rebuilds:  # that of another slice, or of one that is computed again, has the same structure
                rebuilds.append(rebuild)
            return tuple(outputs)

        if slicing is not None:
            torch_private.add_up_gradients(self._fsdp_module)
        # Without it a slice would not be part of the graph where its inputs need no gradient, but parameters do.
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
    """The forward of what the root runs behind its layers, slice by slice where that can be: norms save much."""

    _refused = False
    """Whether it cannot be sliced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the whole batch gives; in one go where slices would change it or cannot be made."""
        if not self._refused:
            try:
                return super().__call__(*args, **kwargs)
            except (UnsupportedError, ConfigError) as error:
                _log.warning("%s runs on the whole batch at once: %s", type(self.module).__name__, error)
                self._refused = True
        return self.whole(*args, **kwargs)
