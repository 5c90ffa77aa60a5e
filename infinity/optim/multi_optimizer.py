"""Combination of several optimizers, each with its own parameters, into a single optimizer.

An example is Muon for matrices and AdamW for all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from infinity import torch_private
from infinity.errors import UnsupportedError

OWNER: Final = "optimizer"
"""Name of the param group setting that holds the index of the optimizer to which the group belongs."""


class Optimizers(torch.optim.Optimizer):
    """Optimizer that steps several optimizers one after the other, and has the param groups of all of them.

    The param groups are the optimizers' own dictionaries, so that schedulers of each optimizer keep working. The
    setting `OWNER` is added to each group.

    Raises:
        UnsupportedError: if the list is empty, an item is not an optimizer, two optimizers share a parameter, or an
            optimizer has hooks or overrides `zero_grad`, which would not be called.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers:
            raise UnsupportedError("infinity.offload received an empty list of optimizers; pass at least one")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UnsupportedError(
                    f"the list of optimizers contains a {type(optimizer).__name__}, which is not a "
                    "torch.optim.Optimizer"
                )
            name = type(optimizer).__name__
            if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
                raise UnsupportedError(
                    f"{name} overrides zero_grad(), which is not called for optimizers in a list; move the additional "
                    "work into the training loop"
                )
            if any(hooks for key, hooks in vars(optimizer).items() if torch_private.is_hooks(key)):
                raise UnsupportedError(
                    f"{name} has hooks, which are not called for optimizers in a list; register them on the optimizer "
                    "that infinity.offload returns"
                )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        params = [id(param) for group in groups for param in group["params"]]
        if len(set(params)) < len(params):
            raise UnsupportedError(
                "two optimizers have the same parameter; assign each parameter to one optimizer, for example matrices "
                "to one and all other parameters to the other"
            )
        for number, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                group[OWNER] = number
        self.optimizers = list(optimizers)
        """Combined optimizers, in the order in which they step."""
        super().__init__(groups, {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step of each optimizer. All of them receive the same loss, which the closure returns."""
        loss = closure() if closure is not None else None
        for number, inner in enumerate(self.optimizers):
            inner.param_groups = [group for group in self.param_groups if group[OWNER] == number]
            inner.state = self.state
            try:
                if inner.param_groups:
                    torch_private.unhooked_step(inner)(*([] if closure is None else [lambda: loss]))
            finally:
                inner.param_groups = []  # their parameters may be views of cache slots, which must not be kept alive
        return loss


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `optimizer` combines, or a list with only `optimizer` itself."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def owner(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer to which a param group belongs."""
    return optimizer.optimizers[group[OWNER]] if isinstance(optimizer, Optimizers) else optimizer


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer, such as ``Muon+AdamW`` for a combination."""
    return "+".join(type(part).__name__ for part in parts(optimizer))
