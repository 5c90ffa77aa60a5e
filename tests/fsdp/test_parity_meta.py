"""Tests of models on the meta device: each FSDP module is initialized from the seed alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.errors import UnsupportedError
from support import models
from support.ranks import RankPool
from support.tables import all_but, alternate, one_of
from support.train import (
    Outcome,
    Paging,
    Recipe,
    batch,
    differences,
    full_copy,
    make_optimizer,
    settings,
    state_in_memory,
    state_on_nvme,
    train,
)

MODELS = ("llama", "tied", "gpt2", "toy")
HOST = 4 << 20


def first_values(name: str, folder: str, seed: int, paging: Paging) -> dict[str, torch.Tensor]:
    """Return the full parameters and buffers of a model that was offloaded from the meta device."""
    model = models.build(name, meta=True, seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    Path(folder).mkdir(exist_ok=True)
    with infinity.offload(model, optimizer, settings(Path(folder), paging, HOST, run={"seed": seed})):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {key: full_copy(value) for key, value in named}


@pytest.mark.parametrize(("name", "clip"), one_of(2, alternate(("tied", "llama", "toy", "gpt2"), [0.5, None])))
def test_meta_model_trains_like_its_copy_in_memory(name: str, clip: float | None, tmp_path: Path) -> None:
    """The initial values are copied to a model in memory."""
    recipe = Recipe(model=name, clip=clip)
    model = models.build(name, meta=True)
    passed_in = make_optimizer(recipe, model)
    found = Outcome()
    with infinity.offload(model, passed_in, settings(tmp_path, Paging(), HOST)) as optimizer:
        values = {key: value.clone() for key, value in get_model_state_dict(model).items()}
        full = {key: full_copy(value) for key, value in values.items()}
        train(recipe, model, optimizer, found)
        found.state = state_on_nvme(model, optimizer)

    twin = models.build(name, seed=99)
    set_model_state_dict(twin, full, options=StateDictOptions(full_state_dict=True))
    optimizer = make_optimizer(recipe, twin)
    expected = Outcome()
    train(recipe, twin, optimizer, expected)
    expected.state = state_in_memory(twin, optimizer)
    assert differences(expected, found) == []


def test_offload_preserves_parameter_identity(tmp_path: Path) -> None:
    """Clipping a parameter list that was created before offloading works."""
    model = models.build("toy", meta=True)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2)

    def steps(model: nn.Module, params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
        norms = []
        for step in range(3):
            models.loss_of(model, batch(model, step)).backward()
            norms.append(full_copy(torch.nn.utils.clip_grad_norm_(params, 0.5)).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST)) as paged:
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert [group["params"] for group in paged.param_groups] == [params]
        first = [full_copy(param) for param in params]
        norms = steps(model, params, paged)
        found = [full_copy(param) for param in params]

    twin = models.build("toy", seed=99)
    for param, value in zip(twin.parameters(), first, strict=True):
        param.data.copy_(DTensor.from_local(value, param.device_mesh, param.placements))
    expected = steps(twin, list(twin.parameters()), torch.optim.AdamW(twin.parameters(), lr=1e-2))
    assert norms == expected
    assert min(norms) > 0.5
    assert all(torch.equal(a, full_copy(b)) for a, b in zip(found, twin.parameters(), strict=True))


def test_offload_preserves_attributes_of_meta_tensors(tmp_path: Path) -> None:
    """Attributes that the user sets on parameters and buffers decide, for example, about weight decay."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    fully_shard(model, mesh=infinity.mesh("cpu"))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.label = name
    optimizer = torch.optim.AdamW(model.parameters())
    infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST)).close()
    found = dict((*model.named_parameters(), *model.named_buffers()))
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    assert [getattr(tensor, "label", None) for tensor in found.values()] == list(found)


@pytest.mark.parametrize("name", all_but(MODELS, "llama", "gpt2", "toy"))
def test_initial_values_depend_only_on_the_seed(name: str, tmp_path: Path, pair: RankPool) -> None:
    """They do not depend on the world size, host cache, page size or paths."""
    base = first_values(name, str(tmp_path), 5, Paging())
    assert all(torch.isfinite(value).all() for value in base.values())
    other_page = first_values(name, str(tmp_path / "b"), 5, Paging(page=128 << 10, paths=2, engine="threads"))
    same(base, other_page)
    for on_rank in pair.run(first_values, name, str(tmp_path), 5, Paging()):
        same(base, on_rank)
    other_seed = first_values(name, str(tmp_path), 6, Paging())
    drawn = [key for key, value in base.items() if value.is_floating_point() and value.ndim == 2]
    assert drawn
    pairs = [(a, b) for a, b in itertools.combinations(drawn, 2) if base[a].shape == base[b].shape]
    assert [pair for pair in pairs if torch.equal(base[pair[0]], base[pair[1]])] == []
    assert not any(torch.equal(base[key], other_seed[key]) for key in drawn)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Check that two models are bitwise equal."""
    assert a.keys() == b.keys()
    assert [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])] == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_buffers_of_a_meta_model_are_computed(name: str, tmp_path: Path) -> None:
    """Rotary frequencies and masks equal those of a model in memory."""
    found = first_values(name, str(tmp_path), 0, Paging())
    expected = dict(models.MODELS[name]().named_buffers())
    assert expected or name == "gpt2"
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_init_function_sets_every_parameter(tmp_path: Path) -> None:
    model = models.build("toy", meta=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.fill_(0.25)

    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST), init=fill):
        assert all((full_copy(param) == 0.25).all() for param in model.parameters())


def test_module_without_initialization_raises(tmp_path: Path) -> None:
    """The error names the parameter."""
    model = models.build("spare", meta=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.unused"):
        infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST))
