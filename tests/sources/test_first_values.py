"""Tests of initial values: incomplete values and values of an incompatible dtype raise an error."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.sources.first_values import convertible
from support import models
from support.train import Paging, Recipe, build, make_optimizer, settings

RECIPE = Recipe(model="toy")


def saved(folder: Path, change: object = None) -> Path:
    """Save the model's weights in a DCP folder, optionally changed, and return the folder."""
    state = {name: value.full_tensor() for name, value in build(RECIPE).state_dict().items()}
    if change is not None:
        state = {name: change(value) for name, value in state.items()}  # type: ignore[operator]
    dcp.save({"model": state}, checkpoint_id=str(folder))
    return folder


def begin(weights: Path, place: Path) -> None:
    place.mkdir()
    model = models.build("toy", meta=True)
    infinity.offload(
        model, make_optimizer(RECIPE, model), settings(place, Paging(host_cache="all"), 64 << 20), weights=weights
    ).close()


def test_incomplete_dcp_folder_raises(tmp_path: Path) -> None:
    """Elements that no chunk covers would otherwise be uninitialized."""
    weights = saved(tmp_path / "dcp")
    begin(weights, tmp_path / "good")
    file = weights / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    name = next(key for key, found in metadata.state_dict_metadata.items() if len(found.size) == 2)
    metadata.state_dict_metadata[name].chunks.clear()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=f"only a part of {name}"):
        begin(weights, tmp_path / "bad")


def test_quantized_weights_raise(tmp_path: Path) -> None:
    """Integer codes without their scale are not weights."""
    weights = saved(tmp_path / "dcp", lambda value: value.to(torch.int8))
    with pytest.raises(ConfigError, match=r"is torch\.int8 .* but this run needs torch\.float32"):
        begin(weights, tmp_path / "place")


def test_convertible_dtypes() -> None:
    """Floating-point dtypes are convertible except for scaled ones, and integers only to wider integers."""
    assert convertible(torch.bfloat16, torch.float32)
    assert not convertible(torch.float8_e4m3fn, torch.float32)
    assert not convertible(torch.int32, torch.float32)
    assert convertible(torch.int32, torch.int64)
    assert not convertible(torch.int64, torch.int32)


def test_parameters_tied_after_fully_shard_raise(tmp_path: Path) -> None:
    """FSDP2 gathers the original parameter."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)

    model = Tied()
    mesh = infinity.mesh()
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.head.weight = model.embed.weight
    with pytest.raises(UnsupportedError, match=r"weight of a Linear in FSDP module head is not the parameter.*before"):
        infinity.offload(model, torch.optim.AdamW(model.parameters()), {"storage": {"paths": [str(tmp_path)]}})
