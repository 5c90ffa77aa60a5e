"""FSDP modules that live on the device:

what users do with weights and states between steps, and what is skipped or fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infinity
from infinity.content.layout import Page
from infinity.schedule.homes import GpuResidentPage, GpuResidentPages
from infinity.schedule.pager import Pager
from support import models
from support.device.cases import troubles
from support.device.simulation import simulation
from support.tables import one_of, variants
from support.train import (
    Outcome,
    Paging,
    Recipe,
    batch,
    build,
    differences,
    make_optimizer,
    offloaded,
    state_in_memory,
    state_on_nvme,
)

PAGINGS = {
    "all-auto": Paging(host_cache="least", device=64 << 20),
    "some-forward": Paging(host_cache="least", update_schedule="in_forward", device=620 << 10),
    "all-after": Paging(host_cache="least", update_schedule="after_backward", device=64 << 20),
}
KINDS = {kind: kind for kind in ("order-updates", "late-updates")}
STEPS = 6
Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], list[float]]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Take one step."""
    loss = models.loss_of(model, batch(model, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train."""
    return [step(model, optimizer, number) for number in range(STEPS)]


def edited(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Change weights and states in place between steps, of the layers and the root."""
    losses = []
    for number in range(STEPS):
        losses.append(step(model, optimizer, number))
        with torch.no_grad():
            for param in (model.blocks[1].up.weight, model.head.bias):
                if number == 2:
                    param.mul_(0.5)
                    optimizer.state[param]["exp_avg"].mul_(0.5)
                if number == 3:
                    param.copy_(param + 1e-3)
                    optimizer.state[param]["exp_avg_sq"].copy_(optimizer.state[param]["exp_avg_sq"] * 2)
                if number == 4:
                    losses.append(optimizer.state[param]["exp_avg"].norm().item())
    return losses


def loaded(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Save the weights, train, and put them back."""
    losses = [step(model, optimizer, number) for number in range(3)]
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    losses += [step(model, optimizer, number) for number in range(3, 5)]
    model.load_state_dict(saved)
    return [*losses, step(model, optimizer, 5)]


def without_some(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Leave gradients out, and assign one."""
    losses = []
    for number in range(STEPS):
        loss = models.loss_of(model, batch(model, number))
        loss.backward()
        if number in (2, 3):
            model.blocks[0].down.weight.grad = None
        if number == 4:
            model.head.weight.grad = model.head.weight.grad * 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


LOOPS: dict[str, tuple[Loop, str]] = {
    "edited": (edited, ""),
    "loaded": (loaded, ""),
    "without some": (without_some, "after_backward"),
}
"""By name, a loop and the update schedule that it needs."""


def outcome(loop: Loop, recipe: Recipe, paging: Paging, folder: Path) -> Outcome:
    """Run a loop over pages."""
    with offloaded(recipe, paging, folder) as (model, optimizer):
        losses = loop(model, optimizer)
        gpu_resident = len(optimizer.run.planner.update_schedule.gpu_resident)
        return Outcome(losses=losses, state=state_on_nvme(model, optimizer), gpu_resident=gpu_resident)


def in_memory(loop: Loop, recipe: Recipe) -> Outcome:
    """Run a loop in memory."""
    model = build(recipe)
    optimizer = make_optimizer(recipe, model)
    losses = loop(model, optimizer)
    return Outcome(losses=losses, state=state_in_memory(model, optimizer))


ROWS = [
    pytest.param(name, *row.values, id=f"{name}-{row.id}", marks=row.marks)
    for name in LOOPS
    for row in one_of(2, variants(PAGINGS, KINDS))
]


@pytest.mark.parametrize(("name", "paging", "kind"), one_of(2, ROWS))
def test_what_is_done_between_steps(name: str, paging: Paging, kind: str, tmp_path: Path) -> None:
    """Is done to what the device has, and the bits are those of memory."""
    loop, update_schedule = LOOPS[name]
    recipe = Recipe(model="toy", steps=STEPS)
    expected = in_memory(loop, recipe)
    with simulation(kind) as device:
        paging = replace(paging, update_schedule=update_schedule or paging.update_schedule)
        found = outcome(loop, recipe, paging, tmp_path)
        assert troubles(device) == []
    assert found.gpu_resident > 0
    assert differences(expected, found) == []


def skipped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip; one step has a loss that is not finite."""
    losses = []
    for number in range(STEPS):
        loss = models.loss_of(model, batch(model, number))
        (loss * (math.inf if number == 3 else 1.0)).backward()
        assert isinstance(optimizer, infinity.PagedOptimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("update_schedule", ["in_forward", pytest.param("after_backward", marks=pytest.mark.wide)])
def test_a_step_that_is_skipped(update_schedule: str, tmp_path: Path) -> None:
    """Changes nothing on the device, as it changes no page."""
    recipe, found = Recipe(model="toy"), []
    for number, nbytes in enumerate((0, 64 << 20)):
        (folder := tmp_path / str(number)).mkdir()
        with simulation("order-updates") as device:
            found.append(
                outcome(
                    skipped, recipe, Paging(host_cache="least", update_schedule=update_schedule, device=nbytes), folder
                )
            )
            assert troubles(device) == []
    assert [each.gpu_resident > 0 for each in found] == [False, True]
    assert differences(*found) == []


def test_a_checkpoint_takes_few_cache_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP modules that live on the device may be larger than the host cache: pages go through it one by one."""
    recipe, paging = Recipe(model="even", steps=3), Paging(host_cache="least", device=64 << 20)
    most: list[int] = []
    send = Pager._send

    def sent(pager: Pager, page: int, home: object) -> None:
        send(pager, page, home)  # type: ignore[arg-type]
        most.append(pager._cache_slots.count - len(pager._cache_slots.free))

    monkeypatch.setattr(Pager, "_send", sent)
    with simulation("order-updates"), offloaded(recipe, paging, tmp_path) as (model, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        run = optimizer.run
        optimizer.save_checkpoint()
        pages: list[Page] = [page for page in run.layout.pages if page.role.value != "grad"]
        assert len(most) == len(pages) > 4 * run.host_cache.cache_slots
        assert run.pager.census()["free"] == run.host_cache.cache_slots


def test_a_device_that_has_less_room_than_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goes on with no FSDP module there, and says what to set."""
    build_gpu_resident_pages, built = GpuResidentPages.build, []

    def build_some(gpu_resident_pages: GpuResidentPages, pages: Sequence[Page]) -> dict[int, GpuResidentPage]:
        built.append(pages)
        if len(built) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return build_gpu_resident_pages(gpu_resident_pages, pages)

    monkeypatch.setattr(GpuResidentPages, "build", build_some)
    recipe = Recipe(model="toy", steps=STEPS)
    expected = in_memory(plain, recipe)
    with simulation("order-updates"):
        found = outcome(plain, recipe, Paging(host_cache="least", device=64 << 20), tmp_path)
    assert len(built) == 3
    assert found.gpu_resident == 0
    assert "reduce memory.device_bytes" in caplog.text
    assert differences(expected, found) == []
