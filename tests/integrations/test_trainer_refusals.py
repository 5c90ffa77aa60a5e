"""What a Trainer offers and cannot do with its state on NVMe is refused by `attach`, before anything begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.integrations.transformers import attach, unsupported_arguments
from infinity.integrations.transformers import trainer as attached
from support import models
from support.trainers import build, make, settings

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
"""By what is refused, TrainingArguments that ask for it."""
ALTERED: dict[str, dict[str, Any]] = {
    "deepspeed": {"is_deepspeed_enabled": True},
    "fsdp": {"is_fsdp_enabled": True},
    "parallelism_config": {"args.parallelism_config": object()},
    "several GPUs in one process": {"args._n_gpu": 2},
    "model_init": {"model_init": build},
    "fp16": {"args.fp16": True},
    "push_to_hub": {"args.push_to_hub": True, "args.hub_strategy": "every_save"},
}
"""The same where a Trainer cannot be made like that here: what it would have then."""


def test_everything_that_is_refused_is_tried() -> None:
    """Once, below."""
    assert {name for name, _, _ in unsupported_arguments.UNSUPPORTED} == {*ARGUMENTS, *ALTERED}


@pytest.mark.parametrize("name", [*ARGUMENTS, *ALTERED])
def test_refused(name: str, tmp_path: Path) -> None:
    """With its reason; nothing was made on the drive, and the Trainer is as it was."""
    trainer = make(tmp_path / "out", build(), **ARGUMENTS.get(name, {}))
    for place, value in ALTERED.get(name, {}).items():
        of, _, key = place.rpartition(".")
        setattr(trainer.args if of else trainer, key, value)
    (reason,) = (reason for refused, _, reason in unsupported_arguments.UNSUPPORTED if refused == name)
    kind = type(trainer)
    with pytest.raises(UnsupportedError) as caught:
        attach(trainer, settings(tmp_path / "nvme"))
    assert f"{name}: {reason}" in str(caught.value)
    assert type(trainer) is kind
    assert not (tmp_path / "nvme").exists()


def test_all_reasons_are_said_at_once(tmp_path: Path) -> None:
    """In one list."""
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
def test_settings_that_are_the_trainers(given: Any, config: Any, message: str, tmp_path: Path) -> None:
    """Are refused, with what to do."""
    trainer = make(tmp_path / "out", build(), **given)
    with pytest.raises(ConfigError, match=message):
        attach(trainer, settings(tmp_path / "nvme", **config))


def test_what_is_no_trainer_or_has_no_sharded_model(tmp_path: Path) -> None:
    """Neither a bare object, nor a model that nobody has sharded, nor a Trainer that is attached."""
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        attach(SimpleNamespace(), settings(tmp_path / "nvme"))
    with pytest.raises(UnsupportedError, match="fully_shard"):
        attach(make(tmp_path / "out", build("plain")), settings(tmp_path / "nvme"))
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme")
    with pytest.raises(ConfigError, match="attach"):
        attach(trainer, settings(tmp_path / "nvme"))


def test_another_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose Trainer has not what is needed is refused by name of that."""
    monkeypatch.setattr(attached, "_HOOKS", (*attached._HOOKS, "_gone"))
    with pytest.raises(UnsupportedError, match="has no _gone; install transformers"):
        attach(make(tmp_path / "out", build()), settings(tmp_path / "nvme"))


def test_arguments_that_change_behind_attach(tmp_path: Path) -> None:
    """Are looked at again by train(): space for checkpoints is reserved by then."""
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme")
    trainer.args.save_strategy, trainer.args.save_total_limit = "steps", 3
    with pytest.raises(ConfigError, match="save_total_limit was changed"):
        trainer.train()
    trainer.args.save_strategy, trainer.args.auto_find_batch_size = "no", True
    with pytest.raises(UnsupportedError, match="auto_find_batch_size"):
        trainer.train()


def test_layer_major_where_it_cannot_be(tmp_path: Path) -> None:
    """Asked for by name it is refused, with the reason; else the loop runs, and that is said."""
    given = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    with pytest.raises(UnsupportedError, match=r"layer_major=True .*label_smoothing_factor"):
        make(tmp_path / "out", build(), nvme=tmp_path / "nvme", attached={"layer_major": True}, **given)


def test_prefixes_cannot_run_layer_by_layer(tmp_path: Path) -> None:
    """Other adapters can."""
    peft = pytest.importorskip("peft")
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = models.shard(peft.get_peft_model(build("plain"), prefixes), "fp32")
    with pytest.raises(UnsupportedError, match=r"layer_major=True .*keys and values"):
        make(tmp_path / "out", model, nvme=tmp_path / "nvme", attached={"layer_major": True})


def test_an_optimizer_that_offload_refuses(tmp_path: Path) -> None:
    """Before the first step, with the reason; the Trainer holds nothing open."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    trainer = make(tmp_path / "out", model, nvme=tmp_path / "nvme", optimizers=(optimizer, None))
    with pytest.raises(InfinityError, match="already has state"):
        trainer.train()
    assert not (tmp_path / "nvme").exists()
