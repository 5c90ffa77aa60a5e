"""Tests of saving a live run: files equal the export of a checkpoint, and training is unaffected."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.formats.safetensors import export_safetensors
from infinity.io import Op
from infinity.run.live_state import LiveState
from support import families, models
from support.fault_engine import Fault, FaultKind
from support.ranks import RankPool
from support.tables import all_but
from support.train import (
    KIB,
    Outcome,
    Paging,
    Recipe,
    differences,
    faulty,
    make_optimizer,
    offloaded,
    state_in_memory,
    state_on_nvme,
    train,
)

HALF, FULL = 2, 3
FILE = 64 * KIB
RECIPES = {
    "in_forward": (Recipe(model="llama", clip=0.5, steps=FULL), Paging(host_cache="least")),
    "in_backward": (Recipe(model="tied", policy="fp32", steps=FULL), Paging(host_cache="middle")),
    "after_backward": (Recipe(model="gpt2", clip=0.5, steps=FULL), Paging(update_schedule="after_backward")),
    "frozen": (Recipe(model="frozen", clip=0.5, steps=FULL), Paging(host_cache="least")),
    "split": (Recipe(model="toy", clip=0.5, groups=True, steps=FULL), Paging(host_cache="least", format="split")),
    "nadam": (Recipe(model="buffered", optimizer="nadam", clip=0.5, steps=FULL), Paging(host_cache="least")),
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@functools.cache
def undisturbed(recipe: Recipe) -> Outcome:
    """Train in memory, in the same two parts."""
    model, found = models.build(recipe.model, policy=recipe.policy), Outcome()
    optimizer = make_optimizer(recipe, model)
    train(replace(recipe, steps=HALF), model, optimizer, found)
    train(recipe, model, optimizer, found, first=HALF)
    found.state = state_in_memory(model, optimizer)
    return found


def compare(name: str, folder: str) -> list[str]:
    """Save in the middle of training, on every rank; return all deviations from the expected files and results."""
    recipe, paging = RECIPES[name]
    root, found, wrong = Path(folder), Outcome(), []
    with offloaded(recipe, paging, root) as (model, optimizer):
        train(replace(recipe, steps=HALF), model, optimizer, found)
        run, random = optimizer.run, torch.get_rng_state()
        before = run.planner.plan, run.stats.snapshot().value("plan_divergences_total")
        files = optimizer.save_pretrained(root / "live", file_bytes=FILE)
        wrong += [f"{file} does not exist" for file in files if not file.is_file()]
        wrong += [] if torch.equal(random, torch.get_rng_state()) else ["random numbers were drawn"]
        optimizer.save_checkpoint()
        if dist.get_rank() == 0:
            export_safetensors(CheckpointReader(run.folder), root / "export", file_bytes=FILE)
            live, export = contents(root / "live"), contents(root / "export")
            wrong += [] if live == export else [f"{live.keys()} differ from {export.keys()}"]
            wrong += ["only one file was written"] if len(live) < 2 else []
        train(recipe, model, optimizer, found, first=HALF)
        after = run.planner.plan, run.stats.snapshot().value("plan_divergences_total")
        wrong += [] if before == after and before[0] is not None else [f"plan changed from {before} to {after}"]
        found.state = state_on_nvme(model, optimizer)
    return wrong + differences(undisturbed(recipe), found)


@pytest.mark.parametrize("name", all_but(RECIPES, "after_backward", "nadam", "in_forward", "in_backward"))
def test_live_save_equals_the_checkpoint_export(name: str, tmp_path: Path) -> None:
    """Files are identical byte for byte, and later steps match training in memory."""
    assert compare(name, str(tmp_path)) == []


@pytest.mark.parametrize("name", all_but(["nadam", "in_forward"], "in_forward"))
def test_live_save_with_two_ranks(name: str, pair: RankPool, tmp_path: Path) -> None:
    """Rank 0 writes the shards of both ranks, including uneven shards."""
    assert pair.run(compare, name, str(tmp_path)) == [[], []]


def test_save_pretrained_converts_names_and_copies_companions(tmp_path: Path) -> None:
    """Files have the tensor names of the source, include the tokenizer, and load with `from_pretrained`."""
    expected = families.filled("mixtral")
    expected.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    with torch.device("meta"):
        model = families.make("mixtral")
    families.shard(model)
    with families.offload(model, tmp_path, weights=tmp_path / "saved") as optimizer:
        optimizer.save_pretrained(tmp_path / "out")
        optimizer.save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    saved, out = contents(tmp_path / "saved"), contents(tmp_path / "out")
    assert out["model.safetensors"] == saved["model.safetensors"]
    assert out.keys() == saved.keys()
    assert type(expected).from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def test_live_save_contains_buffers_that_share_memory(tmp_path: Path) -> None:
    """Covers a buffer of two layers, a part of it and an expanded buffer. The files equal those of an export."""
    model, mask = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(8, 8).tril()
    model[0].register_buffer("mask", mask)
    model[1].register_buffer("mask", mask)
    model[1].register_buffer("row", mask[2])
    model[1].register_buffer("column", mask[:, 2])
    with families.offload(fully_shard(model, mesh=infinity.mesh()), tmp_path) as optimizer:
        optimizer.save_pretrained(tmp_path / "live")
        optimizer.save_checkpoint()
        export_safetensors(CheckpointReader(optimizer.run.folder), tmp_path / "export", file_bytes=FILE)
    assert contents(tmp_path / "live") == contents(tmp_path / "export")
    found = load_file(tmp_path / "live" / "model.safetensors")
    assert torch.equal(found["0.mask"], mask)
    assert torch.equal(found["1.mask"], mask)
    assert torch.equal(found["1.column"], mask[:, 2])


def test_invalid_save_calls_are_rejected(tmp_path: Path) -> None:
    """Errors are raised before anything is written, and the run is unaffected."""
    recipe = Recipe(model="llama", steps=2, clip=0.5)
    with offloaded(recipe, Paging(host_cache="least"), tmp_path) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        loss = models.loss_of(model, torch.zeros(1, 8, dtype=torch.long))
        loss.backward()
        with pytest.raises(InfinityError, match=r"save_pretrained\(\) .*between backward.*call it after step"):
            optimizer.save_pretrained(tmp_path / "out")
        optimizer.step()
        (tmp_path / "full" / "file").mkdir(parents=True)
        with pytest.raises(ConfigError, match="full is not empty"):
            optimizer.save_pretrained(tmp_path / "full")
        with pytest.raises(ConfigError, match=r"file_bytes = '1 lot'"):
            optimizer.save_pretrained(tmp_path / "out", file_bytes="1 lot")
        with pytest.raises(ConfigError, match="file_bytes 0 is"):
            optimizer.save_pretrained(tmp_path / "out", file_bytes=0)
        assert not (tmp_path / "out").exists()
        optimizer.save_pretrained(tmp_path / "out")


def save_with_exchange_failure(folder: str, failing: int) -> list[str]:
    """Save while one rank cannot allocate memory for the exchange of slices, and again without this failure.

    Runs on every rank. Return the type of the error and the names of the files.
    """
    original, root = LiveState.__init__, Path(folder)

    def without_memory(state: LiveState, *arguments: Any) -> None:
        original(state, *arguments)
        if dist.get_rank() == failing:
            state._wire = torch.device("mps")  # does not exist on Linux

    with offloaded(Recipe(model="toy"), Paging(host_cache="least"), root) as (_, optimizer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LiveState, "__init__", without_memory)
            try:
                optimizer.save_pretrained(root / "out")
                said = "no error"
            except Exception as error:
                said = f"rank {failing}" if f"failed on rank {failing}" in str(error) else type(error).__name__
        return [said, *sorted(path.name for path in optimizer.save_pretrained(root / "out"))]


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_exchange_of_slices_is_raised_on_both_ranks(failing: int, pair: RankPool, tmp_path: Path) -> None:
    """Neither rank waits for the other one in `send` or `recv`, and the next save succeeds."""
    found = pair.run(save_with_exchange_failure, str(tmp_path), failing)
    assert found[1 - failing] == [f"rank {failing}", "model.safetensors"]
    assert found[failing][0] not in ("no error", f"rank {failing}")
    assert found[failing][1:] == ["model.safetensors"]


def save_to_full_drive(folder: str) -> list[Any]:
    """Save to a full drive, then to one with free space, and continue training. Runs on every rank."""
    recipe, root, found = Recipe(model="toy", clip=0.5, steps=FULL), Path(folder), Outcome()
    said = ""
    with offloaded(recipe, Paging(host_cache="least"), root) as (model, optimizer):
        train(replace(recipe, steps=HALF), model, optimizer, found)
        original = os.fsync

        def no_space(descriptor: int) -> None:
            if "partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(28, "No space left on device")
            original(descriptor)

        os.fsync = no_space
        try:
            optimizer.save_pretrained(root / "out")
        except InfinityError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.fsync = original
        remains = any("out" in entry.name for entry in root.iterdir())
        dist.barrier()
        optimizer.save_pretrained(root / "out")
        train(recipe, model, optimizer, found, first=HALF)
        found.state = state_on_nvme(model, optimizer)
    return [said, remains, *differences(undisturbed(recipe), found)]


def test_full_drive_fails_the_save_on_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    """Partial files are removed, and training continues."""
    ours, theirs = pair.run(save_to_full_drive, str(tmp_path))
    assert ours[0].startswith("ConfigError")
    assert "No space left on device" in ours[0]
    assert theirs[0].startswith("InfinityError: save_pretrained failed on rank 0: ConfigError: ")
    assert ours[1:] == theirs[1:] == [False]


def save_with_failing_read(folder: str) -> str:
    """Save while reads fail on rank 1. Runs on every rank."""
    root, recipe = Path(folder), Recipe(model="toy", steps=HALF)
    fault = Fault(kind=FaultKind.EIO, op=Op.READ)
    with faulty(fault, on=False) as engines:
        try:
            with offloaded(recipe, Paging(host_cache="least"), root) as (model, optimizer):
                train(recipe, model, optimizer, Outcome())
                engines[-1].on = dist.get_rank() == 1
                optimizer.save_pretrained(root / "out")
        except InfinityError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_read_error_fails_the_save_on_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    """Rank 1 reports the file that it cannot read, and partial files are removed."""
    ours, theirs = pair.run(save_with_failing_read, str(tmp_path))
    assert theirs.startswith("StorageError: read of")
    assert "on rank 1" in ours or "rank 1 failed" in ours
    assert not any("out" in entry.name for entry in tmp_path.iterdir())


def test_common_save_calls_of_large_models_name_the_alternative(tmp_path: Path) -> None:
    """Calls that load the full model raise an error that names alternatives, unless the model is small."""
    recipe = Recipe(model="llama", steps=1)
    with offloaded(recipe, Paging(host_cache="least"), tmp_path) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        expected = {name: param.full_tensor().clone() for name, param in model.state_dict().items()}
        torch.save(model.state_dict(), tmp_path / "small.pt")
        shards = optimizer._reader._shards
        shards._load_limit = max(param.nbytes for param in model.parameters())
        ours = r"torch\.distributed\.checkpoint\.save \(dcp\.save\), optimizer\.save_pretrained"
        with pytest.raises(UnsupportedError, match=ours):
            torch.save(model.state_dict(), tmp_path / "large.pt")
        with pytest.raises(UnsupportedError, match=ours):
            model.save_pretrained(tmp_path / "transformers")
        with pytest.raises(UnsupportedError, match=ours):
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "async")
    loaded = torch.load(tmp_path / "small.pt", weights_only=False)
    assert all(torch.equal(loaded[key].full_tensor(), value) for key, value in expected.items())
