"""Families of transformers, from config: first values, weights in, training, commit, weights out."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.checkpoint.reader import CommitReader
from infinity.errors import InfinityError
from infinity.formats.safetensors import export_safetensors
from support.rows import REFUSED
from support.train import Outcome, Paging, differences, host_bytes, settings, state_in_memory, state_on_nvme
from support.values import unlike
from support.wide_models import ROWS, ModelRow, build

pytestmark = pytest.mark.wide
STEPS = 3
PAGING = Paging(arena="least")


def shard(row: ModelRow, model: nn.Module) -> nn.Module:
    """Shard the layers of a row one by one, and the rest with the root."""
    mesh = infinity.mesh("cpu")
    for path in row.layers:
        found = model.get_submodule(path.removesuffix(".*"))
        for layer in found.children() if path.endswith(".*") else (found,):
            fully_shard(layer, mesh=mesh)
    # fully_shard takes no parameters without dimensions; users leave them out.
    fully_shard(model, mesh=mesh, ignored_params={param for param in model.parameters() if param.ndim == 0})
    return model


def loss_of(row: ModelRow, model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of one batch."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, 12, (2, 10), generator=draw)
    image = torch.rand(2, 3, 32, 32, generator=draw)
    if row.inputs == "hidden":
        return model(input_ids=ids).last_hidden_state.square().mean() + model(input_ids=ids).pooler_output.mean()
    if row.inputs == "embeds":
        return model(input_ids=ids).text_embeds.square().mean()
    if row.inputs == "pixels":
        return model(pixel_values=image).image_embeds.square().mean()
    inputs: dict[str, Any] = {
        "text": {"input_ids": ids, "labels": ids},
        "image": {"pixel_values": image, "labels": ids[:, 0] % 5},
        "clip": {"input_ids": ids, "pixel_values": image, "return_loss": True},
        "mel": {"input_features": torch.rand(2, 8, 40, generator=draw), "labels": ids},
        "wave": {"input_values": torch.rand(2, 400, generator=draw), "labels": ids[:, :4]},
    }[row.inputs]
    return model(**inputs).loss


def output_of(row: ModelRow, model: nn.Module) -> torch.Tensor:
    """Return the loss of a batch as an evaluation has it."""
    model.eval()
    with torch.no_grad():
        return loss_of(row, model, 77)


def seed(value: int) -> None:
    """Set every generator that a model draws from."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def train(row: ModelRow, model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
    """Train some steps; note the losses."""
    model.train()
    seed(5)
    for step in range(STEPS):
        loss = loss_of(row, model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss.item())


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, a copy."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that everything is trained with."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, fused=True)


@contextmanager
def offloaded(row: ModelRow, folder: Path, **more: Any) -> Iterator[tuple[nn.Module, infinity.PagedOptimizer]]:
    """Build the model of a row on the meta device and offload it."""
    folder.mkdir()
    with torch.device("meta"):
        model = build(row)
    if any(not param.is_meta for param in model.parameters()):
        model.to("meta")  # some classes make parameters beside the device that they are built on
    shard(row, model)
    passed_in = adamw(model)
    config = settings(folder, PAGING, host_bytes(PAGING, model, passed_in, folder))
    with infinity.offload(model, passed_in, config, **more) as optimizer:
        yield model, optimizer


def first_values(row: ModelRow, folder: Path, expected: nn.Module) -> list[str]:
    """Return what of a model's first values is unlike those of a model built in memory."""
    with offloaded(row, folder) as (model, _):
        params = {name: whole(param) for name, param in model.named_parameters()}
        wrong = wrong_buffers(model, expected)
    wanted = dict(expected.named_parameters())
    assert params.keys() == wanted.keys()
    found = ((name, unlike(wanted[name].detach(), value)) for name, value in params.items())
    return [f"{name}: {words}" for name, words in found if words] + wrong


def wrong_buffers(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return the buffers that are not those of a model in memory, bit by bit."""
    found = dict(model.named_buffers())
    wanted = dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    return [f"buffer {n}" for n, b in wanted.items() if b.dtype != found[n].dtype or not torch.equal(b, found[n])]


def trained_in_memory(row: ModelRow, saved: Path) -> tuple[Outcome, nn.Module]:
    """Return what training gives under plain FSDP2, and the model."""
    model = build(row)  # what transformers loads may train what it freezes when it builds
    model.load_state_dict(load(row, saved).state_dict())
    shard(row, model)
    optimizer, outcome = adamw(model), Outcome()
    train(row, model, optimizer, outcome)
    outcome.state = state_in_memory(model, optimizer)
    return outcome, model


def load(row: ModelRow, folder: Path) -> nn.Module:
    """Return a model as transformers loads it."""
    cls = getattr(importlib.import_module("transformers"), row.model)
    model, info = cls.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def trained_paged(row: ModelRow, saved: Path, folder: Path) -> tuple[Outcome, list[str]]:
    """Return what training from a folder's weights gives when it is paged, and wrong buffers; export it."""
    outcome = Outcome()
    with offloaded(row, folder, weights=saved) as (model, optimizer):
        wrong = wrong_buffers(model, load(row, saved))
        train(row, model, optimizer, outcome)
        outcome.state = state_on_nvme(model, optimizer)
        optimizer.commit()
        reader = CommitReader(optimizer.run.folder)
        export_safetensors(reader, folder / "exported", file_bytes=1 << 30)
    return outcome, wrong


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging = pytest.importorskip("transformers").logging
    logging.set_verbosity_error()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_family(row: ModelRow, tmp_path: Path) -> None:
    """From config: as transformers initialises it. From weights: trains, is exported and loaded, bit for bit."""
    if row.outcome == REFUSED:
        with pytest.raises(InfinityError, match=row.words), offloaded(row, tmp_path / "first"):
            pass
        return
    seed(1)
    source = build(row)
    assert first_values(row, tmp_path / "first", source) == []
    source.save_pretrained(tmp_path / "saved")
    expected, trained = trained_in_memory(row, tmp_path / "saved")
    found, wrong = trained_paged(row, tmp_path / "saved", tmp_path / "paged")
    assert wrong == []
    assert differences(expected, found) == []
    assert len(set(found.losses)) > 1
    loaded = load(row, tmp_path / "paged" / "exported")
    values = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    differing = [name for name, value in (*trained.named_parameters(), *trained.named_buffers())
                 if not torch.equal(whole(value), values[name])]  # fmt: skip
    assert differing == []
    assert torch.equal(output_of(row, loaded), output_of(row, trained))
