"""Tests of optimizer settings that are device tensors: CPU updates use their values at the time of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import infinity
from support.train import Paging, Recipe, batch, build, settings, state_in_memory, state_on_nvme

RECIPE = Recipe(model="even")
FACTORS = (0.5, 3.0, 0.25)


class FakeDeviceTensor(torch.Tensor):
    """Tensor that reports another device: its value can be used or copied there, but not mixed with CPU tensors."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> FakeDeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="meta")
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        leaves, _ = tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls) for leaf in leaves):
            if func is torch.ops.aten._to_copy.default:
                return cls(args[0].clone())
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        found = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if device is not None and torch.device(device).type == "cpu":
            return torch.full_like(found, float("nan")) if kwargs.get("non_blocking") else found
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda item: cls(item) if isinstance(item, torch.Tensor) else item, found)


def _inside(item: Any) -> Any:
    return item.value if isinstance(item, FakeDeviceTensor) else item


def train_with_tensor_lr(folder: Path, lr: Any, **options: Any) -> tuple[dict[str, dict[str, torch.Tensor]], Any]:
    """Return the state and learning rate after some steps that change the learning rate in place."""
    model = build(RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, **options)
    with infinity.offload(model, optimizer, settings(folder, Paging(), 1 << 26)) as paged:
        for step, factor in enumerate(FACTORS):
            model(batch(model, step)).backward()
            paged.step()
            paged.zero_grad()
            paged.param_groups[0]["lr"].mul_(factor)
        return state_on_nvme(model, paged), paged.param_groups[0]["lr"]


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": True, "capturable": True}, {}])
def test_device_learning_rate_matches_cpu_learning_rate(options: dict[str, Any], tmp_path: Path) -> None:
    """The states are bitwise equal, also to training in memory, and the learning rate remains a device tensor."""
    model = build(RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-3), weight_decay=0.1, **options)
    for step, factor in enumerate(FACTORS):
        model(batch(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"].mul_(factor)
    expected = state_in_memory(model, optimizer)
    found, lr = train_with_tensor_lr(tmp_path, FakeDeviceTensor(torch.tensor(3e-3)), **options)
    assert isinstance(lr, FakeDeviceTensor)
    assert lr.value == optimizer.param_groups[0]["lr"]
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        for kind, value in states.items():
            assert torch.equal(value.reshape(-1), found[name][kind].reshape(-1)), f"{name}/{kind}"
