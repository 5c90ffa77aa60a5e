"""What is done to the optimizers and to parameters between the calls of a step: as in memory, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import core_models
import pytest
import torch
from core_ranks import RankPool
from core_train import Paging, Recipe, batch, build, local, make_optimizer, offloaded, settings
from torch import nn

import infinity
from infinity.errors import InfinityError, UnsupportedError

RECIPE = Recipe(model="toy")
KEPT = ("after_backward", "in_forward")
GONE = ("in_backward", "in_both")


def backward(model: nn.Module, number: int = 0) -> None:
    """Run one forward and backward."""
    core_models.loss_of(model, batch(model, number)).backward()


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    """Take one step."""
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        core_models.loss_of(model, batch(model, 9))


# Weights between backward and step #


@pytest.mark.parametrize("placement", GONE)
@pytest.mark.parametrize(
    "look",
    [
        lambda model, _: evaluate(model),
        lambda model, _: model.head.weight.full_tensor().clone(),
        lambda model, _: core_models.loss_of(model, batch(model, 9)),
        lambda model, _: model.head.weight.data.copy_(torch.zeros_like(model.head.weight.grad)),
        lambda model, optimizer: optimizer.read_state("head.weight"),
        lambda model, optimizer: optimizer.state[model.head.weight],
    ],
    ids=["evaluation", "weights", "forward", "writing", "read_state", "state"],
)
def test_weights_that_are_a_step_ahead_are_refused(look: Any, placement: str, tmp_path: Path) -> None:
    """After `step()` they are what they are in memory."""
    with offloaded(RECIPE, Paging(arena="all", placement=placement), tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model, 1)
        with pytest.raises(InfinityError, match=r"weights of unit root were updated in backward.*update\.placement"):
            look(model, optimizer)


# The optimizer that was given #


@pytest.mark.parametrize("placement", ["auto", *KEPT])
def test_a_step_of_the_optimizer_that_was_given_is_refused(placement: str, tmp_path: Path) -> None:
    """Also through a scheduler's or scaler's call; the other one goes on as if nothing had been."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(placement=placement), 64 << 20)) as paged:
        backward(model)
        with pytest.raises(InfinityError, match=r"step\(\) of the optimizer that infinity\.offload has returned"):
            optimizer.step()
        paged.step()


def test_param_groups_cannot_be_added(tmp_path: Path) -> None:
    """To neither of the two optimizers, nor by hand."""
    with offloaded(RECIPE, Paging(placement="after_backward"), tmp_path) as (model, optimizer):
        extra = nn.Parameter(torch.zeros(3))
        for each in (optimizer, optimizer._given):
            with pytest.raises(UnsupportedError, match=r"param group cannot be added.*before infinity\.offload"):
                each.add_param_group({"params": [extra]})
        step(model, optimizer)
        optimizer.param_groups[0]["params"].append(extra)
        backward(model)
        with pytest.raises(UnsupportedError, match="changed after"):
            optimizer.step()


@pytest.mark.parametrize("meta", [False, True])
def test_parameters_that_are_unfrozen_later_are_refused(meta: bool, tmp_path: Path) -> None:
    """By name, in the next forward; an evaluation needs no states."""
    model = core_models.build("toy", meta=meta)
    model.blocks[1].up.weight.requires_grad_(False)
    optimizer = make_optimizer(RECIPE, model)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)) as paged:
        step(model, paged)
        model.blocks[1].up.weight.requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.weight was frozen.*before infinity\.offload"):
            backward(model)


def freezing(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Freeze parameters between steps, and unfreeze them; return the weights."""
    for number in range(4):
        model.blocks[1].requires_grad_(number not in (1, 2))
        step(model, optimizer, number)
    return [local(param) for param in model.parameters()]


@pytest.mark.parametrize("placement", [*KEPT, *GONE])
def test_parameters_that_are_frozen_later_are_as_in_memory(placement: str, tmp_path: Path) -> None:
    """They keep their values and states, and are trained again when they are unfrozen."""
    model = build(RECIPE)
    expected = freezing(model, make_optimizer(RECIPE, model))
    with offloaded(RECIPE, Paging(arena="all", placement=placement), tmp_path) as (paged, optimizer):
        found = freezing(paged, optimizer)
    assert all(map(torch.equal, expected, found))


# States #


def states_differ(folder: str, name: str, placement: str) -> list[str]:
    """Return where `optimizer.state` is not what it is in memory, step by step. Runs on every rank."""
    recipe = Recipe(model="toy" if name == "adagrad" else "spare", optimizer=name)
    reference = build(recipe)
    in_memory = make_optimizer(recipe, reference)
    listed: list[str] = []
    with offloaded(recipe, Paging(arena="all", placement=placement), Path(folder)) as (model, optimizer):
        for number in range(3):
            for each in (optimizer, optimizer._given):
                if number or name != "adagrad":
                    listed += differing(reference, in_memory, model, each, number)
                else:
                    with pytest.raises(InfinityError, match="not updated yet"):
                        each.state.get(model.head.weight)
            step(reference, in_memory, number)
            step(model, optimizer, number)
        if name != "sgd":
            assert next(iter(optimizer.state)) is next(iter(model.parameters()))
        with pytest.raises(UnsupportedError, match="write to its tensors"):
            optimizer.state[model.head.weight] = {}
    return listed


def differing(reference: nn.Module, in_memory: Any, model: nn.Module, optimizer: Any, number: int) -> list[str]:
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


@pytest.mark.parametrize("placement", ["in_forward", "in_backward"])
@pytest.mark.parametrize("name", ["adamw", "sgd_nesterov", "adagrad", "sgd"])
def test_states_are_those_of_memory(name: str, placement: str, tmp_path: Path) -> None:
    """Sharded like the parameter; none where there was never a gradient."""
    assert states_differ(str(tmp_path), name, placement) == []


def test_states_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    """Each rank has its part."""
    assert pair.run(states_differ, str(tmp_path), "adamw", "in_forward") == [[], []]


# Models on the meta device #


def test_hooks_on_a_model_on_the_meta_device_come_along(tmp_path: Path) -> None:
    """The parameters are replaced; handles that the user has still remove."""
    model = core_models.build("toy", meta=True)
    seen: list[int] = []
    handles = [param.register_post_accumulate_grad_hook(lambda p: seen.append(p.ndim)) for param in model.parameters()]
    optimizer = make_optimizer(RECIPE, model)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)) as paged:
        step(model, paged)
        assert len(seen) == len(handles)
        for handle in handles:
            handle.remove()
        step(model, paged)
        assert len(seen) == len(handles)
