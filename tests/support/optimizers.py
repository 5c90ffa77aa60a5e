"""Bitwise comparison of training in memory and offloaded with any optimizer, and optimizers with special behavior."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import infinity
from support import models
from support.train import (
    LocalOptimizer,
    Outcome,
    Paging,
    batch,
    differences,
    host_bytes,
    settings,
    state_in_memory,
    state_on_nvme,
)

STEPS = 5
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Pictures(models.Toy):
    """A model with matrices, vectors, and a 4-dimensional weight that spans several pages."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.first = nn.Conv2d(1, 16, 1)
        self.second = nn.Conv2d(16, 32, 5, padding=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.through_blocks(self.embedding(tokens))
        x = x + self.second(self.first(x.unsqueeze(1)).relu()).mean(1)
        return models.cross_entropy(self.head(x), tokens)


def build() -> nn.Module:
    """Return the sharded model."""
    torch.manual_seed(0)
    return models.shard(Pictures())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two param groups with different settings: matrices, and other parameters."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim == 2]},
        {"params": [param for param in params if param.ndim != 2], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: Any, outcome: Outcome, first: int = 0, last: int = STEPS) -> None:
    """Train with a learning rate that changes in every step."""
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group.get("initial", group["lr"]) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["initial"] = rate
    for step in range(first, last):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate / (1 + step % 3)
        loss = models.loss_of(model, batch(model, step))
        loss.backward()
        outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


def values_of(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the numeric settings of the param groups."""
    return {
        f"group {number}": {
            key: torch.as_tensor(value).reshape(-1)
            for key, value in group.items()
            if key not in ("params", "optimizer") and isinstance(value, int | float | torch.Tensor)
        }
        for number, group in enumerate(optimizer.param_groups)
    }


@functools.cache
def in_memory(make: Make) -> Outcome:
    """Train with plain FSDP2."""

    def on_local_tensors(model: nn.Module) -> LocalOptimizer:
        params = list(model.parameters())

        def made(parts: list[nn.Parameter]) -> torch.optim.Optimizer:
            of = dict(zip(params, parts, strict=True))
            return make([{**group, "params": [of[param] for param in group["params"]]} for group in groups_of(model)])

        return LocalOptimizer(params, made)

    try:
        return _in_memory(lambda model: make(groups_of(model)))
    except (NotImplementedError, RuntimeError, AssertionError):  # the optimizer does not support DTensor
        return _in_memory(on_local_tensors)


def _in_memory(make: Callable[[nn.Module], Any]) -> Outcome:
    model = build()
    optimizer, outcome = make(model), Outcome()
    train(model, optimizer, outcome)
    outcome.state = state_in_memory(model, optimizer) | values_of(optimizer)
    return outcome


def paged(
    make: Callable[[nn.Module], Any],
    folder: Path,
    *,
    build: Callable[[], nn.Module] = build,
    steps: int = STEPS,
    checkpoint: int = 0,
    **options: Any,
) -> Outcome:
    """Train with the optimizers that `make` returns for a model, offloaded with the smallest host cache.

    If `checkpoint` is not 0, save a checkpoint after this step and resume it with a new model.
    """
    paging, outcome = Paging(host_cache="least", **options), Outcome()
    first = 0
    for last in (checkpoint, steps) if checkpoint else (steps,):
        model = build()
        optimizer = make(model)
        host = host_bytes(paging, model, optimizer, folder)
        run = {"resume": "latest"} if first else {}
        with infinity.offload(model, optimizer, settings(folder, paging, host, run=run)) as offloaded:
            train(model, offloaded, outcome, first, last)
            if last == checkpoint:
                offloaded.save_checkpoint()
            else:
                outcome.state = state_on_nvme(model, offloaded) | values_of(offloaded)
                outcome.update_schedule = offloaded.update_schedule
        first = last
    return outcome


def compare(make: Make, folder: Path, **options: Any) -> list[str]:
    """Train in memory and offloaded; return the differences."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        found = paged(lambda model: make(groups_of(model)), Path(temporary), **options)
        return differences(in_memory(make), found)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


# Optimizers with special behavior #


class CounterInGroup(torch.optim.Optimizer):
    """Optimizer that keeps a step count, a list and a tensor in its param groups."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "step": 0})
        for group in self.param_groups:
            group["recent"], group["tensor"] = [0, [0.0]], torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            group["recent"][1][0] = 1 / group["step"]
            group["tensor"].add_(1.0)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                rate = group["lr"] * (1 + group["recent"][1][0]) / float(group["tensor"])
                param.mul_(1 - rate * group["weight_decay"])
                param.add_(state["mean"] / (1 - 0.9 ** group["step"]), alpha=-rate)


class PerParameter(torch.optim.SGD):
    """SGD that modifies each parameter, or its gradient, before the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(param, group)
        return super().step(closure)

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class CounterOnSelf(PerParameter):
    """Optimizer that keeps a step count in an attribute."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad = param.grad / self.count


class DecayOfMatrices(PerParameter):
    """Optimizer that applies weight decay to parameters with two or more dimensions."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim >= 2:
            param.mul_(1 - group["lr"] * 0.1)


class Centralised(PerParameter):
    """Optimizer that subtracts the mean of each row from the gradient."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim >= 2:
            grad = local(param.grad)
            grad.sub_(grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True))


class TrustRatio(PerParameter):
    """Optimizer that scales the gradient by the ratio of parameter norm to gradient norm."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad = param.grad * (param.norm() / (param.grad.norm() + 1e-6))


class Keywords(torch.optim.SGD):
    """Optimizer whose constructor has only keyword arguments."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


class SettingOnSelf(PerParameter):
    """Optimizer with a setting in an attribute instead of the param groups."""

    def __init__(self, params: Any, factor: float = 1.0, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.factor = factor

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad = param.grad * self.factor


class GlobalNorm(torch.optim.SGD):
    """Optimizer that divides gradients by their global norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm() + 1e-6
        for param in params:
            param.grad = param.grad / norm
        return super().step(closure)


class LargestRate(PerParameter):
    """Optimizer that uses the learning rate of the first group for all groups."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad = param.grad * (self.param_groups[0]["lr"] / group["lr"])


class Noisy(PerParameter):
    """Optimizer that adds random noise to gradients."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad = param.grad + torch.randn_like(param.grad)


class Factored(PerParameter):
    """Optimizer that keeps one state value per row."""

    def change(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[param].setdefault("rows", torch.zeros(len(param))).add_(1)


class Replacing(torch.optim.Optimizer):
    """Optimizer that replaces its state tensors in every step, with a different dtype than the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["n"] = state.get("n", 0.0) + 1.0
                    state["mean"] = (state["mean"] * 0.9 if "mean" in state else 0) + param.grad.double() / state["n"]
                    param.sub_(state["mean"].to(param.dtype), alpha=group["lr"])


class LossDependent(torch.optim.SGD):
    """Optimizer that scales gradients by the loss that the closure returns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else 1.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad * float(loss)
        super().step()
        return loss

    def first_step(self) -> None:
        """Additional public method."""


class Ruled(torch.optim.SGD):
    """Optimizer that multiplies the learning rate by a factor for each parameter, given by `rule`."""

    def __init__(self, params: Any, rule: Any = None, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rule = rule
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.factor_of(param))

    def factor_of(self, param: torch.Tensor) -> float:
        return self.factor


class ById(Ruled):
    """Optimizer that identifies parameters by `id()`."""

    def factor_of(self, param: torch.Tensor) -> float:
        return 0.1 if id(param) in self.rule else 1.0


class ByParameter(Ruled):
    """Optimizer that uses parameters as dictionary keys."""

    def factor_of(self, param: torch.Tensor) -> float:
        return float(self.rule.get(param, 1.0))


class ByAttribute(Ruled):
    """Optimizer that identifies parameters by an attribute."""

    def factor_of(self, param: torch.Tensor) -> float:
        return 0.1 if getattr(param, "small", False) else 1.0


class ByName(Ruled):
    """Optimizer that identifies parameters by name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param, name in zip(group["params"], group["param_names"]):  # noqa: B905 (as users write it)
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * (0.1 if "blocks.1" in name else 1.0))


class ByFunction(Ruled):
    """Optimizer whose rule is a closure over the optimizer, or a bound method."""

    def __init__(self, params: Any, *, method: bool = False, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rule = self.current if method else lambda: self.factor

    def current(self) -> float:
        return self.factor

    def factor_of(self, param: torch.Tensor) -> float:
        return float(self.rule())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.factor *= 0.5
        return super().step(closure)


class Halving(torch.optim.SGD):
    """Optimizer whose `zero_grad` halves gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad * 0.5


class Dropping(torch.optim.SGD):
    """Optimizer that overrides `zero_grad` without changing its effect."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
