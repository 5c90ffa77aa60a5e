"""Tests of initial values: incomplete or incompatible values, random generators and tokens added to a vocabulary."""

from __future__ import annotations

import logging
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.sources.first_values import convertible
from infinity.sources.new_tokens import new_rows
from support import families, models
from support.ranks import RankPool
from support.train import Paging, Recipe, build, full_copy, make_optimizer, settings

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


DEVICES = ("cuda", "mps", "mtia", "xpu")


def test_offload_preserves_all_generator_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users seed device generators per rank; a common seed would make dropout equal on all ranks."""
    seeded: list[str] = []
    for device in DEVICES:
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"):
            module = getattr(torch, device)
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, call=f"torch.{device}.{name}": seeded.append(call))
    torch.manual_seed(1)
    assert {call.split(".")[1] for call in seeded} == set(DEVICES)  # all device generators are patched
    seeded.clear()
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = models.llama(layers=2)
    model.to("meta")
    models.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    between = torch.get_rng_state()
    config = {"storage": {"paths": [str(tmp_path)]}, "run": {"seed": 7}}
    with infinity.offload(model, optimizer, config) as paged:
        master = paged.read_state("model.layers.0.mlp.up_proj.weight")["master"]
        assert master.std() > 0  # values were drawn
        assert seeded == []
        assert torch.equal(torch.get_rng_state(), between)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


transformers = pytest.importorskip("transformers")
TOKENS, NEW = 64, 70


def grown(family: str, folder: Path, run: Path, **values: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of a model from a folder with more tokens, after one step and a round trip."""
    model = infinity.from_pretrained(folder, mesh=infinity.mesh("cpu"), vocab_size=NEW, **values)
    with families.offload(model, run) as optimizer:
        found = {name: full_copy(param) for name, param in model.named_parameters()}
        tokens = torch.full((2, 4), NEW - 1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.save_pretrained(run / "out")
    saved = type(families.make(family)).from_pretrained(run / "out")
    assert saved.get_input_embeddings().weight.shape[0] == saved.config.vocab_size == NEW
    return found


@pytest.mark.parametrize(
    ("family", "values"),
    [("llama", {}), ("qwen2", {}), ("bert", {}), ("t5", {}), ("gpt2", {"dtype": torch.bfloat16})],
    ids=["untied", "tied", "bias", "encoder-decoder", "bf16"],
)
def test_new_tokens_are_close_to_the_mean(
    family: str, values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result matches `resize_token_embeddings`, which draws with 1e-9 of the covariance of the old rows."""
    made = families.filled(family)
    made.save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "infinity"):
        found = grown(family, tmp_path / "model", tmp_path / "run", **values)
    assert "the model has more tokens" in caplog.text
    made.resize_token_embeddings(NEW)
    expected = dict(made.named_parameters())
    assert found.keys() == expected.keys()
    resized = 0
    for name, value in expected.items():
        wanted = value.detach().to(found[name].dtype)
        if value.shape[0] == NEW:
            resized += 1
            assert torch.equal(found[name][:TOKENS], wanted[:TOKENS]), name
            torch.testing.assert_close(found[name][TOKENS:], wanted[TOKENS:], rtol=1e-2, atol=1e-4)
        else:
            assert torch.equal(found[name], wanted), name
    assert resized == {"llama": 2, "bert": 2}.get(family, 1)


def on_ranks(folder: str) -> dict[str, torch.Tensor]:
    """Return the parameters with new tokens on this number of ranks."""
    rank = torch.distributed.get_rank()
    model = infinity.from_pretrained(Path(folder) / "model", mesh=infinity.mesh("cpu"), vocab_size=NEW)
    with families.offload(model, Path(folder) / "run"):
        found = {name: full_copy(param) for name, param in model.named_parameters()}
    return found if rank == 0 else {}


def test_new_tokens_do_not_depend_on_the_number_of_ranks(tmp_path: Path, pair: RankPool) -> None:
    families.filled("llama").save_pretrained(tmp_path / "model")
    expected = grown("llama", tmp_path / "model", tmp_path / "alone")
    found = pair.run(on_ranks, str(tmp_path))[0]
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_new_rows_have_the_mean_and_covariance_of_the_old_rows() -> None:
    torch.manual_seed(0)
    old = torch.randn(300, 4) @ torch.tensor([[1.0, 0, 0, 0], [2, 1, 0, 0], [0, 0, 3, 0], [0, 1, 1, 1]]) + 5
    made = new_rows(lambda part: old[part], old.shape, 20_000, seed=1, name="weight")
    assert torch.equal(made, new_rows(lambda part: old[part], old.shape, 20_000, seed=1, name="weight"))
    torch.testing.assert_close(made.mean(0), old.mean(0).double(), rtol=1e-6, atol=0)
    covariance = torch.cov(old.double().T, correction=0)
    scale = covariance.diagonal().sqrt().outer(covariance.diagonal().sqrt())
    assert ((torch.cov(made.T) / 1e-9 - covariance) / scale).abs().max() < 0.05


@pytest.mark.parametrize("when", ["before offload", "offloaded", "sharded by hand"])
def test_resizing_a_sharded_model_raises(when: str, tmp_path: Path) -> None:
    """The error names the alternatives. Resizing to the same number of tokens is allowed."""
    families.filled("llama").save_pretrained(tmp_path / "model")
    if when == "sharded by hand":
        model: nn.Module = fully_shard(families.make("llama"), mesh=infinity.mesh("cpu"))
    else:
        model = infinity.from_pretrained(tmp_path / "model", mesh=infinity.mesh("cpu"))
    optimizer = None if when == "before offload" else families.offload(model, tmp_path / "run")
    for part in (model, model.model):
        assert part.resize_token_embeddings(TOKENS) is part.get_input_embeddings()
        with pytest.raises(UnsupportedError, match=r"from 64 to 72 tokens; pass vocab_size=72 to infinity\.from_pretr"):
            part.resize_token_embeddings(TOKENS + 1, pad_to_multiple_of=8)
    if optimizer is not None:
        optimizer.close()
