"""Tests of stored gradients: their halves, the number of stored halves, and exact reconstruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from infinity.content.format import Role
from infinity.content.halves import halves, joined
from infinity.memory.device import DeviceEvent
from infinity.optim.kernel import UpdateKernel
from infinity.optim.optimizer_clone import settings_of
from infinity.optim.update import RangePages, Update
from infinity.schedule.trace import EventKind, range_access, stored_components
from support import models
from support.device.simulation import simulation
from support.layouts import transformer
from support.train import Paging, Recipe, batch, build, make_optimizer, offloaded

LEAST = Paging(host_cache="least", update_schedule="in_forward")


def every_half(upper: bool) -> torch.Tensor:
    """Return fp32 numbers with all 2^16 upper or lower halves, each combined with a few of the other halves."""
    all_of, some = torch.arange(1 << 16, dtype=torch.int64), torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])
    high, low = (all_of, some) if upper else (some, all_of)
    bits = ((high[:, None] << 16) + low).flatten()
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("upper", [True, False])
def test_halves_reconstruct_every_bit_pattern(upper: bool) -> None:
    """Includes NaN and denormal numbers."""
    values = every_half(upper)
    rows = [half.contiguous() for half in halves(values)]
    assert torch.equal(joined(rows).view(torch.int32), values.view(torch.int32))


def test_upper_half_suffices_for_bf16_values() -> None:
    """The lower half is zero, and the upper half alone gives the number."""
    computed = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = computed.float()
    upper, lower = halves(values)
    number = ~computed.isnan()
    assert not torch.count_nonzero(lower)
    assert torch.equal(joined([upper])[number].view(torch.int32), values[number].view(torch.int32))
    assert joined([upper])[~number].isnan().all()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro: int = 1, scale: float = 1.0) -> None:
    """Take one step of `micro` batches."""
    for number in range(micro):
        (scale * models.loss_of(model, batch(model, number, sequences=2))).backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def test_single_backward_stores_only_the_upper_half(tmp_path: Path) -> None:
    """It writes two bytes per parameter. After a loop over micro-batches, all steps write four."""
    with offloaded(Recipe(model="even"), LEAST, tmp_path) as (model, optimizer):
        parameters = optimizer.run.layout.parameters

        def of_one_step(micro: int) -> tuple[set[int], float]:
            step(model, optimizer, micro=micro)
            moved = optimizer.run.plan.traffic.written[Role.GRAD] / parameters
            return set(stored_components(optimizer.run.planner.events).values()), moved

        rows, moved = of_one_step(1)
        assert rows == {1}
        assert 1.6 < moved <= 2
        rows, _ = of_one_step(2)
        assert rows == {2}
        rows, moved = of_one_step(1)
        assert rows == {2}
        assert 3.6 < moved <= 4


class Spoiling(torch.optim.SGD):
    """An optimizer that changes its gradients."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.grad.add_(1.0)
        return super().step(closure)


@pytest.mark.parametrize("key", ["plain", "halves"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_update_does_not_modify_stored_gradients(key: str, scale: float | None) -> None:
    """Their pages may be being written while the optimizer changes its gradients."""
    layout = transformer(1, 4 * 2048, 64 << 10, key)
    (segment,) = layout.segments
    optimizer = Spoiling([torch.zeros(2)], lr=0.1)
    kernel, settings = UpdateKernel(optimizer), {0: settings_of(optimizer.param_groups[0])}
    for position, item in enumerate(segment.ranges):
        access = range_access(segment, position, components=len(segment.grad_pages))
        pages = [layout.pages[use.page] for use in access]
        contents = [memoryview(bytearray(b"\x3f" * page.nbytes)) for page in pages]
        stored = [bytes(content) for page, content in zip(pages, contents, strict=True) if page.role is Role.GRAD]
        edits = {} if scale is None else {0: (lambda gradient: gradient.mul_(scale),)}
        update = Update(layout, kernel, settings, {}, 0, edits=edits)
        update.run([RangePages(layout, segment, item, [*zip(pages, contents, strict=True)], None)])
        assert update.elements
        assert stored
        assert stored == [bytes(c) for page, c in zip(pages, contents, strict=True) if page.role is Role.GRAD]


def test_nonfinite_gradients_do_not_change_the_plan(tmp_path: Path) -> None:
    """In bf16, infinity and NaN have no lower half either; the step is skipped."""
    with offloaded(Recipe(model="even"), LEAST, tmp_path) as (model, optimizer):
        for scale in (1.0, float("inf"), float("nan"), 1.0):
            step(model, optimizer, scale=scale)
        gradients = [event for event in optimizer.run.planner.events if event.kind is EventKind.GRADIENTS]
        assert gradients
        assert all(event.components == 1 for event in gradients)


def test_lower_halves_do_not_delay_the_host_on_a_gpu(tmp_path: Path) -> None:
    """From the second step on, they are counted while the host continues, and stored if they turn out not to be zero.

    In step 3, a hook makes them nonzero. `waits` are the waits for counts, in backward and after it, step by step.
    """

    def losses(model: nn.Module, optimizer: Any, waits: list[int]) -> list[float]:
        found = []
        for number in range(5):
            if number == 3:
                for param in model.parameters():
                    param.register_post_accumulate_grad_hook(lambda param: param.grad.div_(3))  # type: ignore[union-attr]
            waits.append(0)
            loss = models.loss_of(model, batch(model, number, sequences=2))
            loss.backward()
            waits.append(0)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    recipe = Recipe(model="even", steps=5)
    plain = build(recipe)
    expected = losses(plain, make_optimizer(recipe, plain), [])
    for paging in (LEAST, replace(LEAST, update_schedule="after_backward")):
        waits: list[int] = []
        with simulation("late-updates", recipe.seed), offloaded(recipe, paging, tmp_path) as (model, optimizer):
            pager = optimizer.run.pager
            waiting = pager.wait_for_device

            def wait(event: DeviceEvent, what: str) -> None:
                waits[-1] += what == "look at gradients"
                waiting(event, what)

            with patch.object(pager, "wait_for_device", wait):
                assert losses(model, optimizer, waits) == expected
            gradients = [event for event in optimizer.run.planner.events if event.kind is EventKind.GRADIENTS]
        assert all(event.components == 2 for event in gradients)
        modules = len(optimizer.run.layout.fsdp_modules)
        assert waits == [modules, 0, *(3 * [modules - 1, 1]), 0, 0]


def test_fp32_gradients_are_stored_without_halves(tmp_path: Path) -> None:
    with offloaded(Recipe(model="even", policy="fp32"), LEAST, tmp_path) as (_, optimizer):
        assert {len(segment.grad_pages) for segment in optimizer.run.layout.segments} == {1}


def norms(model: nn.Module, clip: Callable[[float], torch.Tensor]) -> list[float]:
    """Return the norms of order 1 and infinity, each in a step of its own."""
    found = []
    for order in (1.0, float("inf")):
        for number in range(2):
            models.loss_of(model, batch(model, number, sequences=2)).backward()
        found.append(float(clip(order)))
    return found


def test_norms_of_other_orders_match_memory(tmp_path: Path) -> None:
    """Gradients of two micro-batches are stored in two halves."""
    recipe = Recipe(model="even")
    plain = build(recipe)
    optimizer = make_optimizer(recipe, plain)

    def in_memory(order: float) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=order).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    expected = norms(plain, in_memory)
    with offloaded(recipe, LEAST, tmp_path) as (model, paged):

        def on_nvme(order: float) -> torch.Tensor:
            norm = paged.clip_grad_norm_(0.5, norm_type=order)
            paged.step()
            paged.zero_grad()
            return norm

        assert norms(model, on_nvme) == expected
