"""Fine-tuning of transformers models from a folder, in memory and offloaded after `from_pretrained`."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.formats.safetensors import export_safetensors
from support.train import Outcome, Paging, differences, full_copy, host_bytes, settings, state_in_memory, state_on_nvme
from support.wide_models import LLAVA, ROWS, ModelRow, build

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
STEPS = 3
_PAGING = Paging(host_cache="least")


def row_of(name: str) -> ModelRow:
    """Return the row of a model family."""
    return next(row for row in (*ROWS, LLAVA) if row.name == name)


def load(row: ModelRow, folder: Path, **options: Any) -> nn.Module:
    """Load a model with transformers; all keys must match."""
    cls = getattr(importlib.import_module("transformers"), row.model)
    model, info = cls.from_pretrained(folder, attn_implementation="eager", output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def shard(row: ModelRow, model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    """Apply `fully_shard` to the layers of a row and to the model."""
    mesh = infinity.mesh("cpu")
    scalars = {param for param in model.parameters() if param.dim() == 0} or None
    for path in row.layers:
        found = model.get_submodule(path.removesuffix(".*"))
        for layer in found.children() if path.endswith(".*") else (found,):
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=scalars)
    return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=scalars)


def inputs_of(row: ModelRow, step: int) -> dict[str, Any]:
    """Return the arguments of one batch, with labels if the model computes the loss. They differ between ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(100 + step + 1000 * rank)
    ids = torch.randint(3, 12, (2, 10), generator=draw)
    image = torch.rand(2, 3, 32, 32, generator=draw)
    made: dict[str, dict[str, Any]] = {
        "hidden": {"input_ids": ids},
        "embeds": {"input_ids": ids},
        "pixels": {"pixel_values": image},
        "text": {"input_ids": ids, "labels": ids},
        "image": {"pixel_values": image, "labels": ids[:, 0] % 5},
        "clip": {"input_ids": ids, "pixel_values": image, "return_loss": True},
        "mel": {"input_features": torch.rand(2, 8, 40, generator=draw), "labels": ids},
        "wave": {"input_values": torch.rand(2, 400, generator=draw), "labels": ids[:, :4]},
    }
    if row.inputs == "image and text":
        with_image = torch.cat([torch.full((2, 16), 95), ids], dim=1)  # a token for each of 16 patches
        return {"input_ids": with_image, "pixel_values": image, "labels": with_image}
    return made[row.inputs]


def loss_of(row: ModelRow, model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of one batch."""
    inputs = inputs_of(row, step)
    if row.inputs == "hidden":
        return model(**inputs).last_hidden_state.square().mean() + model(**inputs).pooler_output.mean()
    if row.inputs in ("embeds", "pixels"):
        return model(**inputs)[0].square().mean()
    return model(**inputs).loss


def logits_of(row: ModelRow, model: nn.Module) -> torch.Tensor:
    """Return the logits of a batch in evaluation mode. The model is in training mode afterwards."""
    model.eval()
    with torch.no_grad():
        found = model(**inputs_of(row, 77)).logits.float()
    model.train()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters. The fused kernel rejects a mix of sharded and ignored ones."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [[param for param in trained if param.dim()], [param for param in trained if not param.dim()]]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-3, fused=True)


def seed(value: int) -> None:
    """Seed all generators that models use."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def train(row: ModelRow, model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
    """Train `STEPS` steps, and append the losses to `outcome`."""
    seed(5)
    for step in range(STEPS):
        loss = loss_of(row, model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss.item())


def offload(model: nn.Module, folder: Path, **run: Any) -> infinity.PagedOptimizer:
    """Offload a model with the smallest host cache. `weights` is not passed, because `from_pretrained` sets it."""
    optimizer = adamw(model)
    folder.mkdir(exist_ok=True)
    config = settings(folder, _PAGING, host_bytes(_PAGING, model, optimizer, folder), run=run)
    return infinity.offload(model, optimizer, config)


def compare(name: str, folder: Path) -> list[str]:
    """Fine-tune the model in `folder / "saved"` in memory and offloaded; return differences. Called on every rank."""
    row = row_of(name)
    plain = load(row, folder / "saved").train()
    for key, param in build(row).named_parameters():  # from_pretrained does not keep requires_grad of the class
        plain.get_parameter(key).requires_grad_(param.requires_grad)
    shard(row, plain, BF16)
    optimizer = adamw(plain)  # before a forward, because the root stays gathered after it
    expected, logits = Outcome(), [logits_of(row, plain)]
    train(row, plain, optimizer, expected)
    expected.state = state_in_memory(plain, optimizer)
    weights = {key: full_copy(value) for key, value in plain.named_parameters()}
    logits.append(logits_of(row, plain))

    found, wrong = Outcome(), []
    model = infinity.from_pretrained(folder / "saved", mesh=infinity.mesh("cpu"), attn_implementation="eager")
    with offload(model, folder / "paged") as paged:
        wrong += [] if torch.equal(logits_of(row, model), logits[0]) else ["logits before training"]
        train(row, model, paged, found)
        found.state = state_on_nvme(model, paged)
        wrong += [] if torch.equal(logits_of(row, model), logits[1]) else ["logits after training"]
        paged.save_checkpoint()
        if not dist.get_rank():
            export_safetensors(CheckpointReader(paged.run.folder), folder / "exported", file_bytes=1 << 30)
        dist.barrier()
    assert len(set(found.losses)) > 1
    wrong += differences(expected, found)

    again = infinity.from_pretrained(folder / "exported", mesh=infinity.mesh("cpu"), attn_implementation="eager")
    with offload(again, folder / "again", keep="never"):
        wrong += [] if torch.equal(logits_of(row, again), logits[1]) else ["logits of the exported model"]
    by_transformers = dict(load(row, folder / "exported").named_parameters())
    return wrong + [
        f"{key} of the exported model" for key, value in weights.items() if not torch.equal(value, by_transformers[key])
    ]
