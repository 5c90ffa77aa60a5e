"""Test of a pretrained model's round trip: fine-tuned on NVMe, resumed, exported and loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import infinity
from support import fine_tune, real_model
from support.command import run_here
from support.train import full_copy

transformers = pytest.importorskip("transformers")
STEPS, MIDDLE = 4, 2


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that both runs use."""
    return torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return a scheduler that increases the learning rate for three steps."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def take_steps(model: nn.Module, optimizer: Any, scheduler: LambdaLR, batches: list[Any]) -> list[float]:
    """Train one step per batch and return the losses."""
    losses = []
    for batch in batches:
        loss = real_model.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def embed(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the embedding of a batch in evaluation mode."""
    with torch.no_grad():
        return real_model.vectors(model.eval(), batch[1])


def in_memory(batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Fine-tune under FSDP2 in memory; return the losses, the weights and the embedding afterwards."""
    model = transformers.AutoModel.from_pretrained(real_model.folder()).train()
    mesh = infinity.mesh("cpu")
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh, mp_policy=fine_tune.BF16)
    fully_shard(model, mesh=mesh, mp_policy=fine_tune.BF16)
    optimizer = make_optimizer(model)
    fine_tune.seed(5)
    losses = take_steps(model, optimizer, warm_up(optimizer), batches)
    weights = {name: full_copy(param) for name, param in model.named_parameters()}
    return losses, weights, embed(model, batches[0])


def on_nvme(folder: Path, source: Path, **run: Any) -> tuple[nn.Module, infinity.PagedOptimizer, LambdaLR]:
    """Start or resume a run from a model folder."""
    model = infinity.from_pretrained(source, mesh=infinity.mesh("cpu"))
    optimizer = make_optimizer(model)
    scheduler = warm_up(optimizer)  # created first, because resuming sets the learning rate
    settings = {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": "160MiB"}, "run": run}
    return model, infinity.offload(model, optimizer, settings), scheduler


def test_fine_tune_resume_export_round_trip(tmp_path: Path) -> None:
    """Losses, weights and embeddings are bitwise equal to fine-tuning in memory."""
    transformers.logging.set_verbosity_error()
    folder, batches = real_model.folder(), list(real_model.batches(STEPS))
    losses, weights, expected = in_memory(batches)
    assert losses[0] < 1.0, "the model is pretrained: otherwise the loss would be about log(8)"

    model, paged, scheduler = on_nvme(tmp_path / "nvme", folder)
    fine_tune.seed(5)
    with paged:
        found = take_steps(model, paged, scheduler, batches[:MIDDLE])
        paged.save_checkpoint({"scheduler": scheduler.state_dict()})
    model, paged, scheduler = on_nvme(tmp_path / "nvme", folder, resume="latest")
    scheduler.load_state_dict(paged.resumed_extra["scheduler"])
    with paged:
        found += take_steps(model, paged, scheduler, batches[MIDDLE:])
        paged.save_checkpoint()
    assert found == losses

    out = tmp_path / "exported"
    assert run_here("export", tmp_path / "nvme", "--out", out).status == 0
    assert {"tokenizer.json", "vocab.txt", "config.json"} <= {file.name for file in out.iterdir()}
    loaded = transformers.AutoModel.from_pretrained(out)
    assert [name for name, param in loaded.named_parameters() if not torch.equal(param, weights[name])] == []
    plain = transformers.AutoModel.from_pretrained(folder)
    before = embed(plain, batches[0])
    plain.load_state_dict(weights, strict=False)  # `weights` contains no buffers
    assert torch.equal(embed(loaded, batches[0]), embed(plain, batches[0]))
    assert not torch.equal(embed(loaded, batches[0]), before)
    again, paged, _ = on_nvme(tmp_path / "again", out)
    with paged:
        assert torch.equal(embed(again, batches[0]), expected)
