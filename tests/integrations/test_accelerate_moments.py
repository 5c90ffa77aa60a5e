"""Tests of each method that `prepare` replaces, called at each moment of an accelerator's life.

Two models go through the same two trainings: one in memory with plain PyTorch, and one with its state on NVMe. At each
moment, both make the same calls, whose results must be bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from infinity.errors import InfinityError
from infinity.integrations.accelerate import prepare
from support import models
from support.accelerate_runs import accelerator, bare, optimizer_of, settings, sharded
from support.by_hand import CLIP, data, full_weights, scheduler_of

MOMENTS = (
    "before training", "before an update", "between steps", "in evaluation", "between trainings",
    "in the second training", "after training",
)  # fmt: skip
PENDING = "before an update"
"""Moment at which gradients are pending."""
CLOSED = "after close"


class Life:
    """Two trainings of a model, with the result of each call at each moment."""

    def __init__(self, folder: Path, accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.found: dict[tuple[str, str], Any] = {}
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def train(self) -> None:
        self.call_all("before training")
        self._train(PENDING, "between steps", "in evaluation")
        self.call_all("between trainings")
        self._train(None, "in the second training", None)
        self.call_all("after training")

    def _train(self, before_update: str | None, between_steps: str, evaluating: str | None) -> None:
        for number, batch in enumerate(data().split(2)[:2]):
            self.accelerator.backward(models.loss_of(self.model, batch))
            if before_update and number == 0:
                self.call_all(before_update)
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if number == 0:
                self.call_all(between_steps)
        self.model.eval()
        with torch.no_grad():
            models.loss_of(self.model, data()[:2])
            if evaluating:
                self.call_all(evaluating)
        self.model.train()

    def call_all(self, moment: str) -> None:
        self.call_each(moment)
        self.weights[moment] = full_weights(self.model)

    def call_each(self, moment: str) -> None:
        for name, call in CALLS.items():
            try:
                self.found[name, moment] = call(self, moment)
            except InfinityError as error:
                self.found[name, moment] = str(error)


def gradients(life: Life, moment: str) -> Any:
    """Return the gradients of a micro-batch, which are added to pending ones or otherwise discarded."""
    with torch.enable_grad(), life.accelerator.no_sync(life.model):
        life.accelerator.backward(models.loss_of(life.model, data()[4:6]))
    found = {name: param.grad.full_tensor().clone() for name, param in life.model.named_parameters()}
    if moment != PENDING:
        life.optimizer.zero_grad()
    return found


def saved(life: Life, moment: str) -> Any:
    """Return the weights that `save_model` writes."""
    life.accelerator.save_model(life.model, life.folder / moment / "weights")
    if isinstance(life.accelerator, SimpleNamespace):
        return full_weights(life.model)
    return dict(type(bare()).from_pretrained(life.folder / moment / "weights").named_parameters())


def save_state(life: Life, moment: str) -> Any:
    """Save, and load again, which must not change the weights."""
    folder = life.folder / moment / "state"
    life.accelerator.save_state(str(folder))
    life.accelerator.load_state(str(folder))
    return full_weights(life.model)


CALLS: dict[str, Callable[[Life, str], Any]] = {
    "no_sync": gradients,
    "get_state_dict": lambda life, moment: life.accelerator.get_state_dict(life.model),
    "save_model": saved,
    "save_state": save_state,
    "load_state": lambda life, moment: life.accelerator.load_state(str(life.folder / MOMENTS[0] / "state")),
}
"""Replaced methods. `load_state` loads the first folder."""


def on_nvme(acc: Any, folder: Path, **named: Any) -> Life:
    """Return a life with the state on NVMe, in which all checkpoints are retained."""
    model = sharded(policy=MixedPrecisionPolicy())
    optimizer = optimizer_of(model)
    config = settings(folder, retained_checkpoints=len(MOMENTS))
    return Life(folder, acc, *prepare(acc, model, optimizer, scheduler_of(optimizer), config=config, **named))


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, Life]:
    """Return the life in memory and the one on NVMe, which has ended."""
    in_memory = SimpleNamespace(
        backward=lambda loss: loss.backward(), clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
        no_sync=lambda model: nullcontext(), get_state_dict=full_weights, save_model=lambda *_: None,
        save_state=lambda folder: None, load_state=lambda folder: None,
    )  # fmt: skip
    model = sharded(policy=MixedPrecisionPolicy())
    optimizer = optimizer_of(model)
    memory = Life(Path(), in_memory, model, optimizer, scheduler_of(optimizer))
    memory.train()
    with accelerator() as acc:
        paged = on_nvme(acc, tmp_path_factory.mktemp("accelerate"))
        with paged.optimizer.optimizer:
            paged.train()
        paged.call_each(CLOSED)
    return memory, paged


@pytest.fixture(scope="module")
def resumed(lives: tuple[Life, Life]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of a run that was resumed from the folder of each moment, the last one first."""
    found = {}
    for moment in reversed([moment for moment in MOMENTS if moment != PENDING]):
        folder = lives[1].folder / moment / "state"
        with accelerator() as acc:
            life = on_nvme(acc, lives[1].folder, resume_from=folder)
            with life.optimizer.optimizer as optimizer:
                acc.load_state(str(folder))
                assert life.scheduler.scheduler.last_epoch == optimizer.steps
                found[moment] = full_weights(life.model)
    return found


def equal(one: Any, other: Any) -> bool:
    return isinstance(other, dict) and one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_replaced_methods_are_in_the_table(tmp_path: Path) -> None:
    """Before `prepare`, the accelerator has its own methods."""
    with accelerator() as acc:
        before = {name for name, value in vars(acc).items() if callable(value)}
        with on_nvme(acc, tmp_path).optimizer.optimizer:
            assert {name for name, value in vars(acc).items() if callable(value)} - before == {*CALLS}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("call", CALLS)
def test_call_at_a_moment_equals_memory(call: str, moment: str, lives: tuple[Life, Life]) -> None:
    memory, paged = lives
    found = paged.found[call, moment]
    if call in ("save_model", "save_state") and moment == PENDING:
        assert "was called between backward and step(); call it after step()" in found
    elif call == "load_state" and moment not in MOMENTS[:2]:  # weights are only restored when a run starts
        assert "belongs to step 0 " in found
        assert "call prepare(…, resume_from=" in found
    elif call == "load_state":
        assert found is None
    else:
        assert equal(memory.found[call, moment], found), found


@pytest.mark.parametrize("moment", MOMENTS)
def test_calls_do_not_change_the_training(moment: str, lives: tuple[Life, Life]) -> None:
    assert equal(*(life.weights[moment] for life in lives))


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != PENDING])
def test_state_saved_at_a_moment_can_be_resumed(
    moment: str, lives: tuple[Life, Life], resumed: dict[str, dict[str, torch.Tensor]]
) -> None:
    assert equal(lives[0].weights[moment], resumed[moment])


@pytest.mark.parametrize("call", CALLS)
def test_call_after_close_names_the_reason(call: str, lives: tuple[Life, Life]) -> None:
    assert ("belongs to step 0" if call == "load_state" else "closed") in lives[1].found[call, CLOSED]
