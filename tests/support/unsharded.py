"""Optimizers that require full parameters, and their reference: the same optimizers with unsharded parameters."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from support.optimizers import build, paged, train, values_of
from support.train import Outcome, differences, full_copy, local

STEPS = 4
MultiOptimizer = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]
"""Function that creates one or more optimizers for a list of parameters."""


def muon_and_adamw(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices and AdamW for other parameters. Muon iterates in bf16, which is slow on most CPUs."""
    return [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02, weight_decay=0.1, ns_steps=1),
        torch.optim.AdamW([p for p in params if p.ndim != 2], lr=3e-3),
    ]


class MuonByFlag(torch.optim.Optimizer):
    """Muon for param groups with ``use_muon``, including stacks of matrices, and a simple Adam for other groups."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = _orthogonal if group["use_muon"] else _scaled
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(update(param, self.state[param]), alpha=group["lr"])


def _orthogonal(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    mean = state.setdefault("mean", torch.zeros_like(param))
    mean.lerp_(param.grad, 0.05)
    matrix = mean.flatten(0, -2) if mean.ndim < 3 else mean.flatten(2)  # in fp32, because bf16 is slow on most CPUs
    matrix = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = matrix @ matrix.mT
        matrix = 3.4445 * matrix + (-4.775 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix.view_as(param).to(param.dtype)


def _scaled(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["step"] = state.get("step", 0) + 1
    square = state.setdefault("square", torch.zeros_like(param))
    square.mul_(0.95).addcmul_(param.grad, param.grad, value=0.05)
    return param.grad / (square.sqrt() / (1 - 0.95 ** state["step"]) ** 0.5 + 1e-8)


def muon_by_flag(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return one optimizer that uses Muon or Adam for each group."""
    return [
        MuonByFlag(
            [
                {"params": [p for p in params if p.ndim > 1], "use_muon": True},
                {"params": [p for p in params if p.ndim == 1]},
            ]
        )
    ]


class Unsharded:
    """Optimizers that update full parameters on every rank. Each rank copies its shards of the result to the model."""

    def __init__(self, model: nn.Module, make: MultiOptimizer) -> None:
        self._params = list(model.parameters())
        self._full = [nn.Parameter(full_copy(param)) for param in self._params]
        self._inner = make(self._full)
        self.param_groups = [group for inner in self._inner for group in inner.param_groups]

    def step(self) -> None:
        for param, full in zip(self._params, self._full, strict=True):
            full.grad = full_copy(param.grad) if param.grad is not None else None
        for inner in self._inner:
            inner.step()
        for param, full in zip(self._params, self._full, strict=True):
            param.detach().to_local().copy_(_sliced(full.detach(), param))

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    def state_of(self, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
        """Return the local shards of parameters and states by name."""
        found = {}
        for (name, param), full in zip(model.named_parameters(), self._full, strict=True):
            states = {key: value for inner in self._inner for key, value in inner.state.get(full, {}).items()}
            found[name] = {"master": local(param)} | {
                key: _sliced(value, param).reshape(-1)
                if isinstance(value, torch.Tensor) and value.shape == param.shape
                else torch.as_tensor(value).reshape(-1)
                for key, value in states.items()
            }
        return found


def _sliced(full: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).to_local()


@functools.cache
def in_memory(make: MultiOptimizer, build: Callable[[], nn.Module]) -> Outcome:
    """Train with optimizers of unsharded parameters."""
    model, outcome = build(), Outcome()
    optimizer = Unsharded(model, make)
    train(model, optimizer, outcome, 0, STEPS)
    outcome.state = optimizer.state_of(model) | values_of(optimizer)
    return outcome


def compare(make: MultiOptimizer, folder: Path, *, build: Callable[[], nn.Module] = build, **options: Any) -> list[str]:
    """Train in memory and offloaded; return the differences."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        found = paged(
            lambda model: make(list(model.parameters())), Path(temporary), build=build, steps=STEPS, **options
        )
        return differences(in_memory(make, build), found)


MAKES: dict[str, MultiOptimizer] = {"muon and adamw": muon_and_adamw, "muon by flag": muon_by_flag}
