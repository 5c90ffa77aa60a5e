"""First values that are not whole, not of the kind of the parameter, or of another length are refused."""

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
    """Return a folder of DCP with the model's weights, some of them changed."""
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


def test_a_folder_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    """What no chunk covers would be whatever was in memory."""
    weights = saved(tmp_path / "dcp")
    begin(weights, tmp_path / "good")
    file = weights / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    name = next(key for key, found in metadata.state_dict_metadata.items() if len(found.size) == 2)
    metadata.state_dict_metadata[name].chunks.clear()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=f"only a part of {name}"):
        begin(weights, tmp_path / "bad")


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Codes that need a scale are not weights."""
    weights = saved(tmp_path / "dcp", lambda value: value.to(torch.int8))
    with pytest.raises(ConfigError, match=r"is torch\.int8, this run needs torch\.float32"):
        begin(weights, tmp_path / "place")


def test_what_can_be_converted() -> None:
    """Floats among each other, but for those that need a scale; integers where none is lost."""
    assert convertible(torch.bfloat16, torch.float32)
    assert not convertible(torch.float8_e4m3fn, torch.float32)
    assert not convertible(torch.int32, torch.float32)
    assert convertible(torch.int32, torch.int64)
    assert not convertible(torch.int64, torch.int32)


def test_parameters_that_were_tied_too_late_are_named(tmp_path: Path) -> None:
    """After `fully_shard` it is another parameter that FSDP2 gathers."""

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
