"""A real pretrained model, there and back: fine-tuned on NVMe, resumed, exported, loaded by transformers."""

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
from support.train import whole

transformers = pytest.importorskip("transformers")
STEPS, MIDDLE = 4, 2


def tools(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both runs."""
    return torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return a scheduler: the rate rises for three steps."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def take_steps(model: nn.Module, optimizer: Any, scheduler: LambdaLR, batches: list[Any]) -> list[float]:
    """Take a step with each batch; return the losses."""
    losses = []
    for batch in batches:
        loss = real_model.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def said(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return what a model makes of a batch, in evaluation."""
    with torch.no_grad():
        return real_model.vectors(model.eval(), batch[1])


def in_memory(batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Fine-tune under FSDP2 in memory; return losses, weights and what the model then says."""
    model = transformers.AutoModel.from_pretrained(real_model.folder()).train()
    mesh = infinity.mesh("cpu")
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh, mp_policy=fine_tune.BF16)
    fully_shard(model, mesh=mesh, mp_policy=fine_tune.BF16)
    optimizer = tools(model)
    fine_tune.seed(5)
    losses = take_steps(model, optimizer, warm_up(optimizer), batches)
    weights = {name: whole(param) for name, param in model.named_parameters()}
    return losses, weights, said(model, batches[0])


def on_nvme(folder: Path, source: Path, **run: Any) -> tuple[nn.Module, infinity.PagedOptimizer, LambdaLR]:
    """Begin or resume with a model's folder."""
    model = infinity.from_pretrained(source, mesh=infinity.mesh("cpu"))
    optimizer = tools(model)
    scheduler = warm_up(optimizer)  # before a run resumes, which sets the rate
    settings = {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": "160MiB"}, "run": run}
    return model, infinity.offload(model, optimizer, settings), scheduler


def test_there_and_back(tmp_path: Path) -> None:
    """Losses, weights and what the model says are those of fine-tuning in memory, bit for bit."""
    transformers.logging.set_verbosity_error()
    folder, batches = real_model.folder(), list(real_model.batches(STEPS))
    losses, weights, expected = in_memory(batches)
    assert losses[0] < 1.0, "it knows English: a model that was not pretrained would be at log(8)"

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
    before = said(plain, batches[0])
    plain.load_state_dict(weights, strict=False)  # without buffers, which are not trained
    assert torch.equal(said(loaded, batches[0]), said(plain, batches[0]))
    assert not torch.equal(said(loaded, batches[0]), before)
    again, paged, _ = on_nvme(tmp_path / "again", out)
    with paged:
        assert torch.equal(said(again, batches[0]), expected)
