"""transformers' Trainer on tiny models: with its state on NVMe, as it comes, and the same steps written by hand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import infinity
from support import models

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is asked of the Hub, and nothing told
VOCABULARY, LENGTH = 256, 16
STEPS = 6
BATCH = 4


def build(where: str = "cpu", *, policy: str = "fp32", layers: int = 3, dropout: float = 0.0) -> nn.Module:
    """Return a tiny Llama, sharded on the CPU or on the meta device, or, as ``plain``, not sharded."""
    torch.manual_seed(0)
    if where == "plain":
        return models.llama(layers=layers, dropout=dropout)
    mesh = infinity.mesh()
    with torch.device(where):
        model = models.llama(layers=layers, dropout=dropout)
    models.shard(model, policy, device=mesh.device_type)
    if where == "meta":
        model.hf_device_map = {"": mesh.device_type}
    return model


def with_adapters(where: str = "cpu") -> nn.Module:
    """Return the model with LoRA of peft, sharded on the CPU or, as ``plain``, not sharded."""
    from peft import LoraConfig, get_peft_model

    model = build("plain")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if where != "plain":
        models.shard(model, "fp32", device=infinity.mesh().device_type)
    return model


def dataset(*, rows: int = 128, ignored: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens; of some, a part of the labels does not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    found = []
    for row, line in enumerate(tokens):
        labels = line.clone()
        if ignored:
            labels[: row % 5] = -100
        found.append({"input_ids": line, "labels": labels})
    return found


def settings(nvme: Path, **sections: Any) -> dict[str, Any]:
    """Return settings for a run under a folder."""
    own = {"storage": {"paths": [str(nvme)]}, "memory": {"host_bytes": "8MiB"}}
    return own | {"telemetry": {"runtime_dir": str(nvme.parent / "runtime")}} | sections


def arguments(out: Path, **given: Any) -> Any:
    """Return TrainingArguments that train a few steps in the order of the data, and write nothing unless asked to."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(out), **(defaults | given))


@dataclass
class Outcome:
    """What a training shows; equal to the bit, or something was computed otherwise."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def equals(self, other: Outcome, *, first: int = 0) -> None:
        """Compare with another one, of which steps before `first` are not here."""
        assert self.losses == other.losses[first:]
        assert len(self.losses) > 0
        for mine, theirs in zip(self.norms, other.norms[first:], strict=True):
            assert mine in (None, theirs)  # None: nobody clips by it, and updates in backward leave it unknown
        assert self.evaluations == other.evaluations[len(other.evaluations) - len(self.evaluations) :]
        assert self.weights.keys() == other.weights.keys()
        for name, value in self.weights.items():
            assert value.equal(other.weights[name]), name


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of every parameter, a copy."""
    found = {}
    for name, param in model.named_parameters():
        part = param.to_local() if isinstance(param, DTensor) else param
        found[name] = part.detach().clone().reshape(-1)
    return found


def outcome_of(trainer: Any) -> Outcome:
    """Return what a Trainer has logged, and its weights."""
    logs = trainer.state.log_history
    steps = [entry for entry in logs if "loss" in entry]
    return Outcome(
        [entry["loss"] for entry in steps],
        [entry.get("grad_norm") for entry in steps],
        [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
        weights_of(trainer.model),
    )


def make(
    out: Path,
    model: nn.Module,
    *,
    nvme: Path | None = None,
    attached: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Return a Trainer; with `nvme`, one whose state is there. `given` are its arguments, or TrainingArguments."""
    from transformers import Trainer

    from infinity.integrations.transformers import attach

    own = {name: given.pop(name) for name in list(given) if name in _OF_TRAINER}
    own.setdefault("train_dataset", dataset())
    own.setdefault("eval_dataset", dataset()[:12])
    kind = own.pop("kind", Trainer)
    trainer = kind(model=model, args=arguments(out, **given), **own)
    if nvme is not None:
        attach(trainer, settings(nvme, **(config or {})), **(attached or {}))
    return trainer


_OF_TRAINER = {
    "kind", "train_dataset", "eval_dataset", "callbacks", "optimizers", "compute_metrics", "data_collator",
    "compute_loss_func", "optimizer_cls_and_kwargs",
}  # fmt: skip


def by_hand(
    model: nn.Module,
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    clip: float = 1.0,
    joined: bool = False,
    evaluate_every: int = 0,
    step_context: Callable[[], Any] | None = None,
) -> Outcome:
    """Train a sharded model in memory: the loop that the Trainer's documentation describes, without the Trainer.

    Args:
        accumulation: micro-batches of a step.
        clip: the largest norm of gradients; 0: no clipping.
        joined: whether the micro-batches of a step are one batch (`infinity.micro_batches` cuts it again).
        evaluate_every: steps between evaluations; 0: none.
        step_context: what forwards run in, such as autocast.
    """
    import contextlib

    from transformers import get_scheduler

    context = step_context or contextlib.nullcontext
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows, outcome = dataset(), Outcome()
    plain = [param for name, param in model.named_parameters() if "norm" in name]
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, fused=True)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    model.train()
    for step in range(steps):
        first = [((step * accumulation + part) * world + rank) * BATCH for part in range(accumulation)]
        batches = [_collate(rows[start : start + BATCH]) for start in first]
        labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        if world > 1:
            dist.all_reduce(labels)
        if joined:
            batches = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
        total = torch.tensor(0.0)
        for batch in batches:
            with context():
                loss = model(**batch, num_items_in_batch=labels).loss
            if world > 1:
                loss = loss * world
            loss.backward()
            total += loss.detach()
        if world > 1:
            parts = [torch.empty(()) for _ in range(world)]
            dist.all_gather(parts, total)
            total = torch.stack(parts).mean()
        outcome.losses.append(total.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        outcome.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if evaluate_every and (step + 1) % evaluate_every == 0:
            outcome.evaluations.append(_evaluated(model, rows[:12]))
    outcome.weights = weights_of(model)
    return outcome


@torch.no_grad()
def _evaluated(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean over rows of their batch's loss, on one rank."""
    model.eval()
    losses = []
    for start in range(0, len(rows), BATCH):
        batch = _collate(rows[start : start + BATCH])
        labels = (batch["labels"][:, 1:] != -100).sum()
        losses.append(model(**batch, num_items_in_batch=labels).loss.repeat(BATCH))
    model.train()
    return torch.cat(losses).numpy().mean().item()


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
