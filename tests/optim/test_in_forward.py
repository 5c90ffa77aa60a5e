"""Tests of updates in the next forward: reads between steps return the values after the update."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from infinity.optim.kernel import UpdateKernel
from support import models
from support.train import Outcome, Paging, Recipe, batch, in_memory, local, make_optimizer, offloaded, train

RECIPE = Recipe(model="toy", clip=0.5, groups=True, steps=6)
PLAIN = Recipe(model="toy", clip=0.5, steps=6)
FORWARD = Paging(host_cache="least", update_schedule="in_forward")
LATEST = {"resume": "latest"}


def test_step_defers_updates_to_the_next_forward(tmp_path: Path) -> None:
    """`step()` starts the update of the first FSDP module; reading a weight flushes the others."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_forward"), tmp_path) as (model, optimizer):
        train(RECIPE, model, optimizer, Outcome())
        models.loss_of(model, batch(model, 7)).backward()
        norm = optimizer.clip_grad_norm_(0.5)
        assert torch.isfinite(norm)
        updates = optimizer._runner.updates
        optimizer._runner.flush_updates()
        before = updates.elements
        optimizer.step()
        assert updates.waiting
        updates.drain()
        assert 0 < updates.elements - before < optimizer.run.layout.parameters
        optimizer._runner.flush_updates()
        assert updates.elements - before == optimizer.run.layout.parameters


def test_plan_is_followed_despite_reads_between_steps(tmp_path: Path) -> None:
    """A checkpoint or a read of a weight flushes updates, and the rest of the step is as planned."""
    with offloaded(RECIPE, FORWARD, tmp_path) as (model, optimizer):
        train(RECIPE, model, optimizer, Outcome())
        for number in range(6):
            optimizer.zero_grad()
            models.loss_of(model, batch(model, number)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            if number in (1, 2, 4):
                optimizer.save_checkpoint()
            if number == 3:
                local(next(model.parameters()))
        assert optimizer.run.stats.snapshot().value("plan_divergences_total") == 0


@pytest.mark.parametrize("between", ["nothing", "checkpoint", "read"])
def test_first_step_defers_its_updates_to_the_second(between: str, tmp_path: Path) -> None:
    """This holds even if later steps update in backward, and the steps follow their plans."""
    recipe, outcome = Recipe(model="toy", steps=6), Outcome()
    with offloaded(recipe, Paging(host_cache="least"), tmp_path) as (model, optimizer):
        train(Recipe(model="toy", steps=1), model, optimizer, outcome)
        assert optimizer.update_schedule == "in_backward"
        assert optimizer._runner.updates.waiting
        if between == "checkpoint":
            optimizer.save_checkpoint()
        elif between == "read":
            local(next(model.parameters()))
        assert bool(optimizer._runner.updates.waiting) == (between == "nothing")
        train(recipe, model, optimizer, outcome, first=1)
        assert not optimizer._runner.updates.waiting
        assert optimizer.run.stats.snapshot().value("plan_divergences_total") == 0
    assert outcome.losses == in_memory(recipe).losses


@pytest.mark.parametrize("reads", [False, True])
def test_late_fsdp_module_is_updated_in_the_next_forward_once(reads: bool, tmp_path: Path) -> None:
    """Its first gradient is applied in the next forward, while the other modules update in backward."""
    recipe = Recipe(model="toy", steps=6)

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step in range(6):
            model.order = (0, 2) if step < 3 else (0, 1, 2)  # type: ignore[assignment]
            loss = models.loss_of(model, batch(model, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if reads and step == 3:
                local(next(model.parameters()))
            losses.append(loss.item())
        return losses

    model = models.build("toy")
    expected = run(model, make_optimizer(recipe, model))
    with offloaded(recipe, Paging(host_cache="least"), tmp_path) as (model, optimizer):
        assert run(model, optimizer) == expected
        assert optimizer.run.stats.snapshot().value("plan_divergences_total") == 1, (
            "only the step with a different order may depart from the plan"
        )


def test_checkpoint_includes_pending_updates(tmp_path: Path) -> None:
    """A run with a checkpoint after each step, resumed in the middle, has the losses of an uninterrupted run."""
    outcome = Outcome()
    for first in (0, 3):
        with offloaded(PLAIN, FORWARD, tmp_path, run=LATEST if first else {}) as (model, optimizer):
            assert optimizer.steps == first
            for step in range(first, first + 3):
                part = Recipe(**{**vars(PLAIN), "steps": step + 1})
                train(part, model, optimizer, outcome, first=step)
                optimizer.save_checkpoint()
    assert outcome.losses == in_memory(PLAIN).losses


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, bad: bool) -> None:
    """Take a step; if `bad` is set, the loss is infinite and has no finite gradient."""
    loss = models.loss_of(model, batch(model, step))
    (loss * float("inf") if bad else loss).backward()
    if isinstance(optimizer, infinity.PagedOptimizer):
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    else:
        if not bad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    optimizer.zero_grad()


def test_nonfinite_norm_skips_the_update(tmp_path: Path) -> None:
    """As with torch.amp.GradScaler, weights, moments and step counts do not change; the step counts as skipped."""
    bad = (2, 3, 6)
    model = models.build("toy")
    reference = make_optimizer(RECIPE, model)
    for step in range(8):
        take_step(model, reference, step, step in bad)
    expected = {name: local(param) for name, param in model.named_parameters()}
    with offloaded(RECIPE, FORWARD, tmp_path) as (paged, optimizer):
        for step in range(8):
            take_step(paged, optimizer, step, step in bad)
        found = {name: local(param) for name, param in paged.named_parameters()}
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
        assert int(optimizer.read_state(next(iter(found)))["step"]) == 8 - len(bad)
        assert optimizer.run.stats.snapshot().value("steps_skipped_total") == len(bad)
        assert optimizer.steps == 8


@pytest.mark.parametrize(("update_schedule", "cores"), [("in_backward", 0), ("in_forward", 1)])
def test_partially_updated_fsdp_module_is_not_checkpointed(
    update_schedule: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the optimizer raises in the middle of a step, every later call raises and none hangs."""
    with offloaded(Recipe(model="toy"), Paging(update_schedule=update_schedule, cores=cores), tmp_path) as (
        model,
        optimizer,
    ):
        train(Recipe(model="toy", steps=2), model, optimizer, Outcome())
        optimizer.save_checkpoint()
        update, calls = UpdateKernel.update, itertools.count()

        def fail_third_update(*arguments: Any) -> Any:
            if next(calls) == 2:
                raise ValueError("the third update failed")
            return update(*arguments)

        monkeypatch.setattr(UpdateKernel, "update", fail_third_update)
        with pytest.raises(ValueError, match="the third update failed"):
            train(Recipe(model="toy", steps=3), model, optimizer, Outcome())
        with pytest.raises((ValueError, InfinityError), match=r"the third update failed|between backward and step"):
            optimizer.save_checkpoint()
