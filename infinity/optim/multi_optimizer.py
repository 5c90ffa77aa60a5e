"""Several optimizers, each over a part of the parameters, as one: such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from infinity import torch_private
from infinity.errors import UnsupportedError

OWNER: Final = "optimizer"
"""Setting of a param group that says of which optimizer it is, by its number among those that were given."""


class Optimizers(torch.optim.Optimizer):
    """Optimizers over different parameters that step one after the other; it has the param groups of all of them.

    The groups are those of the optimizers themselves, so that schedulers of each of them work.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Put optimizers together; each of their groups gets the setting `OWNER`.

        Raises:
            UnsupportedError: there is none, one is no optimizer, two have the same parameter, or one has hooks or a
                `zero_grad` of its own, which would not be called.
        """
        if not optimizers:
            raise UnsupportedError("infinity.offload was given an empty list of optimizers")
        for base_optimizer in optimizers:
            if not isinstance(base_optimizer, torch.optim.Optimizer):
                raise UnsupportedError(
                    f"an optimizer is of type {type(base_optimizer).__name__}, no torch.optim.Optimizer"
                )
            name = type(base_optimizer).__name__
            if type(base_optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(
                base_optimizer
            ):
                raise UnsupportedError(f"zero_grad() of {name} is its own: among several optimizers it is not called")
            if any(hooks for key, hooks in vars(base_optimizer).items() if torch_private.is_hooks(key)):
                raise UnsupportedError(
                    f"{name} has hooks, which are not called among several optimizers: register them on the optimizer "
                    "that infinity.offload returns"
                )
        groups = [group for base_optimizer in optimizers for group in base_optimizer.param_groups]
        params = [id(param) for group in groups for param in group["params"]]
        if len(set(params)) < len(params):
            raise UnsupportedError(
                "two optimizers have the same parameter: give each its own, such as the matrices to one and the rest "
                "to the other"
            )
        for number, base_optimizer in enumerate(optimizers):
            for group in base_optimizer.param_groups:
                group[OWNER] = number
        self.optimizers = list(optimizers)
        """Those that were given, in order."""
        super().__init__(groups, {})
        for base_optimizer in optimizers:
            self.state.update(base_optimizer.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each optimizer step; all of them see what the closure returns."""
        loss = closure() if closure is not None else None
        for number, inner in enumerate(self.optimizers):
            inner.param_groups = [group for group in self.param_groups if group[OWNER] == number]
            inner.state = self.state
            try:
                if inner.param_groups:
                    torch_private.unhooked_step(inner)(*([] if closure is None else [lambda: loss]))
            finally:
                inner.param_groups = []  # what was updated may be views of cache slots, which nobody is to keep
        return loss


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one consists of: itself, unless it is several."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def owner(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of which a param group is: itself, unless it is several."""
    return optimizer.optimizers[group[OWNER]] if isinstance(optimizer, Optimizers) else optimizer


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of its class; ``Muon+AdamW`` where it is several."""
    return "+".join(type(part).__name__ for part in parts(optimizer))
