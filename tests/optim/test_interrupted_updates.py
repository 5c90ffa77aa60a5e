"""Tests of interrupted updates, uncopyable settings, and access after drain: no inconsistent state, no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.optim import update as update_module
from support import models
from support.train import Paging, Recipe, batch, build, make_optimizer, offloaded, settings

RECIPE = Recipe(model="toy")


def backward(model: torch.nn.Module, number: int = 0) -> None:
    models.loss_of(model, batch(model, number)).backward()


def step(model: torch.nn.Module, optimizer: Any, number: int = 0) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("cores", [0, 1])
def test_interrupted_update_is_never_checkpointed(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that saves a checkpoint on KeyboardInterrupt would otherwise store a mixture of two steps."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward", cores=cores), tmp_path) as (
        model,
        paged,
    ):
        step(model, paged)
        paged.save_checkpoint()
        backward(model, 1)
        run = update_module.Update.run

        def run_and_interrupt(self: Any, opened: Any) -> None:
            run(self, opened)
            raise KeyboardInterrupt

        monkeypatch.setattr(update_module.Update, "run", run_and_interrupt)
        with pytest.raises((KeyboardInterrupt, InfinityError)):  # noqa: PT012
            paged.step()
            paged.save_checkpoint()
        with pytest.raises(InfinityError, match="interrupted by KeyboardInterrupt; resume from the last checkpoint"):
            paged.save_checkpoint()
    assert sorted(tmp_path.glob("*/*/checkpoints/*"))
    assert not list(tmp_path.glob("*/*/checkpoints/step000000000002*"))


def test_update_failure_is_recorded_before_its_pages_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread that waits for these pages must not gather weights of two different steps."""
    paging = Paging(host_cache="all", update_schedule="after_backward", cores=1)
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="the update failed in the test"),
        offloaded(RECIPE, paging, tmp_path) as (model, paged),
    ):
        step(model, paged)
        paged.read_state(next(name for name, _ in model.named_parameters()))  # all updates of this step have run
        recorded: list[bool] = []
        release = type(paged.run.pager)._release_reservation

        def release_and_record(self: Any, *arguments: Any) -> None:
            recorded.append(self.failure is not None)
            release(self, *arguments)

        def fail(self: Any, opened: Any) -> None:
            raise RuntimeError("the update failed in the test")

        monkeypatch.setattr(type(paged.run.pager), "_release_reservation", release_and_record)
        monkeypatch.setattr(update_module.Update, "run", fail)
        backward(model, 1)
        paged.step()
        backward(model, 2)
    assert recorded
    assert all(recorded)


class Uncopyable:
    """Setting that cannot be copied."""

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("not this one")

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("not this one")


def test_uncopyable_setting_does_not_lose_gradients(tmp_path: Path) -> None:
    """step() raises, and after the setting has been removed it performs the same update as in memory."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    for number in range(2):
        step(model, optimizer, number)
    expected = [param.to_local().clone() for param in model.parameters() if isinstance(param, DTensor)]
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_forward"), tmp_path) as (paged, optimizer):
        step(paged, optimizer)
        backward(paged, 1)
        optimizer.param_groups[0]["extra"] = Uncopyable()
        with pytest.raises(UnsupportedError, match="extra"):
            optimizer.step()
        del optimizer.param_groups[0]["extra"]
        optimizer.step()
        optimizer.zero_grad()
        found = [param.to_local().clone() for param in paged.parameters() if isinstance(param, DTensor)]
    assert all(map(torch.equal, expected, found))


def test_setting_added_between_backward_and_step_is_rejected(tmp_path: Path) -> None:
    """FSDP modules that were updated in backward did not use the setting."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_backward"), tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model, 1)
        optimizer.param_groups[0]["more"] = 1.0
        with pytest.raises(InfinityError, match="more was added between backward and"):
            optimizer.step()


def test_reading_parameters_after_drain_raises_immediately(tmp_path: Path) -> None:
    """Pending updates do not run after drain(), and started updates have finished."""
    paging = Paging(host_cache="all", update_schedule="in_forward", cores=1)
    with offloaded(RECIPE, paging, tmp_path) as (model, optimizer):
        step(model, optimizer)
        optimizer.drain()
        assert not any(optimizer.run.pager.in_flight().values())
        with pytest.raises(InfinityError, match=r"after drain\(\), only close\(\) is allowed"):
            next(model.parameters()).sum()
        with pytest.raises(InfinityError, match=r"after drain\(\), only close\(\) is allowed"):
            step(model, optimizer)


def test_gradient_with_other_placements_is_unsupported(tmp_path: Path) -> None:
    """The local tensor of such a gradient is not the gradient of the shard."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, optimizer):
        backward(model)
        param = next(param for param in model.parameters() if isinstance(param, DTensor))
        param.grad = distribute_tensor(torch.ones(param.shape), param.device_mesh, [Replicate()])
        with pytest.raises(UnsupportedError, match=r"Replicate.*redistribute"):
            optimizer.step()


def test_offload_does_not_change_random_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device generators are unchanged too, because `torch.manual_seed`, which seeds all devices, is not called."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    before = torch.random.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("all devices were seeded"))
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)):
        assert torch.equal(torch.random.get_rng_state(), before)
