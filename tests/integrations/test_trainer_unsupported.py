"""Tests of Trainer features that `attach` does not support, and of Trainers without `attach`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler

import infinity
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.integrations.transformers import attach, unsupported_arguments
from infinity.integrations.transformers import trainer as attached
from support import models
from support.trainers import Outcome, build, make, outcome_of, settings

ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp16_full_eval, bf16_full_eval": {"bf16_full_eval": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "optim": {"optim": "galore_adamw", "optim_target_modules": "all"},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "save_only_model with load_best_model_at_end": {
        "save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2,
    },
}  # fmt: skip
"""TrainingArguments that request each unsupported feature, by its name in the error."""
ALTERED: dict[str, dict[str, Any]] = {
    "deepspeed": {"is_deepspeed_enabled": True},
    "fsdp": {"is_fsdp_enabled": True},
    "parallelism_config": {"args.parallelism_config": object()},
    "several GPUs in one process": {"args._n_gpu": 2},
    "model_init": {"model_init": build},
    "fp16": {"args.fp16": True},
    "push_to_hub": {"args.push_to_hub": True, "args.hub_strategy": "every_save"},
}
"""Attributes that emulate features with which a Trainer cannot be constructed in this test."""


def test_every_unsupported_argument_has_a_test() -> None:
    assert {name for name, _, _ in unsupported_arguments.UNSUPPORTED} == {*ARGUMENTS, *ALTERED}


@pytest.mark.parametrize("name", [*ARGUMENTS, *ALTERED])
def test_unsupported_argument_is_rejected(name: str, tmp_path: Path) -> None:
    """The error gives the reason, nothing is written, and the Trainer is unchanged."""
    trainer = make(tmp_path / "out", build(), **ARGUMENTS.get(name, {}))
    for attribute, value in ALTERED.get(name, {}).items():
        owner, _, key = attribute.rpartition(".")
        setattr(trainer.args if owner else trainer, key, value)
    (reason,) = (reason for unsupported, _, reason in unsupported_arguments.UNSUPPORTED if unsupported == name)
    kind = type(trainer)
    with pytest.raises(UnsupportedError) as caught:
        attach(trainer, settings(tmp_path / "nvme"))
    assert f"{name}: {reason}" in str(caught.value)
    assert type(trainer) is kind
    assert not (tmp_path / "nvme").exists()


def test_error_lists_all_unsupported_arguments(tmp_path: Path) -> None:
    trainer = make(tmp_path / "out", build(), **ARGUMENTS["enable_jit_checkpoint"], **ARGUMENTS["auto_find_batch_size"])
    with pytest.raises(UnsupportedError, match=r"auto_find_batch_size: .*; enable_jit_checkpoint: "):
        attach(trainer, settings(tmp_path / "nvme"))


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        ({"save_strategy": "steps", "save_total_limit": None}, {}, "save_total_limit = None"),
        ({}, {"run": {"resume": "latest"}}, "resume_from_checkpoint"),
        ({"save_strategy": "steps"}, {"run": {"retained_checkpoints": 5}}, "the Trainer keeps 2 checkpoints"),
        ({}, {"run": {"sede": 1}}, "did you mean run.seed"),
    ],
    ids=["no limit", "resume", "retained", "unknown"],
)
def test_settings_reserved_for_the_trainer_are_rejected(given: Any, config: Any, message: str, tmp_path: Path) -> None:
    trainer = make(tmp_path / "out", build(), **given)
    with pytest.raises(ConfigError, match=message):
        attach(trainer, settings(tmp_path / "nvme", **config))


def test_attach_requires_a_trainer_with_a_sharded_model(tmp_path: Path) -> None:
    """A Trainer to which `attach` was already applied is rejected too."""
    with pytest.raises(ConfigError, match=r"attach .*Trainer.*SimpleNamespace"):
        attach(SimpleNamespace(), settings(tmp_path / "nvme"))
    with pytest.raises(UnsupportedError, match=r"not sharded; create it with infinity\.from_pretrained .*fully_shard"):
        attach(make(tmp_path / "out", build("plain")), settings(tmp_path / "nvme"))
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme")
    with pytest.raises(ConfigError, match=r"attach .*already.* Trainer"):
        attach(trainer, settings(tmp_path / "nvme"))


def test_incompatible_transformers_version_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing method of the Trainer."""
    monkeypatch.setattr(attached, "_HOOKS", (*attached._HOOKS, "_gone"))
    with pytest.raises(UnsupportedError, match="has no _gone; install transformers"):
        attach(make(tmp_path / "out", build()), settings(tmp_path / "nvme"))


def test_arguments_changed_after_attach_are_rejected(tmp_path: Path) -> None:
    """`train()` checks the arguments again, because space for checkpoints has been reserved."""
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme")
    trainer.args.save_strategy, trainer.args.save_total_limit = "steps", 3
    with pytest.raises(ConfigError, match="save_total_limit was changed"):
        trainer.train()
    trainer.args.save_strategy, trainer.args.auto_find_batch_size = "no", True
    with pytest.raises(UnsupportedError, match="auto_find_batch_size"):
        trainer.train()


def test_layer_major_with_label_smoothing_is_unsupported(tmp_path: Path) -> None:
    """Without an explicit `layer_major=True`, the loop would run."""
    given = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    with pytest.raises(UnsupportedError, match=r"layer_major=True .*label_smoothing_factor"):
        make(tmp_path / "out", build(), nvme=tmp_path / "nvme", attached={"layer_major": True}, **given)


def test_layer_major_with_prefix_tuning_is_unsupported(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = models.shard(peft.get_peft_model(build("plain"), prefixes), "fp32")
    with pytest.raises(UnsupportedError, match=r"layer_major=True .*keys and values"):
        make(tmp_path / "out", model, nvme=tmp_path / "nvme", attached={"layer_major": True})


def test_optimizer_with_state_is_rejected_by_train(tmp_path: Path) -> None:
    """The error is raised before the first step, and nothing remains open."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    trainer = make(tmp_path / "out", model, nvme=tmp_path / "nvme", optimizers=(optimizer, None))
    with pytest.raises(InfinityError, match="already has state"):
        trainer.train()
    assert not (tmp_path / "nvme").exists()


# Without `attach` #

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
