"""Tests of conversion to and from `torch.distributed.checkpoint`: training continues bit for bit in both directions."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError, CorruptPageError, InfinityError
from infinity.formats.dcp import dcp_bytes, export_dcp
from infinity.sources.dcp import DcpFolder
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs
from support import models
from support.ranks import RankPool
from support.tables import all_but
from support.train import (
    MIB,
    Halving,
    Outcome,
    Paging,
    Recipe,
    differences,
    make_optimizer,
    offloaded,
    settings,
    state_in_memory,
    state_on_nvme,
    train,
)

HALF, ALL = 2, 4
HOST = 4 * MIB
RECIPES = {
    "adamw": Recipe(model="llama", optimizer="adamw", clip=0.5),
    "adamw-groups": Recipe(model="toy", optimizer="adamw", groups=True),
    "tied": Recipe(model="tied", policy="fp32"),
    "uneven": Recipe(model="gpt2"),
    "frozen": Recipe(model="frozen"),
    "pure-bf16": Recipe(model="toy", policy="pure_bf16"),
    "momentum": Recipe(model="toy", optimizer="sgd_dampened", groups=True),
    "sgd": Recipe(model="toy", optimizer="sgd"),
    "amsgrad": Recipe(model="toy", optimizer="adam_amsgrad"),
    "nadam": Recipe(model="toy", optimizer="nadam"),
    "tensor-rate": Recipe(model="toy", optimizer="adamw_tensor"),
    "buffered": Recipe(model="buffered"),
}
FURTHER = ("uneven", "pure-bf16", "sgd", "amsgrad", "nadam")


def steps(recipe: Recipe, number: int) -> Recipe:
    """Return a recipe with a different number of steps."""
    return Recipe(**{**recipe.__dict__, "steps": number})


def begin(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train the first half of the steps."""
    train(steps(recipe, HALF), model, optimizer, Outcome(), scheduler=Halving(optimizer))


def continue_training(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    """Train the second half of the steps."""
    outcome = Outcome()
    train(steps(recipe, ALL), model, optimizer, outcome, first=HALF, scheduler=Halving(optimizer))
    paged = isinstance(optimizer, infinity.PagedOptimizer)
    outcome.state = state_on_nvme(model, optimizer) if paged else state_in_memory(model, optimizer)
    return outcome


def uninterrupted(recipe: Recipe) -> Outcome:
    """Train both halves in memory and return the outcome of the second half."""
    model, optimizer = plain(recipe)
    begin(recipe, model, optimizer)
    return continue_training(recipe, model, optimizer)


def plain(recipe: Recipe, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, both without infinity."""
    model = models.build(recipe.model, policy=recipe.policy, **options)
    return model, make_optimizer(recipe, model)


def save_plain(recipe: Recipe, folder: str) -> None:
    """Train the first half in memory and save it with `dcp.save`. Runs on every rank."""
    model, optimizer = plain(recipe)
    begin(recipe, model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def load_plain(recipe: Recipe, folder: str) -> Outcome:
    """Load a checkpoint with `dcp.load` into a model with different values and continue. Runs on every rank."""
    model, optimizer = plain(recipe, seed=99)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optim": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    return continue_training(recipe, model, optimizer)


def checkpoint_paged(recipe: Recipe, folder: str) -> None:
    """Train the first half on NVMe and checkpoint. Runs on every rank."""
    with offloaded(recipe, Paging(host_cache="least"), Path(folder)) as (model, optimizer):
        begin(recipe, model, optimizer)
        optimizer.save_checkpoint()


def load_paged(recipe: Recipe, weights: str, folder: str) -> Outcome:
    """Start a run from a checkpoint folder and continue. Runs on every rank."""
    model, optimizer = plain(recipe, meta=True, seed=99)
    with infinity.offload(model, optimizer, settings(Path(folder), Paging(), HOST), weights=weights) as paged:
        return continue_training(recipe, model, paged)


def continue_all_ways(recipe: Recipe, ours: str, theirs: str, folder: str) -> list[str]:
    """Continue from both folders, in memory and on NVMe; return the differences. Runs on every rank."""
    expected = load_plain(recipe, theirs)
    found = [load_plain(recipe, ours), load_paged(recipe, ours, folder), load_paged(recipe, theirs, folder)]
    return [difference for outcome in found for difference in differences(expected, outcome)]


def export(folder: Path, out: Path) -> Path:
    """Export the newest checkpoint."""
    export_dcp(newest(folder), out)
    return out


def newest(folder: Path) -> CheckpointReader:
    """Return the newest checkpoint of the newest run."""
    path = folder / "nvme0"
    run_id = look_for_runs([path])[0][-1].run_id
    return CheckpointReader(RunFolder(run_id, (path / run_id,)))


def keys_of(folder: Path) -> set[str]:
    """Return the keys of a checkpoint."""
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", all_but(RECIPES, *FURTHER, "adamw-groups", "tied", "tensor-rate", "buffered"))
def test_plain_fsdp2_continues_from_an_export(name: str, tmp_path: Path) -> None:
    """The keys match `dcp.save` of a plain run; losses, weights and moments match an uninterrupted run."""
    recipe = RECIPES[name]
    checkpoint_paged(recipe, str(tmp_path))
    out = tmp_path / "dcp"
    seen: list[int] = []
    written = export_dcp(newest(tmp_path), out, advance=seen.append)
    assert sum(file.stat().st_size for file in written) > sum(seen) == dcp_bytes(newest(tmp_path))
    save_plain(recipe, str(tmp_path / "plain"))
    assert keys_of(out) == keys_of(tmp_path / "plain")
    assert differences(uninterrupted(recipe), load_plain(recipe, str(out))) == []


@pytest.mark.parametrize("name", all_but(RECIPES, *FURTHER, "adamw", "frozen", "momentum"))
def test_plain_run_continues_on_nvme(name: str, tmp_path: Path) -> None:
    """All values of the meta model come from the folder."""
    save_plain(RECIPES[name], str(tmp_path / "plain"))
    found = load_paged(RECIPES[name], str(tmp_path / "plain"), str(tmp_path))
    assert differences(uninterrupted(RECIPES[name]), found) == []


@pytest.mark.parametrize("name", all_but(["adamw-groups", "uneven", "momentum"], "uneven", "momentum"))
def test_checkpoint_of_two_ranks_loads_on_one_and_two(name: str, pair: RankPool, tmp_path: Path) -> None:
    recipe, theirs = RECIPES[name], str(tmp_path / "plain")
    pair.run(checkpoint_paged, recipe, str(tmp_path))
    ours = str(export(tmp_path, tmp_path / "dcp"))
    pair.run(save_plain, recipe, theirs)
    assert pair.run(continue_all_ways, recipe, ours, theirs, str(tmp_path)) == [[], []]
    assert continue_all_ways(recipe, ours, theirs, str(tmp_path)) == []


@pytest.mark.parametrize("name", all_but(["adamw-groups", "uneven", "momentum"], "uneven", "momentum"))
def test_checkpoint_of_one_rank_loads_on_two(name: str, pair: RankPool, tmp_path: Path) -> None:
    recipe, theirs = RECIPES[name], str(tmp_path / "plain")
    checkpoint_paged(recipe, str(tmp_path))
    ours = str(export(tmp_path, tmp_path / "dcp"))
    save_plain(recipe, theirs)
    assert pair.run(continue_all_ways, recipe, ours, theirs, str(tmp_path)) == [[], []]


def test_parameters_without_saved_state_keep_the_initial_one(tmp_path: Path) -> None:
    """A plain run has no state for parameters that were never updated."""
    recipe = Recipe(model="spare")
    save_plain(recipe, str(tmp_path / "plain"))
    assert not any("state.blocks.0.unused" in key for key in keys_of(tmp_path / "plain"))
    assert differences(uninterrupted(recipe), load_paged(recipe, str(tmp_path / "plain"), str(tmp_path))) == []


@pytest.mark.parametrize(("name", "steps"), [("adamw", HALF), ("sgd", 0)])
def test_steps_continue_from_the_step_counts_of_parameters(
    name: str, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The restored steps are not reported as discarded."""
    recipe = Recipe(model="toy", optimizer=name)
    save_plain(recipe, str(tmp_path / "plain"))
    model, optimizer = plain(recipe, meta=True)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST), weights=tmp_path / "plain") as paged:
        assert paged.steps == steps
    assert "discarded" not in caplog.text
    assert look_for_runs([tmp_path / "nvme0"])[0] == []


@pytest.mark.parametrize("form", ["app", "other names", "weights alone"])
def test_alternative_checkpoint_layouts_load(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Covers nesting as in the PyTorch tutorial, other key names, and weights alone, which log a warning."""
    recipe = RECIPES["adamw-groups"]
    model, optimizer = plain(recipe)
    begin(recipe, model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    forms: dict[str, dict[str, Any]] = {
        "app": {"app": {"model": weights, "optim": state}, "data": {"position": torch.tensor(3)}},
        "other names": {"net": weights, "optimizer": state},
        "weights alone": weights,
    }
    dcp.save(forms[form], checkpoint_id=tmp_path / "plain")
    if form != "weights alone":
        found = load_paged(recipe, str(tmp_path / "plain"), str(tmp_path))
        assert differences(uninterrupted(recipe), found) == []
        return
    expected = {name: value["master"] for name, value in state_in_memory(model, optimizer).items()}
    model, optimizer = plain(recipe, meta=True)
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), HOST), weights=tmp_path / "plain") as paged:
        assert paged.steps == 0
        for name, states in state_on_nvme(model, paged).items():
            assert torch.equal(states.pop("master"), expected[name])
            assert not any(value.any() for value in states.values())
    assert "has no optimizer state" in caplog.text


def rejection(folder: Path, weights: Path, recipe: Recipe) -> str:
    """Start a run from a folder, check that this fails without creating files, and return the error."""
    model, optimizer = plain(recipe, meta=True)
    with pytest.raises(InfinityError) as caught:
        infinity.offload(model, optimizer, settings(folder, Paging(), HOST), weights=weights)
    dist.barrier()
    assert list((folder / "nvme0").iterdir()) == []
    return f"{type(caught.value).__name__}: {caught.value}"


REJECTED = {
    "a different optimizer": ({"optimizer": "sgd_nesterov"}, "param group 0 in .* has no setting dampening"),
    "different settings": (
        {"optimizer": "adam_amsgrad"},
        "optim.state.embedding.weight in .* has exp_avg, exp_avg_sq, step, but this optimizer needs exp_avg, "
        "exp_avg_sq, max_exp_avg_sq, step. Create the optimizer that was saved",
    ),
    "different groups": ({"groups": False}, "no param group in .* has the parameters of param group 0"),
    "a different dtype": (
        {"policy": "pure_bf16"},
        "optim.state.embedding.weight.exp_avg in .* is torch.float32 of shape .* this run needs torch.bfloat16",
    ),
    "a different model": ({"model": "llama"}, "has no tensor model.model.embed_tokens.weight. Save the result of"),
    "additional parameters": ({"model": "spare"}, "has no tensor model.blocks.0.unused. Save the result of"),
    "fewer layers": (
        {"model": "shallow"},
        r"has tensors that the model does not have: model.blocks.1.\S*, model.blocks.1.\S*, model.blocks.1.\S* and "
        r"\d more. Build the model that was saved",
    ),
    "a different shape": (
        {"model": "wide"}, r"model.head.weight in .* of shape \(131, 67\), but this run needs .* of shape \(200, 67\)"
    ),
    "a buffer": ({"model": "buffered"}, "has no tensor model.seen. Save the result of"),
}  # fmt: skip


def test_mismatching_checkpoint_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the difference and a remedy, and nothing is written to NVMe."""
    monkeypatch.setitem(models.MODELS, "wide", wide)
    monkeypatch.setitem(models.MODELS, "shallow", shallow)
    recipe = Recipe(model="toy", optimizer="adamw", groups=True)
    save_plain(recipe, str(tmp_path / "plain"))
    for difference, (changes, message) in REJECTED.items():
        found = rejection(tmp_path, tmp_path / "plain", Recipe(**{**recipe.__dict__, **changes}))
        assert re.search(f"^ConfigError: .*{message}", found), difference


def wide() -> nn.Module:
    """Return a model with a larger head."""
    model = models.Toy()
    model.head = nn.Linear(models.WIDTH, 200)
    return model


def shallow() -> nn.Module:
    """Return a model with only the first block."""
    model = models.Toy()
    model.blocks = model.blocks[:1]
    return model


def test_malformed_checkpoint_folder_raises(tmp_path: Path) -> None:
    """Covers a flattened state, two models, truncated files and damaged metadata."""
    recipe = Recipe(model="toy")
    model, optimizer = plain(recipe)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    begin(recipe, model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "flat")
    assert "Save it without flatten_optimizer_state_dict" in rejection(tmp_path, tmp_path / "flat", recipe)
    dcp.save({"model": weights, "average": weights}, checkpoint_id=tmp_path / "two")
    assert "has several models (average, model). Save only one" in rejection(tmp_path, tmp_path / "two", recipe)

    save_plain(recipe, str(tmp_path / "plain"))
    for file in (tmp_path / "plain").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    assert re.search(r"CheckpointError: .* cannot be read: ", rejection(tmp_path, tmp_path / "plain", recipe))
    for damaged in (b"", b"no pickle", pickle.dumps({"a": 1})):
        (tmp_path / "plain" / ".metadata").write_bytes(damaged)
        assert ".metadata cannot be read" in rejection(tmp_path, tmp_path / "plain", recipe)


@pytest.mark.parametrize("place", [0, 1 << 20])
def test_overlapping_or_stray_chunks_raise(place: int, tmp_path: Path) -> None:
    """Overlapping chunks would leave other elements uninitialized."""
    recipe = Recipe(model="toy")
    save_plain(recipe, str(tmp_path / "plain"))
    file = tmp_path / "plain" / ".metadata"
    found = pickle.loads(file.read_bytes())
    (chunk,) = found.state_dict_metadata["model.head.weight"].chunks
    half = torch.Size([chunk.sizes[0] // 2, *chunk.sizes[1:]])
    chunks = [ChunkStorageMetadata(torch.Size([first, 0]), half) for first in (0, place)]
    found.state_dict_metadata["model.head.weight"].chunks = chunks
    file.write_bytes(pickle.dumps(found))
    message = rejection(tmp_path, tmp_path / "plain", recipe)
    assert re.search(
        r"\.metadata cannot be read: .*(two chunks of a tensor overlap|a chunk exceeds its tensor)", message
    )


@pytest.mark.parametrize(
    ("key", "stage"),
    [("model.head.weight", "writing .* values"), ("optim.state.head.weight.exp_avg", "loading the optimizer state")],
)
def test_damage_seen_by_one_rank_fails_all_ranks(key: str, stage: str, pair: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model="toy")
    pair.run(save_plain, recipe, str(tmp_path / "plain"))
    places = FileSystemReader(tmp_path / "plain").read_metadata().storage_data
    (place,) = (places[index] for index in places if index.fqn == key and index.offset[0] > 0)
    with (tmp_path / "plain" / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    first, second = pair.run(rejection, tmp_path, tmp_path / "plain", recipe)
    assert re.match(f"InfinityError: {stage} failed on rank 1: CheckpointError: .* cannot be read", first)
    assert re.match(r"CheckpointError: (model.head.weight|optimizer state) in .* cannot be read", second)


class Executed:
    """Object that changes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def test_settings_are_loaded_without_executing_code(tmp_path: Path) -> None:
    recipe = Recipe(model="toy")
    model, optimizer = plain(recipe)
    weights, state = get_state_dict(model, optimizer)
    state["param_groups"][0]["betas"] = Executed(tmp_path / "executed")
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "plain")
    assert "CheckpointError: param groups in" in rejection(tmp_path, tmp_path / "plain", recipe)
    assert not (tmp_path / "executed").exists()


def test_failed_export_cannot_be_loaded(tmp_path: Path) -> None:
    """Covers a folder that is not empty, and a damaged page."""
    checkpoint_paged(Recipe(model="toy"), str(tmp_path))
    reader = newest(tmp_path)
    with pytest.raises(ConfigError, match="not empty"):
        export(tmp_path, tmp_path)
    file = reader.folder.data_file(0, 0)
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(CorruptPageError, match="update"):
        export(tmp_path, tmp_path / "out")
    assert not DcpFolder.is_at(tmp_path / "out")
