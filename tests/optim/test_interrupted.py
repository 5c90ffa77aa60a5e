"""Updates that are interrupted, settings that cannot be copied, looks after the end: nothing half done, no hanging."""

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
def test_an_update_that_is_interrupted_is_never_checkpointed(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that checkpoints when it is interrupted would make durable what is half of one step and half of
    another.
    """
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward", cores=cores), tmp_path) as (
        model,
        paged,
    ):
        step(model, paged)
        paged.save_checkpoint()
        backward(model, 1)
        run = update_module.Update.run

        def interrupted(self: Any, opened: Any) -> None:
            run(self, opened)
            raise KeyboardInterrupt

        monkeypatch.setattr(update_module.Update, "run", interrupted)
        with pytest.raises((KeyboardInterrupt, InfinityError)):  # noqa: PT012
            paged.step()
            paged.save_checkpoint()
        with pytest.raises(InfinityError, match="interrupted by KeyboardInterrupt; resume from the last checkpoint"):
            paged.save_checkpoint()
    assert sorted(tmp_path.glob("*/*/checkpoints/*"))
    assert not list(tmp_path.glob("*/*/checkpoints/step000000000002*"))


def test_a_failed_update_is_known_before_its_pages_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread that waits for them must not gather weights of which a part is of the next step."""
    paging = Paging(host_cache="all", update_schedule="after_backward", cores=1)
    with pytest.raises(RuntimeError, match="no"), offloaded(RECIPE, paging, tmp_path) as (model, paged):  # noqa: PT012
        step(model, paged)
        paged.read_state(next(name for name, _ in model.named_parameters()))  # all updates of this step have run
        known: list[bool] = []
        returned = type(paged.run.pager)._release_reservation

        def noted(self: Any, *arguments: Any) -> None:
            known.append(self.failure is not None)
            returned(self, *arguments)

        def fail(self: Any, opened: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(type(paged.run.pager), "_release_reservation", noted)
        monkeypatch.setattr(update_module.Update, "run", fail)
        backward(model, 1)
        paged.step()
        backward(model, 2)
    assert known
    assert all(known)


class Uncopyable:
    """A setting that no copy can be made of."""

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("not this one")

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("not this one")


@pytest.mark.parametrize("update_schedule", ["after_backward", "in_forward"])
def test_settings_that_cannot_be_copied_cost_no_gradient(update_schedule: str, tmp_path: Path) -> None:
    """The step is refused; when the setting is gone, it is the one that it would have been."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    for number in range(2):
        step(model, optimizer, number)
    expected = [param.to_local().clone() for param in model.parameters() if isinstance(param, DTensor)]
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule=update_schedule), tmp_path) as (paged, optimizer):
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


def test_a_setting_that_is_added_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    """FSDP modules that were updated in backward have not seen it."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_backward"), tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model, 1)
        optimizer.param_groups[0]["more"] = 1.0
        with pytest.raises(InfinityError, match="more was added between backward and"):
            optimizer.step()


@pytest.mark.parametrize("update_schedule", ["in_forward", "after_backward"])
def test_looking_after_drain_is_refused_and_does_not_wait(update_schedule: str, tmp_path: Path) -> None:
    """Updates that were left will not run any more; what was begun has."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule=update_schedule, cores=1), tmp_path) as (
        model,
        optimizer,
    ):
        step(model, optimizer)
        optimizer.drain()
        assert not any(optimizer.run.pager.in_flight().values())
        with pytest.raises(InfinityError, match=r"drain\(\) was called"):
            next(model.parameters()).sum()


def test_a_gradient_of_other_update_schedules_is_refused(tmp_path: Path) -> None:
    """What a rank has of it is not the gradient of its shard."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, optimizer):
        backward(model)
        param = next(param for param in model.parameters() if isinstance(param, DTensor))
        param.grad = distribute_tensor(torch.ones(param.shape), param.device_mesh, [Replicate()])
        with pytest.raises(UnsupportedError, match=r"Replicate.*redistribute"):
            optimizer.step()


def test_offload_leaves_random_states_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of devices too: `torch.manual_seed` would set them all."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    before = torch.random.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("all devices were seeded"))
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)):
        assert torch.equal(torch.random.get_rng_state(), before)
