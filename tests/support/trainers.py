"""transformers Trainer for tiny models, with and without offloading, and an equivalent reference loop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.tensor import DTensor

import infinity
from infinity import torchrun
from support import models

os.environ["HF_HUB_OFFLINE"] = "1"  # no requests to the Hub
VOCABULARY, LENGTH = 256, 16
STEPS = 4
BATCH = 4


@contextmanager
def as_torchrun() -> Iterator[None]:
    """Set the environment variables of torchrun, which are all that Accelerate reads."""
    before = dict(os.environ)
    # The port is not used, because the process group exists already.
    os.environ |= torchrun.variables(dist.get_rank(), dist.get_world_size(), 1)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def build(where: str = "cpu", *, policy: str = "fp32", layers: int = 3, dropout: float = 0.0) -> nn.Module:
    """Return a tiny Llama, sharded on device `where` (``cpu`` or ``meta``), or unsharded if `where` is ``plain``."""
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
    """Return the model with peft LoRA adapters, sharded on the CPU, or unsharded if `where` is ``plain``."""
    from peft import LoraConfig, get_peft_model

    model = build("plain")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if where != "plain":
        models.shard(model, "fp32", device=infinity.mesh().device_type)
    return model


def dataset(*, rows: int = 128, ignored: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens. If `ignored`, some labels are -100."""
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
    """Return the settings of a run in a folder."""
    own = {"storage": {"paths": [str(nvme)]}, "memory": {"host_bytes": "8MiB"}}
    return own | {"telemetry": {"runtime_dir": str(nvme.parent / "runtime")}} | sections


def arguments(out: Path, **options: Any) -> Any:
    """Return TrainingArguments for a few steps in the order of the data, which do not save by default."""
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
    return TrainingArguments(output_dir=str(out), **(defaults | options))


@dataclass
class Outcome:
    """Results of a training run, which must be bitwise equal to those of the reference."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def equals(self, other: Outcome, *, first: int = 0) -> None:
        """Assert equality with another outcome, except for its steps before `first`."""
        assert self.losses == other.losses[first:]
        assert len(self.losses) > 0
        for mine, theirs in zip(self.norms, other.norms[first:], strict=True):
            assert mine in (
                None,
                theirs,
            )  # None without clipping and with updates in backward, because the norm is unknown
        assert self.evaluations == other.evaluations[len(other.evaluations) - len(self.evaluations) :]
        assert self.weights.keys() == other.weights.keys()
        for name, value in self.weights.items():
            assert value.equal(other.weights[name]), name


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the local shards of all parameters."""
    found = {}
    for name, param in model.named_parameters():
        part = param.to_local() if isinstance(param, DTensor) else param
        found[name] = part.detach().clone().reshape(-1)
    return found


def outcome_of(trainer: Any) -> Outcome:
    """Return the logged values and the weights of a Trainer."""
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
    **options: Any,
) -> Any:
    """Return a Trainer, offloaded to `nvme` if it is set. `options` are arguments to Trainer or TrainingArguments."""
    from transformers import Trainer

    from infinity.integrations.transformers import attach

    own = {name: options.pop(name) for name in list(options) if name in _TRAINER_ARGUMENTS}
    own.setdefault("train_dataset", dataset())
    own.setdefault("eval_dataset", dataset()[:12])
    kind = own.pop("kind", Trainer)
    trainer = kind(model=model, args=arguments(out, **options), **own)
    if nvme is not None:
        attach(trainer, settings(nvme, **(config or {})), **(attached or {}))
    return trainer


_TRAINER_ARGUMENTS = {
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
    """Train a sharded model in memory with a loop that is equivalent to the Trainer's.

    Args:
        model: Sharded model.
        steps: Number of steps.
        accumulation: Number of micro-batches per step.
        clip: Maximum gradient norm. 0: no clipping.
        joined: Whether the micro-batches of a step are passed as one batch, which `infinity.micro_batches` splits.
        evaluate_every: Number of steps between evaluations. 0: no evaluation.
        step_context: Function that returns a context for forward passes, such as autocast.
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
    """Return the loss of batches, averaged over rows, on one rank."""
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
