"""Tests of exports to safetensors: full parameters equal those in memory, and transformers loads the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from infinity.checkpoint.manifest import published_in
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError, CorruptPageError
from infinity.formats.safetensors import export_safetensors
from infinity.store.folder import RunFolder
from support import models
from support.ranks import RankPool
from support.tables import alternate
from support.train import Paging, Recipe, in_memory, make_optimizer, offloaded, train

MODELS = ("llama", "tied", "gpt2", "frozen", "spare")
MIB = 1 << 20


def checkpointed(recipe: Recipe, folder: Path, paths: int = 2) -> RunFolder:
    """Train a recipe, checkpoint and return the run folder."""
    from support.train import Outcome

    with offloaded(recipe, Paging(host_cache="least", paths=paths), folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        optimizer.save_checkpoint()
        return optimizer.run.folder


def differing(recipe: Recipe, folder: str) -> list[str]:
    """Return the parameters whose stored value differs from memory. Runs on every rank."""
    stored = checkpointed(recipe, Path(folder))
    expected = in_memory(recipe).state
    if dist.get_world_size() > 1:
        dist.barrier()
    reader = CheckpointReader(stored)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for index, spec in enumerate(reader.tensors):
        full = reader.read(index)
        chunks = torch.chunk(full, size, dim=spec.dim)
        mine = chunks[rank].reshape(-1) if rank < len(chunks) else full.new_empty(0)
        state = expected[spec.names[0]]
        wanted = state.get("master", state.get("frozen"))
        if tuple(full.shape) != spec.shape or not torch.equal(mine, wanted.reshape(-1)):
            found.append(spec.names[0])
    if {spec.names[0] for spec in reader.tensors} != set(expected):
        found.append("names")
    return found


@pytest.mark.parametrize(("name", "policy"), alternate(MODELS, ["bf16", "fp32"]))
def test_full_parameters_equal_memory(name: str, policy: str, tmp_path: Path) -> None:
    assert differing(Recipe(model=name, policy=policy, steps=2), str(tmp_path)) == []


@pytest.mark.parametrize("name", ["gpt2", "toy"])
def test_full_parameters_combine_two_ranks(name: str, pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(differing, Recipe(model=name, steps=2), str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("name", "file_bytes"), alternate(["llama", "tied", "gpt2"], [64 << 10, 64 * MIB]))
def test_transformers_loads_the_export(name: str, file_bytes: int, tmp_path: Path) -> None:
    """The logits are bitwise equal to a run in memory."""
    from support.train import Outcome

    recipe = Recipe(model=name, policy="fp32", steps=3)
    stored = checkpointed(recipe, tmp_path)
    model = models.build(name, policy="fp32")
    train(recipe, model, make_optimizer(recipe, model), Outcome())
    tokens = torch.arange(24).reshape(1, 24)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    architecture = {"architectures": [type(model).__name__.removeprefix("FSDP")]}
    config = {**model.config.to_dict(), **architecture}
    out = tmp_path / "exported"
    seen: list[int] = []
    export_safetensors(CheckpointReader(stored), out, config=_plain(config), file_bytes=file_bytes, advance=seen.append)
    assert sum(seen) == 4 * sum(param.numel() for param in model.parameters())
    assert (len(list(out.glob("*.safetensors"))) > 1) is (file_bytes < MIB)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation=model.config._attn_implementation).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens, use_cache=False).logits, expected)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if isinstance(value, str | int | float | bool | list | dict)}


def test_export_in_bf16_rounds_weights(tmp_path: Path) -> None:
    """config.json records the dtype."""
    stored = checkpointed(Recipe(model="llama", steps=1), tmp_path)
    reader, out = CheckpointReader(stored), tmp_path / "exported"
    export_safetensors(reader, out, config={"a": 1}, dtype=torch.bfloat16, file_bytes=MIB)
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        for index, spec in enumerate(reader.tensors):
            assert torch.equal(opened.get_tensor(spec.names[0]), reader.read(index).to(torch.bfloat16))
    assert '"dtype": "bfloat16"' in (out / "config.json").read_text()


def test_invalid_checkpoints_raise(tmp_path: Path) -> None:
    """Covers an unknown step, missing folders, a folder that is not empty, damaged pages, and bad manifests."""
    stored = checkpointed(Recipe(model="toy", steps=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 7 .*: 1\)"):
        CheckpointReader(stored, 7)
    with pytest.raises(CheckpointError, match=r"paths .*\b2\b.*\b1\b"):
        CheckpointReader(RunFolder(stored.run_id, stored.roots[:1]))
    with pytest.raises(ConfigError, match="not empty"):
        export_safetensors(CheckpointReader(stored), tmp_path, config=None, file_bytes=MIB)
    for file in (stored.data_file(0, 0), stored.data_file(1, 0)):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(CorruptPageError, match="update"):
        export_safetensors(CheckpointReader(stored), tmp_path / "out", config=None, file_bytes=MIB)
    (name,) = published_in(stored.checkpoints)
    file = stored.checkpoints / name.file_name
    good = file.read_bytes()
    for damaged in (good[:100], b"", b"{}", good.replace(b"blocks", b"blacks", 1)):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=file.name):
            CheckpointReader(stored)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*: none\)"):
        CheckpointReader(stored)
