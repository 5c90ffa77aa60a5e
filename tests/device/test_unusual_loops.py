"""Tests of training loops on a simulated device that use weights or gradients in an unusual order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import schedulefree
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.integrations.transformers.trainer import reshard
from support.device.simulation import simulation

Optimizer = Callable[[Any], Any]
Loop = Callable[[Any, Any], list[float]]
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Layer(nn.Module):
    """A layer that may have a frozen parameter without elements, or a parameter that receives no gradient."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        if other == "empty":
            self.other = nn.Parameter(torch.empty(0), requires_grad=False)
        elif other == "unused":
            self.other = nn.Parameter(torch.zeros(64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def sharded(layers: int, other: str) -> nn.Sequential:
    """Return a sharded model. Its root has no parameters of its own, unless it has a single layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(other) for _ in range(layers)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model, model) if layers > 1 else (model,):
        fully_shard(module, mesh=infinity.mesh("cpu"), mp_policy=policy)
    return model


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    loss: torch.Tensor = model(factor * x).float().pow(2).mean()
    return loss


def compare(
    loop: Loop,
    optimizer: Optimizer,
    folder: Path,
    *,
    layers: int = 6,
    other: str = "",
    device_bytes: int = 1,
    **update: Any,
) -> None:
    """Compare the losses of a loop with training in memory."""
    plain = sharded(layers, other)
    expected = loop(plain, optimizer([param for param in plain.parameters() if param.requires_grad]))
    settings = {
        "storage": {"paths": [str(folder)]},
        "memory": {"host_bytes": 8 << 20, "page_bytes": 64 << 10, "device_bytes": device_bytes},
        "update": {"cores": 1, **update},
        "run": {"keep": "never"},
    }
    with simulation("order-updates"):
        model = sharded(layers, other)
        made = optimizer([param for param in model.parameters() if param.requires_grad])
        with infinity.offload(model, made, settings) as paged:
            assert loop(model, paged) == expected


def train(model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_change_of_mode_after_a_forward_without_backward(tmp_path: Path) -> None:
    """The forward has prefetched weights, which the change of mode replaces."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        optimizer.train()
        losses = train(model, optimizer)
        losses.append(loss_of(model).item())
        optimizer.eval()
        losses.append(loss_of(model).item())  # with gradients enabled
        reshard(model)
        optimizer.train()
        return losses + train(model, optimizer)

    compare(loop, partial(schedulefree.AdamWScheduleFree, lr=0.1), tmp_path, device_bytes=100_000)


def test_lower_halves_become_nonzero_between_two_gradients_of_a_module(tmp_path: Path) -> None:
    """The sum needs the lower halves of both gradients."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = train(model, optimizer)
        model.set_gradient_divide_factor(3.0)
        for _ in range(3):
            for factor in (1.0, 2.0):
                loss = loss_of(model, factor)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    compare(loop, ADAMW, tmp_path, layers=1, schedule="after_backward")


@pytest.mark.parametrize(("interrupted", "other"), [("read", ""), ("step", ""), ("step", "unused")])
def test_interrupted_check_of_lower_halves_is_repeated(interrupted: str, other: str, tmp_path: Path) -> None:
    """If a parameter receives no gradient, the gradients of its module are still arriving when `step` begins."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = train(model, optimizer)
        model.set_gradient_divide_factor(3.0)
        for layer in model:
            layer.set_gradient_divide_factor(3.0)
        loss_of(model).backward()
        if isinstance(optimizer, infinity.PagedOptimizer):
            failing = patch.object(optimizer.run.pager, "wait_for_device", side_effect=KeyboardInterrupt)
            with failing, pytest.raises(KeyboardInterrupt):
                optimizer.step() if interrupted == "step" else model[0].linear.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        return losses + train(model, optimizer)

    compare(loop, ADAMW, tmp_path, layers=3, other=other, schedule="after_backward")


def test_evaluation_in_inference_mode_runs_pending_updates(tmp_path: Path) -> None:
    """Tensors that the updates keep for later steps are not inference tensors."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for number in range(5):
            losses += train(model, optimizer, 1)
            if number < 2:
                with torch.inference_mode():
                    loss_of(model)
                reshard(model)
        if isinstance(optimizer, infinity.PagedOptimizer):
            buffers = optimizer._runner.updates._device_pages._memory  # type: ignore[union-attr]
            assert [memory.is_inference() for memory, _ in buffers] == [False, False]
        return losses

    compare(loop, ADAMW, tmp_path, device_bytes=40_000, cores=0, schedule="in_forward")


def test_gpu_resident_module_with_a_parameter_without_elements(tmp_path: Path) -> None:
    compare(train, ADAMW, tmp_path, other="empty", device_bytes=64 << 20)
