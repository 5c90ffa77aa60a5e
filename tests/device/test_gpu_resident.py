"""Tests of GPU-resident FSDP modules: edits between steps, skipped steps, and out-of-memory errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.content.layout import Page
from infinity.schedule.homes import GpuResidentMemory, GpuResidentPages
from infinity.schedule.pager import Pager
from support import models, train
from support.device.cases import problems_of
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
    """Take one training step and return the loss."""
    loss = models.loss_of(model, batch(model, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def with_edits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Edit weights and optimizer state of the layers and the root in place between steps."""
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


def with_dropped_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Drop some gradients and assign another one."""
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
    "edited": (with_edits, ""),
    "dropped gradients": (with_dropped_gradients, "after_backward"),
}
"""Loop by name, with the update schedule that it requires."""


def outcome(loop: Loop, recipe: Recipe, paging: Paging, folder: Path) -> Outcome:
    """Run a loop on NVMe."""
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
def test_edits_between_steps_match_memory(name: str, paging: Paging, kind: str, tmp_path: Path) -> None:
    loop, update_schedule = LOOPS[name]
    recipe = Recipe(model="toy", steps=STEPS)
    expected = in_memory(loop, recipe)
    with simulation(kind) as device:
        paging = replace(paging, update_schedule=update_schedule or paging.update_schedule)
        found = outcome(loop, recipe, paging, tmp_path)
        assert problems_of(device) == []
    assert found.gpu_resident > 0
    assert differences(expected, found) == []


def with_skipped_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train with clipping; one step has a loss that is not finite."""
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
def test_skipped_step_changes_no_gpu_resident_state(update_schedule: str, tmp_path: Path) -> None:
    recipe, found = Recipe(model="toy"), []
    for number, nbytes in enumerate((0, 64 << 20)):
        (folder := tmp_path / str(number)).mkdir()
        with simulation("order-updates") as device:
            found.append(
                outcome(
                    with_skipped_step,
                    recipe,
                    Paging(host_cache="least", update_schedule=update_schedule, device=nbytes),
                    folder,
                )
            )
            assert problems_of(device) == []
    assert [each.gpu_resident > 0 for each in found] == [False, True]
    assert differences(*found) == []


def test_checkpoint_of_gpu_resident_pages_needs_few_cache_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU-resident modules may exceed the host cache, so their pages pass through it one by one."""
    recipe, paging = Recipe(model="even", steps=3), Paging(host_cache="least", device=64 << 20)
    most: list[int] = []
    send = Pager._send

    def sent(pager: Pager, page: int, gpu_resident: object) -> None:
        send(pager, page, gpu_resident)  # type: ignore[arg-type]
        most.append(pager._cache_slots.count - len(pager._cache_slots.free))

    monkeypatch.setattr(Pager, "_send", sent)
    with simulation("order-updates"), offloaded(recipe, paging, tmp_path) as (model, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        run = optimizer.run
        optimizer.save_checkpoint()
        pages: list[Page] = [page for page in run.layout.pages if page.role.value != "grad"]
        assert len(most) == len(pages) > 4 * len(run.host_cache.cache_slots)
        assert run.pager.census()["free"] == len(run.host_cache.cache_slots)


def test_out_of_memory_disables_gpu_resident_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without GPU-resident FSDP modules, and a warning names the setting to reduce."""
    build, built = GpuResidentPages.build, []

    def build_some(resident: GpuResidentPages, pages: Sequence[Page]) -> dict[int, GpuResidentMemory]:
        built.append(pages)
        if len(built) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return build(resident, pages)

    monkeypatch.setattr(GpuResidentPages, "build", build_some)
    recipe = Recipe(model="toy")
    expected = train.in_memory(recipe)
    with simulation("order-updates"):
        found = train.paged(recipe, Paging(host_cache="least", device=64 << 20), tmp_path)
    assert len(built) == 3
    assert found.gpu_resident == 0
    assert "reduce memory.device_bytes" in caplog.text
    assert differences(expected, found) == []


def test_update_waits_for_earlier_batches_if_memory_is_insufficient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator can only reuse the memory of a batch when the device has finished with it."""
    empty, failed = torch.empty, []

    def limited(*sizes: Any, **settings: Any) -> torch.Tensor:
        if settings.get("dtype") is torch.uint8 and threading.current_thread().name.startswith("infinity-update"):
            failed.append(len(failed) % 3 == 1)
            if failed[-1]:
                raise torch.OutOfMemoryError("out of memory")
        return empty(*sizes, **settings)

    recipe = Recipe(model="toy")
    expected = train.in_memory(recipe)
    monkeypatch.setattr(torch, "empty", limited)
    with simulation("order-updates"):
        found = train.paged(recipe, Paging(host_cache="least"), tmp_path)
    assert any(failed)
    assert differences(expected, found) == []
