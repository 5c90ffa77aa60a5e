"""Tests of fine-tuning a pretrained model with the Trainer on NVMe: resumed, exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, Trainer, get_scheduler

import infinity
from infinity.integrations.transformers import attach
from support import fine_tune, real_model
from support.train import full_copy
from support.trainers import arguments

STEPS, MIDDLE, PAIRS = 4, 2, 8
RATE, DECAY = 2e-5, 0.01
SIDES = ("names", "sentences")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Dropout is off because, unlike the loop, the Trainer seeds the random generators."""


class Pairs(Trainer):
    """Trainer that learns which sentence of the batch belongs to each name."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        return real_model.loss_of(model, tuple(_side(inputs, side) for side in SIDES))


def _side(inputs: dict[str, Any], side: str) -> dict[str, Any]:
    return {key.removeprefix(f"{side}_"): value for key, value in inputs.items() if key.startswith(side)}


def rows(batches: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Return the pairs of the batches as rows for the Trainer's collator."""
    return [
        {
            f"{side}_{key}": value[row]
            for side, tokens in zip(SIDES, batch, strict=True)
            for key, value in tokens.items()
        }
        for batch in batches
        for row in range(PAIRS)
    ]


def evaluate(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the vectors of a batch in evaluation mode."""
    with torch.no_grad():
        return real_model.vectors(model.eval(), batch[1])


def by_hand(batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Train under FSDP2 in memory, without a Trainer; return losses, weights and the final vectors."""
    model = AutoModel.from_pretrained(real_model.folder(), **NO_DROPOUT).train()
    mesh = infinity.mesh("cpu")
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh, mp_policy=fine_tune.BF16)
    fully_shard(model, mesh=mesh, mp_policy=fine_tune.BF16)
    plain = {name for name, _ in model.named_parameters() if "LayerNorm" in name or name.endswith("bias")}
    groups = [
        {
            "params": [param for name, param in model.named_parameters() if (name in plain) == without],
            "weight_decay": decay,
        }
        for without, decay in ((False, DECAY), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    losses = []
    for batch in batches:
        loss = real_model.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full_copy(param) for name, param in model.named_parameters()}, evaluate(model, batches[0])


def on_nvme(folder: Path, source: Path, batches: list[Any], **given: Any) -> Pairs:
    """Return a Trainer for the model in a folder, with its state on NVMe."""
    given = {
        "per_device_train_batch_size": PAIRS,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "weight_decay": DECAY,
    } | given
    trainer = Pairs(
        model=infinity.from_pretrained(source, mesh=infinity.mesh("cpu"), **NO_DROPOUT),
        args=arguments(folder / "out", save_strategy="steps", save_steps=MIDDLE, remove_unused_columns=False, **given),
        train_dataset=rows(batches),
    )
    attach(trainer, {"storage": {"paths": [str(folder / "nvme")]}, "memory": {"host_bytes": "160MiB"}})
    return trainer


def test_pretrained_model_is_finetuned_resumed_and_exported(tmp_path: Path) -> None:
    """Losses and weights are bitwise equal to a loop in memory, although the Trainer was stopped in the middle."""
    batches = list(real_model.batches(STEPS))
    losses, weights, expected = by_hand(batches)
    assert losses[0] < 1.0, "the model must be pretrained: otherwise the loss is about log(8)"

    class StoppedError(Exception):
        """Simulated interruption."""

    trainer = on_nvme(tmp_path, real_model.folder(), batches)
    step = trainer.training_step
    steps: list[int] = []

    def stop_in_the_middle(*given: Any, **named: Any) -> torch.Tensor:
        if len(steps) == MIDDLE:
            raise StoppedError
        steps.append(1)
        return step(*given, **named)

    trainer.training_step = stop_in_the_middle
    with pytest.raises(StoppedError):
        trainer.train()
    trainer.end()
    trainer = on_nvme(tmp_path, real_model.folder(), batches)
    trainer.train(resume_from_checkpoint=True)
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == losses
    trainer.save_model(str(tmp_path / "exported"))
    trainer.end()

    loaded = AutoModel.from_pretrained(tmp_path / "exported")
    assert [name for name, param in loaded.named_parameters() if not torch.equal(param, weights[name])] == []
    plain = AutoModel.from_pretrained(real_model.folder())
    plain.load_state_dict(weights, strict=False)  # without buffers
    assert torch.equal(evaluate(loaded, batches[0]), evaluate(plain, batches[0]))
    again = infinity.from_pretrained(tmp_path / "exported", mesh=infinity.mesh("cpu"))
    optimizer = torch.optim.AdamW(again.parameters(), fused=True)
    settings = {"storage": {"paths": [str(tmp_path / "again")]}, "memory": {"host_bytes": "160MiB"}}
    with infinity.offload(again, optimizer, settings):
        assert torch.equal(evaluate(again, batches[0]), expected)
