"""Tests of several optimizers in one run: infinity.offload() returns one optimizer that steps all of them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, InfinityError, UnsupportedError
from infinity.formats.dcp import export_dcp
from infinity.store.folder import RunFolder
from support import models
from support.optimizers import Pictures, SettingOnSelf, build
from support.train import Paging, batch, local, settings
from support.unsharded import muon_and_adamw


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices and the other parameters."""
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def config(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a configuration with a small host cache."""
    return settings(folder, Paging(update_schedule="in_forward"), 4 << 20, **sections)


def test_each_optimizer_keeps_its_scheduler_and_initial_state(tmp_path: Path) -> None:
    """Schedulers refer to the base optimizers, and Adagrad starts with the state that its constructor creates."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = split_parameters(model)
        return [
            torch.optim.AdamW(matrices, lr=1e-2),
            torch.optim.Adagrad(rest, lr=1e-2, initial_accumulator_value=0.1),
        ]

    def run(model: nn.Module, first: Any, second: Any, steps: list[Any], zero: Any) -> list[Any]:
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1 / (1 + step)),
            torch.optim.lr_scheduler.ExponentialLR(second, 0.5),
        ]
        for number in range(4):
            models.loss_of(model, batch(model, number)).backward()
            for step in steps:
                step()
            for schedule in schedules:
                schedule.step()
            zero()
        return [local(param) for param in model.parameters()] + [schedule.get_last_lr() for schedule in schedules]

    plain = build()
    one, other = make(plain)
    expected = run(plain, one, other, [lambda: one.step(), lambda: other.step()], plain.zero_grad)
    model = build()
    base_optimizers = make(model)
    with infinity.offload(model, base_optimizers, config(tmp_path)) as optimizer:
        assert [id(group) for one in base_optimizers for group in one.param_groups] == [
            *map(id, optimizer.param_groups)
        ]
        found = run(model, *base_optimizers, [optimizer.step], optimizer.zero_grad)
        assert sorted(base_optimizers[1].state[split_parameters(model)[1][0]]) == ["step", "sum"]
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(expected, found, strict=True)
    )


def test_step_of_a_replaced_optimizer_raises(tmp_path: Path) -> None:
    model = build()
    base_optimizers = muon_and_adamw(list(model.parameters()))
    with infinity.offload(model, base_optimizers, config(tmp_path)):
        for one in base_optimizers:
            with pytest.raises(InfinityError, match=r"replaced .*infinity\.offload\(\).*step\(\)"):
                one.step()
            with pytest.raises(UnsupportedError, match="cannot be added"):
                one.add_param_group({"params": []})


def test_resume_requires_the_same_optimizers_in_order(tmp_path: Path) -> None:
    """The error contains both lists of optimizers."""
    model = build()
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), config(tmp_path)) as optimizer:
        optimizer.save_checkpoint()
    again = build()
    matrices, rest = split_parameters(again)
    with pytest.raises(CheckpointError, match=r"Muon\+AdamW.* AdamW\+AdamW"):
        infinity.offload(
            again,
            [torch.optim.AdamW(matrices), torch.optim.AdamW(rest)],
            config(tmp_path, run={"resume": "latest"}),
        )


def test_unsupported_optimizer_lists_are_rejected(tmp_path: Path) -> None:
    """Empty lists, shared or missing parameters, step hooks, and attributes that updates would not see are rejected."""
    model = build()
    matrices, rest = split_parameters(model)
    with pytest.raises(UnsupportedError, match="empty list"):
        infinity.offload(model, [], config(tmp_path))
    with pytest.raises(UnsupportedError, match=r"list of optimizers .* torch\.optim\.Optimizer"):
        infinity.offload(model, [torch.optim.SGD(matrices), model], config(tmp_path))  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match="two optimizers have the same parameter"):
        infinity.offload(model, [torch.optim.SGD(matrices), torch.optim.SGD(matrices + rest)], config(tmp_path))
    hooked = torch.optim.SGD(matrices)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="SGD has hooks"):
        infinity.offload(model, [hooked, torch.optim.SGD(rest)], config(tmp_path))
    with pytest.raises(UnsupportedError, match="requires a gradient but is not in the optimizer"):
        infinity.offload(model, [torch.optim.SGD(matrices)], config(tmp_path))
    first = SettingOnSelf(matrices, lr=0.1)
    with infinity.offload(model, [first, torch.optim.SGD(rest)], config(tmp_path)) as optimizer:
        first.factor = 0.5
        models.loss_of(model, batch(model, 0)).backward()
        with pytest.raises(UnsupportedError, match=r"an attribute of one of the optimizers \(SettingOnSelf\+SGD\)"):
            optimizer.step()


UPDATED: list[weakref.ref[torch.Tensor]] = []
"""Weak references to the parameters that `RecordingSGD` has updated."""


class RecordingSGD(torch.optim.SGD):
    """Records the parameters that it updates."""

    def step(self, closure: Any = None) -> Any:
        UPDATED.extend(weakref.ref(param) for group in self.param_groups for param in group["params"])
        return super().step(closure)


def test_update_keeps_no_references_to_host_cache_views(tmp_path: Path) -> None:
    """Optimizers receive views of the host cache, which is unmapped when the last view is gone."""
    model = build()
    base_optimizers = [RecordingSGD(params, lr=0.1) for params in split_parameters(model)]
    with infinity.offload(model, base_optimizers, config(tmp_path)) as optimizer:
        models.loss_of(model, batch(model, 0)).backward()
        UPDATED.clear()
        optimizer.step()
        optimizer.save_checkpoint()  # flushes all updates
        gc.collect()
        assert UPDATED
        assert [reference for reference in UPDATED if reference() is not None] == []


class Wrapping(torch.optim.Optimizer):
    """Contains optimizers that have their own parameter groups."""

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


def test_optimizer_containing_optimizers_is_rejected(tmp_path: Path) -> None:
    """Copies of the outer optimizer would update nothing; the error suggests passing the inner ones as a list."""
    model = build()
    inner = [torch.optim.SGD(params, lr=0.1) for params in split_parameters(model)]
    with pytest.raises(UnsupportedError, match="Wrapping changes no weight"):
        infinity.offload(model, Wrapping(inner), config(tmp_path))


def test_run_starts_from_a_dcp_export_of_two_optimizers(tmp_path: Path) -> None:
    """Weights, momenta, moments, step counts and settings of each group are restored."""

    def full_state(model: nn.Module, optimizer: Any) -> list[Any]:
        states = [value for p in model.parameters() for value in optimizer.state[p].values()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return [*map(local, model.parameters()), *map(local, states), groups]

    model = build()
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), config(tmp_path)) as optimizer:
        for number in range(2):
            models.loss_of(model, batch(model, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.005
        optimizer.save_checkpoint()
        expected = full_state(model, optimizer)
        folder = optimizer.run.folder
    export_dcp(CheckpointReader(RunFolder(folder.run_id, folder.roots)), tmp_path / "dcp")
    (tmp_path / "again").mkdir()
    with torch.device("meta"):
        empty = Pictures()
    again = models.shard(empty)
    base_optimizers = muon_and_adamw(list(again.parameters()))
    with infinity.offload(again, base_optimizers, config(tmp_path / "again"), weights=tmp_path / "dcp") as optimizer:
        found = full_state(again, optimizer)
    assert found[-1] == expected[-1]
    assert [torch.equal(a, b) for a, b in zip(expected[:-1], found[:-1], strict=True)].count(False) == 0
