"""Tests of user code that acts on optimizers and parameters between the calls of a step: as in memory, or rejected."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from support import models
from support.ranks import RankPool
from support.tables import alternate
from support.train import Paging, Recipe, batch, build, local, make_optimizer, offloaded, settings

RECIPE = Recipe(model="toy")
STORED_GRADIENTS = ("after_backward", "in_forward")


def backward(model: nn.Module, number: int = 0) -> None:
    """Run one forward and backward."""
    models.loss_of(model, batch(model, number)).backward()


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    """Take one step."""
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        models.loss_of(model, batch(model, 9))


# Weights between backward and step #


def test_reading_weights_updated_in_backward_is_rejected(tmp_path: Path) -> None:
    """After `step()` the weights match those in memory."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_backward"), tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model, 1)
        weight = model.head.weight
        for read in (
            lambda: evaluate(model),
            lambda: weight.full_tensor().clone(),
            lambda: models.loss_of(model, batch(model, 9)),
            lambda: weight.data.copy_(torch.zeros_like(weight.grad)),
            lambda: optimizer.read_state("head.weight"),
            lambda: optimizer.state[weight],
        ):
            with pytest.raises(InfinityError, match=r"weights of FSDP module root were updated in backward.*schedule"):
                read()


class GrowthSGD(torch.optim.SGD):
    """SGD with a setting whose default is infinity, which means no limit."""

    def __init__(self, params: Any, lr: float = 0.1, growth: float = math.inf) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["growth"] = growth


@pytest.mark.parametrize(
    ("settings_of", "rejected"), [({}, ""), ({"lr": float("inf")}, "lr"), ({"growth": float("nan")}, "growth")]
)
def test_nonfinite_settings_are_rejected_unless_default(
    settings_of: dict[str, float], rejected: str, tmp_path: Path
) -> None:
    """The error contains the name of the setting and is raised before the slicing check."""
    model = build(RECIPE)
    optimizer = GrowthSGD(model.parameters(), **settings_of)
    config = settings(tmp_path, Paging(), 64 << 20)
    if rejected:
        with pytest.raises(ConfigError, match=f"{rejected} = .*finite"):
            infinity.offload(model, optimizer, config)
    else:
        with infinity.offload(model, optimizer, config) as paged:
            step(model, paged)


# The base optimizer #


def test_param_groups_cannot_be_added(tmp_path: Path) -> None:
    """This holds for both optimizers, and for parameters appended to a group."""
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), tmp_path) as (model, optimizer):
        extra = nn.Parameter(torch.zeros(3))
        for each in (optimizer, optimizer._base_optimizer):
            with pytest.raises(UnsupportedError, match=r"param group cannot be added.*before infinity\.offload"):
                each.add_param_group({"params": [extra]})
        step(model, optimizer)
        optimizer.param_groups[0]["params"].append(extra)
        backward(model)
        with pytest.raises(UnsupportedError, match="changed after"):
            optimizer.step()


def test_parameters_unfrozen_after_offload_are_unsupported(tmp_path: Path) -> None:
    """The error in the next forward contains the parameter name."""
    model = models.build("toy", meta=True)
    model.blocks[1].up.weight.requires_grad_(False)
    optimizer = make_optimizer(RECIPE, model)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)) as paged:
        step(model, paged)
        model.blocks[1].up.weight.requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.weight .*frozen.*before infinity\.offload"):
            backward(model)


# States #


def list_state_differences(folder: str, name: str, update_schedule: str) -> list[str]:
    """Return the differences between `optimizer.state` and the state in memory, step by step. Runs on every rank."""
    recipe = Recipe(model="toy" if name == "adagrad" else "spare", optimizer=name)
    reference = build(recipe)
    in_memory = make_optimizer(recipe, reference)
    listed: list[str] = []
    with offloaded(recipe, Paging(host_cache="all", update_schedule=update_schedule), Path(folder)) as (
        model,
        optimizer,
    ):
        for number in range(3):
            for each in (optimizer, optimizer._base_optimizer):
                listed += differing_states(reference, in_memory, model, each, number)
            step(reference, in_memory, number)
            step(model, optimizer, number)
        if name != "sgd":
            assert next(iter(optimizer.state)) is next(iter(model.parameters()))
        with pytest.raises(UnsupportedError, match="write to its tensors"):
            optimizer.state[model.head.weight] = {}
    return listed


def differing_states(reference: nn.Module, in_memory: Any, model: nn.Module, optimizer: Any, number: int) -> list[str]:
    """Return the states that differ."""
    listed = []
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if (ours in optimizer.state) is not (theirs in in_memory.state):
            listed.append(f"{name} after {number} steps")
            continue
        found, expected = optimizer.state[ours], in_memory.state.get(theirs, {})
        for key, value in expected.items():
            same = type(found[key]) is type(value)
            if same and isinstance(value, torch.Tensor):
                same = found[key].shape == value.shape and torch.equal(local(found[key]), local(value))
            if not same:
                listed.append(f"{name}/{key} after {number} steps")
    return listed


@pytest.mark.parametrize(
    ("name", "update_schedule"), alternate(["adamw", "sgd_nesterov", "adagrad", "sgd"], ["in_forward", "in_backward"])
)
def test_states_match_training_in_memory(name: str, update_schedule: str, tmp_path: Path) -> None:
    """States are sharded like the parameter, and parameters without gradients have none."""
    assert list_state_differences(str(tmp_path), name, update_schedule) == []


def test_states_on_two_ranks_match_training_in_memory(tmp_path: Path, pair: RankPool) -> None:
    """Each rank has its shard."""
    assert pair.run(list_state_differences, str(tmp_path), "adamw", "in_forward") == [[], []]


# Schedulers of a run that resumes #


def resumed_rate(folder: Path, create: str, config: dict[str, Any], *, manual: bool = False) -> float:
    """Resume and take a step with a warm-up that is created before or after `offload`; return the learning rate."""
    model = build(RECIPE)
    optimizer: Any = make_optimizer(RECIPE, model)
    scheduler = LinearLR(optimizer, 0.1, total_iters=4) if create == "before" else None
    with infinity.offload(model, optimizer, config) as paged:
        if create in ("base", "paged"):
            scheduler = LinearLR(optimizer if create == "base" else paged, 0.1, total_iters=4)
        if scheduler is not None:
            scheduler.load_state_dict(paged.resumed_extra["scheduler"])
        if manual:
            paged.param_groups[0]["lr"] = 0.5
        rate = paged.param_groups[0]["lr"]
        step(model, paged)
        step(model, paged)
        return rate


@pytest.mark.parametrize("create", ["before", "base", "paged", "manual"])
def test_rate_changed_by_a_scheduler_created_after_resuming_is_reported(
    create: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with both values. A rate that the training loop sets itself is not reported."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    full = optimizer.param_groups[0]["lr"]
    scheduler = LinearLR(optimizer, 0.1, total_iters=4)
    config = settings(tmp_path, Paging(host_cache="all"), 64 << 20)
    with infinity.offload(model, optimizer, config) as paged:
        step(model, paged)
        scheduler.step()
        saved = paged.param_groups[0]["lr"]
        paged.save_checkpoint({"scheduler": scheduler.state_dict()})
    rate = resumed_rate(tmp_path, create, {**config, "run": {"resume": "latest"}}, manual=create == "manual")
    expected = f"param group 0: lr was changed from {saved} to {rate} by a scheduler"
    reported = [record.getMessage() for record in caplog.records if "by a scheduler" in record.getMessage()]
    if create in ("base", "paged"):
        assert rate != saved
        assert [message.startswith(expected) for message in reported] == [True]
    else:
        assert rate == {"before": saved, "manual": 0.5}[create] != full
        assert reported == []


# Settings and attributes #


class ScaledSGD(torch.optim.SGD):
    """SGD that scales updates by settings that can change in place, and by an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.noise = 1.0
        for group in self.param_groups:
            group.update(scales=[1.0], inner={"scale": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    scale = group["scales"][0] * self.noise
                    param.add_(param.grad * group["inner"]["scale"], alpha=-group["lr"] * scale)


def replace_group(optimizer: Any) -> None:
    """Replace a parameter group by another dictionary."""
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.03}


def replace_groups(optimizer: Any) -> None:
    """Replace the list of parameter groups."""
    optimizer.param_groups = [{**group, "lr": 0.03} for group in optimizer.param_groups]


def change_list(optimizer: Any) -> None:
    """Change a list setting in place."""
    optimizer.param_groups[0]["scales"][0] *= 0.5


def change_tensor(optimizer: Any) -> None:
    """Change a tensor setting in place."""
    optimizer.param_groups[0]["inner"]["scale"].mul_(0.5)


def change_attribute(optimizer: Any) -> None:
    """Change an attribute that updates read."""
    optimizer.noise = optimizer.noise * 0.5


CHANGES = [replace_group, replace_groups, change_list, change_tensor, change_attribute]


def train_with_changes(model: nn.Module, optimizer: Any, change: Any, before_step: bool) -> list[torch.Tensor]:
    """Train with a change before or after each `step()`; return the final weights."""
    found = []
    for number in range(4):
        backward(model, number)
        if before_step:
            change(optimizer)
        optimizer.step()
        if not before_step:
            change(optimizer)
        optimizer.zero_grad()
    found += [local(param) for param in model.parameters()]
    return found


@pytest.mark.parametrize(
    ("change", "case"), alternate(CHANGES, itertools.product(["auto", *STORED_GRADIENTS], [False, True]))
)
def test_changed_settings_match_training_in_memory(change: Any, case: tuple[str, bool], tmp_path: Path) -> None:
    """This includes settings that are replaced or changed in place while updates of the last step are pending."""
    update_schedule, before_step = case
    model = build(RECIPE)
    expected = train_with_changes(model, ScaledSGD(model.parameters()), change, before_step)
    paged = build(RECIPE)
    base_optimizer = ScaledSGD(paged.parameters())
    with infinity.offload(
        paged, base_optimizer, settings(tmp_path, Paging(update_schedule=update_schedule), 64 << 20)
    ) as optimizer:
        found = train_with_changes(paged, optimizer, change, before_step)
        assert base_optimizer.param_groups is optimizer.param_groups
        optimizer.save_checkpoint()
    assert all(map(torch.equal, expected, found))


def test_checkpoint_contains_the_current_settings(tmp_path: Path) -> None:
    """This includes replaced parameter groups."""
    with offloaded(RECIPE, Paging(), tmp_path) as (model, optimizer):
        step(model, optimizer)
        replace_groups(optimizer)
        optimizer.save_checkpoint()
        groups = CheckpointReader(optimizer.run.folder).groups
        assert [group["lr"] for group in groups] == [0.03]


@pytest.mark.parametrize("change", CHANGES)
def test_settings_changed_after_updates_in_backward_are_rejected(change: Any, tmp_path: Path) -> None:
    """Some weights have already been updated with the previous settings."""
    model = build(RECIPE)
    optimizer = ScaledSGD(model.parameters())
    with infinity.offload(
        model, optimizer, settings(tmp_path, Paging(update_schedule="in_backward"), 64 << 20)
    ) as paged:
        step(model, paged)
        backward(model, 1)
        change(paged)
        with pytest.raises(InfinityError, match=r"was changed.* between backward and step"):
            paged.step()


def test_attributes_without_effect_are_unsupported(tmp_path: Path) -> None:
    """Attributes that updates would not see are rejected; attributes that PyTorch sets are permitted."""
    model = build(RECIPE)
    base_optimizer = ScaledSGD(model.parameters())
    with infinity.offload(model, base_optimizer, settings(tmp_path, Paging(), 64 << 20)) as optimizer:
        optimizer.noise = 0.25
        assert base_optimizer.noise == optimizer.noise == 0.25
        assert "noise" not in vars(optimizer)
        optimizer.defaults = {**optimizer.defaults, "lr": 7.0}
        assert base_optimizer.defaults["lr"] == 7.0
        for name, value in (("noise", object()), ("another", 1.0)):
            with pytest.raises(UnsupportedError, match=f"{name} of ScaledSGD cannot be set after infinity"):
                setattr(optimizer, name, value)
        with pytest.raises(AttributeError):
            optimizer.steps = 3
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step(model, optimizer)
        optimizer.found_inf = torch.tensor(1.0)
        del optimizer.found_inf
        assert optimizer.steps == 1


def test_wrapper_with_diverging_param_groups_is_unsupported(tmp_path: Path) -> None:
    """In memory the inner optimizer would continue with the previous groups."""
    model = build(RECIPE)
    base_optimizer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with infinity.offload(model, base_optimizer, settings(tmp_path, Paging(), 64 << 20)) as optimizer:
        replace_group(optimizer)
        step(model, optimizer)
        replace_groups(optimizer)
        with pytest.raises(UnsupportedError, match=r"param group .*infinity\.offload.*lr to 0"):
            step(model, optimizer, 1)


class OuterOptimizer(torch.optim.Optimizer):
    """Delegates updates to an inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        """Update."""
        self.inner.step()


# Loading, replacing and copying #


def test_loading_into_or_replacing_the_state_of_the_base_optimizer_is_unsupported(tmp_path: Path) -> None:
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), tmp_path) as (model, optimizer):
        base_optimizer = optimizer._base_optimizer
        step(model, optimizer)
        with pytest.raises(UnsupportedError, match=r"infinity\.offload\(\)"):
            base_optimizer.load_state_dict(optimizer.state_dict())
        base_optimizer.state = {}
        backward(model, 1)
        with pytest.raises(UnsupportedError, match="write to its tensors"):
            optimizer.step()


def test_adding_state_entries_is_unsupported(tmp_path: Path) -> None:
    """Existing entries are returned."""
    with offloaded(RECIPE, Paging(update_schedule="in_forward"), tmp_path) as (model, optimizer):
        weight = model.head.weight
        for put in (
            lambda: optimizer.state.setdefault(weight, {}),
            lambda: optimizer.state[weight].setdefault("extra", 1),
            lambda: optimizer.state[weight].update(extra=1),
        ):
            with pytest.raises(UnsupportedError, match="write to its tensors"):
                put()
        assert optimizer.state[weight] == {}
        step(model, optimizer)
        with pytest.raises(UnsupportedError, match="write to its tensors"):
            optimizer.state[weight].setdefault("extra", 1)
        states = optimizer.state.setdefault(weight, {})
        assert torch.equal(local(states.setdefault("exp_avg")), local(optimizer.state[weight]["exp_avg"]))


def test_copying_an_optimizer_is_unsupported(tmp_path: Path) -> None:
    """This holds for both optimizers and for the states, because a copy would train nothing."""
    with offloaded(RECIPE, Paging(), tmp_path) as (model, optimizer):
        step(model, optimizer)
        copies = itertools.product(
            (optimizer, optimizer.state, optimizer._base_optimizer), (copy.deepcopy, pickle.dumps)
        )
        # A shallow copy of the base optimizer shares its attributes, as in memory.
        for each, copying in (*copies, (optimizer, copy.copy), (optimizer.state, copy.copy)):
            with pytest.raises(UnsupportedError, match=r"optimizer\.save_checkpoint\(\).*run\.resume"):
                copying(each)


def test_base_optimizer_does_not_keep_a_closed_run_alive(tmp_path: Path) -> None:
    """The host cache and the pages are freed, and the base optimizer remains unusable."""
    model = build(RECIPE)
    base_optimizer = make_optimizer(RECIPE, model)
    optimizer = infinity.offload(model, base_optimizer, settings(tmp_path, Paging(), 64 << 20))
    step(model, optimizer)
    references = [
        weakref.ref(each) for each in (optimizer, optimizer.run, optimizer.run.pager, optimizer.run.host_cache)
    ]
    optimizer.close()
    del optimizer
    gc.collect()
    assert [each() for each in references] == [None] * len(references)
    with pytest.raises(InfinityError, match="closed"):
        len(base_optimizer.state)
    with pytest.raises(UnsupportedError, match="cannot be added"):
        base_optimizer.add_param_group({"params": []})
    with pytest.raises(InfinityError, match=r"replaced .*infinity\.offload\(\).*step\(\)"):
        base_optimizer.step()
