"""Tests of a transformers Trainer with an offloaded model for which `attach` was not called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler

import infinity
from infinity.errors import UnsupportedError
from support.trainers import Outcome, build, make, outcome_of, settings

STEPS = 3


def trainer_of(model: nn.Module, folder: Path, *, offload: bool, passed: bool = True, **options: Any) -> Any:
    """Return a Trainer without `attach`. If `passed`, it gets an optimizer and a scheduler, otherwise creates both."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    if offload:
        optimizer = infinity.offload(model, optimizer, settings(folder / "nvme"))
    own = {"optimizers": (optimizer, scheduler)} if passed else {}
    trainer = make(folder / "out", model, max_steps=STEPS, **own, **options)
    trainer.paged = optimizer
    return trainer


@pytest.mark.parametrize("passed", [True, False], ids=["optimizers=", "optim="])
def test_saving_checkpoints_is_rejected_before_the_first_step(passed: bool, tmp_path: Path) -> None:
    """Accelerate and the Trainer save weights by their memory addresses."""
    trainer = trainer_of(build(), tmp_path, offload=True, passed=passed, save_strategy="steps", save_steps=2)
    with trainer.paged:
        with pytest.raises(UnsupportedError, match=r"save_strategy = 'steps'.*call infinity\.\S*\.attach\(trainer"):
            trainer.train()
        assert trainer.paged.steps == trainer.state.global_step == 0
        assert not list((tmp_path / "out").glob("checkpoint-*"))
        assert trainer.evaluate()["eval_loss"] > 0


def test_training_without_checkpoints_equals_memory(tmp_path: Path) -> None:
    def outcome(offload: bool) -> Outcome:
        trainer = trainer_of(build(), tmp_path, offload=offload)
        trainer.train()
        found = outcome_of(trainer)
        if offload:
            trainer.paged.close()
        return found

    outcome(True).equals(outcome(False))


class Distillation(Trainer):
    """Trainer whose loss runs an offloaded teacher."""

    teacher: nn.Module

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **named) + self.teacher(**inputs).loss.detach()


def test_trainer_that_runs_an_offloaded_teacher_saves_checkpoints(tmp_path: Path) -> None:
    teacher = build()
    with infinity.offload(teacher, torch.optim.SGD(teacher.parameters(), lr=0.0), settings(tmp_path / "nvme")):
        options = {"kind": Distillation, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        trainer = make(tmp_path / "out", build("plain"), **options)
        trainer.teacher = teacher
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-1" / "model.safetensors").is_file()


def test_moving_an_offloaded_model_names_attach(tmp_path: Path) -> None:
    """With several ranks, the constructor of the Trainer moves the model."""
    trainer = trainer_of(build(), tmp_path, offload=True)
    with (
        trainer.paged,
        pytest.raises(UnsupportedError, match=r"with a transformers Trainer, call .*attach"),
    ):
        trainer._move_model_to_device(trainer.model, torch.device("cpu", 0))
