"""Tests of `torch.distributed.checkpoint` on offloaded models: the same calls as in memory, one tensor at a time."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.shard_io import ShardIO
from support import models
from support.ranks import RankPool
from support.tables import all_but
from support.train import (
    MIB,
    Halving,
    Outcome,
    Paging,
    Recipe,
    batch,
    differences,
    make_optimizer,
    settings,
    state_in_memory,
    state_on_nvme,
    step,
    train,
)

HALF, ALL = 1, 2
RECIPES = {
    "adamw": Recipe(model="llama", optimizer="adamw", clip=0.5),
    "adamw-groups": Recipe(model="toy", optimizer="adamw", groups=True),
    "tied": Recipe(model="tied", policy="fp32"),
    "uneven": Recipe(model="gpt2"),
    "frozen": Recipe(model="frozen"),
    "pure-bf16": Recipe(model="toy", policy="pure_bf16"),
    "momentum": Recipe(model="toy", optimizer="sgd_dampened"),
    "amsgrad": Recipe(model="toy", optimizer="adam_amsgrad"),
    "nadam": Recipe(model="toy", optimizer="nadam"),
    "adagrad": Recipe(model="toy", optimizer="adagrad"),
    "tensor-rate": Recipe(model="toy", optimizer="adamw_tensor"),
    "buffered": Recipe(model="buffered"),
}
WIDE = ("nadam", "pure-bf16", "amsgrad", "tied", "frozen", "tensor-rate", "uneven", "adagrad", "adamw-groups")


@contextmanager
def in_memory(recipe: Recipe, seed: int, _: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Yield a sharded model and its optimizer, both without infinity."""
    model = models.build(recipe.model, policy=recipe.policy, seed=seed)
    yield model, make_optimizer(recipe, model)


@contextmanager
def on_nvme(recipe: Recipe, seed: int, folder: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Yield an offloaded model and its optimizer."""
    with in_memory(recipe, seed, folder) as (model, optimizer):
        config = settings(folder, Paging(update_schedule="in_forward"), 4 * MIB)
        with infinity.offload(model, optimizer, config) as paged:
            yield model, paged


def backward(model: nn.Module, number: int = 0) -> None:
    """Run forward and backward with new data."""
    models.loss_of(model, batch(model, number)).backward()


SETUPS: dict[str, Callable[..., Any]] = {"memory": in_memory, "nvme": on_nvme}


def trained(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int = 0, last: int = ALL
) -> Outcome:
    """Train some of the steps, and return the losses and the state after them."""
    outcome = Outcome()
    train(replace(recipe, steps=last), model, optimizer, outcome, first=first, scheduler=Halving(optimizer))
    if hasattr(optimizer, "read_state"):
        outcome.state = state_on_nvme(model, optimizer)
    else:
        outcome.state = state_in_memory(model, optimizer)
    return outcome


def save(recipe: Recipe, setup: str, folder: str) -> Outcome:
    """Train the first half, save it, and return the outcome of the second half. Runs on every rank."""
    with SETUPS[setup](recipe, 0, Path(folder)) as (model, optimizer):
        trained(recipe, model, optimizer, last=HALF)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/saved")
        return trained(recipe, model, optimizer, first=HALF)


def load(recipe: Recipe, setup: str, folder: str) -> Outcome:
    """Load into a model with different values, and train the second half. Runs on every rank."""
    with SETUPS[setup](recipe, 99, Path(folder)) as (model, optimizer):
        weights, state = get_state_dict(model, optimizer)
        assert getattr(optimizer, "steps", 0) == 0
        loaded = {"model": weights, "optim": state}
        dcp.load(loaded, checkpoint_id=f"{folder}/saved")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        return trained(recipe, model, optimizer, first=HALF)


def round_trips(recipe: Recipe, folder: str) -> list[str]:
    """Save in memory and on NVMe, load each on NVMe and the latter in memory, and return the differences.

    Runs on every rank.
    """
    listed = []
    for saving, setups in (("memory", ("nvme",)), ("nvme", ("nvme", "memory"))):
        expected = save(recipe, saving, f"{folder}/{saving}")
        for loading in setups:
            found = load(recipe, loading, f"{folder}/{saving}")
            listed += [f"{saving} to {loading}: {each}" for each in differences(expected, found)]
    return listed


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def folders(place: Path) -> str:
    """Create a folder for each setup that saves."""
    for setup in SETUPS:
        (place / setup).mkdir()
    return str(place)


@pytest.mark.parametrize("name", all_but(RECIPES, *WIDE))
def test_checkpoints_are_interchangeable_with_training_in_memory(name: str, tmp_path: Path) -> None:
    """Losses, weights and states of the second half match those of the run that was saved."""
    assert round_trips(RECIPES[name], folders(tmp_path)) == []


@pytest.mark.parametrize("name", all_but(["adamw-groups", "uneven", "momentum"], "momentum", "uneven"))
def test_checkpoints_are_interchangeable_on_two_ranks(name: str, pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(round_trips, RECIPES[name], folders(tmp_path)) == [[], []]


def test_checkpoint_of_one_rank_loads_on_two(pair: RankPool, tmp_path: Path) -> None:
    recipe = RECIPES["adamw-groups"]
    save(recipe, "nvme", str(tmp_path))
    in_memory, on_nvme = (pair.run(load, recipe, setup, str(tmp_path)) for setup in SETUPS)
    assert [differences(*each) for each in zip(in_memory, on_nvme, strict=True)] == [[], []]


def test_parameters_that_were_never_updated_can_be_loaded_in_memory(tmp_path: Path) -> None:
    """The state dict contains the initial state of each parameter, and saving does not change the training."""
    recipe = Recipe(model="spare")
    expected = save(recipe, "nvme", str(tmp_path))
    with in_memory(recipe, 0, tmp_path) as (model, optimizer):
        assert differences(trained(recipe, model, optimizer), expected) != []  # contains the first half as well
    outcomes = [load(recipe, setup, str(tmp_path)) for setup in SETUPS]
    for outcome in outcomes:
        assert outcome.losses == expected.losses
        assert torch.equal(outcome.state["blocks.0.unused"]["master"], expected.state["blocks.0.unused"]["master"])
        assert not outcome.state["blocks.0.unused"]["exp_avg"].any()
    assert differences(*outcomes) == []


@pytest.mark.parametrize("optimizer", all_but(["adamw", "adagrad", "nadam", "sgd_dampened"], "adamw", "nadam"))
def test_initial_states_are_those_of_the_first_update(optimizer: str, tmp_path: Path) -> None:
    """Loading the state of a new run into itself does not change the training.

    With dampening, the first update of a parameter differs from the others, so that only its own state dict, which
    leaves parameters without updates as they are, can be loaded.
    """
    recipe = Recipe(model="toy", optimizer=optimizer)
    outcomes = []
    for setup in SETUPS:
        with SETUPS[setup](recipe, 0, tmp_path) as (model, base):
            if setup == "nvme":
                state = base.state_dict()
                for states in state["state"].values() if optimizer != "sgd_dampened" else ():
                    for name, value in states.items():
                        if isinstance(value, torch.Tensor) and value.ndim:
                            states[name] = value.detach().clone()
                base.load_state_dict(state)
            outcomes.append(trained(recipe, model, base))
    assert differences(*outcomes) == []


def test_initial_state_is_not_affected_by_a_state_that_was_loaded(tmp_path: Path) -> None:
    recipe = Recipe(model="toy")
    (tmp_path / "new").mkdir()
    save(recipe, "nvme", str(tmp_path))
    with on_nvme(recipe, 99, tmp_path / "new") as (model, optimizer):
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "saved")
        assert optimizer.state_dict()["state"][0]["step"] == HALF
        empty = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        optimizer.load_state_dict(empty)
        assert optimizer.state_dict()["state"][0]["step"] == 0


def test_hooks_of_load_state_dict_run(tmp_path: Path) -> None:
    with on_nvme(Recipe(model="toy"), 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        called: list[str] = []
        optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
        optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert called == ["before", "after"]


# Memory and traffic #


class Reads:
    """Counts the sections that are read, and the bytes of sections that are in memory at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.alive = self.peak = 0
        original = ShardIO.read

        def read(shards: ShardIO, shard: int, name: str) -> torch.Tensor:
            found = original(shards, shard, name)
            self.count += 1
            self.alive += found.nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(found.untyped_storage(), self._freed, found.nbytes)
            return found

        monkeypatch.setattr(ShardIO, "read", read)

    def _freed(self, nbytes: int) -> None:
        self.alive -= nbytes


def test_saving_reads_each_tensor_once_within_one_tensor_per_thread(tmp_path: Path) -> None:
    recipe = Recipe(model="toy")
    with on_nvme(recipe, 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        for threads in (1, 2):
            with pytest.MonkeyPatch.context() as patch:
                reads = Reads(patch)
                writer = FileSystemWriter(tmp_path / f"saved{threads}", thread_count=threads)
                dcp.save({"model": weights, "optim": state}, storage_writer=writer)
            assert reads.count == 3 * len(weights)
            assert reads.peak <= threads * max(weight.nbytes for weight in weights.values())


def test_save_pretrained_needs_the_memory_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit does not depend on the model size, which exceeds the load limit."""
    with on_nvme(Recipe(model="llama"), 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        largest = max(param.nbytes for param in model.parameters())
        total = sum(param.nbytes for param in model.parameters())
        optimizer._reader._shards._load_limit = largest // 2
        reads = Reads(monkeypatch)
        optimizer.save_pretrained(tmp_path / "out", file_bytes=largest)
        assert largest <= reads.peak <= 3 * largest < total


def test_loading_in_place_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that were loaded in place are not copied to themselves."""
    recipe = Recipe(model="toy")
    (tmp_path / "new").mkdir()
    save(recipe, "nvme", str(tmp_path))
    with on_nvme(recipe, 99, tmp_path / "new") as (model, optimizer):
        reads = Reads(monkeypatch)
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optim": state}
        dcp.load(loaded, checkpoint_id=tmp_path / "saved")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        assert reads.count == 0


def test_torch_save_of_a_large_state_names_dcp(tmp_path: Path) -> None:
    """A state within the limit is saved."""
    with on_nvme(Recipe(model="toy"), 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        torch.save(optimizer.state_dict(), tmp_path / "small.pt")
        saved = torch.load(tmp_path / "small.pt", weights_only=False)
        kept = next(iter(optimizer.state.values()))["exp_avg"].full_tensor()
        assert torch.equal(saved["state"][0]["exp_avg"].full_tensor(), kept)
        optimizer._reader._shards._load_limit = 2 * max(param.nbytes for param in model.parameters())
        with pytest.raises(UnsupportedError, match=r"dcp\.save"):
            torch.save(optimizer.state_dict(), tmp_path / "large.pt")


def save_asynchronously(folder: str) -> None:
    """Save in the background, and take a step before the save has finished. Runs on every rank."""
    recipe = RECIPES["adamw-groups"]
    with on_nvme(recipe, 0, Path(folder)) as (model, optimizer):
        trained(recipe, model, optimizer, last=HALF)
        weights, state = get_state_dict(model, optimizer)
        stager = BlockingAsyncStager()
        saving = dcp.async_save(
            {"model": weights, "optim": state}, checkpoint_id=f"{folder}/saved", async_stager=stager
        )
        step(model, optimizer, 7)
        saving.result()


def test_async_save_saves_the_step_at_which_it_was_called(tmp_path: Path) -> None:
    recipe = RECIPES["adamw-groups"]
    (tmp_path / "expected").mkdir()
    save_asynchronously(str(tmp_path))
    expected = save(recipe, "memory", str(tmp_path / "expected"))
    assert differences(expected, load(recipe, "memory", str(tmp_path))) == []


def test_object_stores_can_be_used(tmp_path: Path) -> None:
    """Uses the writer and the reader for fsspec, here with its in-memory file system."""
    pytest.importorskip("fsspec")
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    recipe = Recipe(model="toy")
    with on_nvme(recipe, 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        expected = {name: weight.full_tensor() for name, weight in weights.items()}
        place = f"memory://{tmp_path.name}"
        dcp.save({"model": weights, "optim": state}, storage_writer=FsspecWriter(place))
        step(model, optimizer, 1)
        loaded = {"model": weights, "optim": state}
        dcp.load(loaded, storage_reader=FsspecReader(place))
        assert all(torch.equal(weights[name].full_tensor(), value) for name, value in expected.items())


# Errors #


def altered(state: dict[str, Any], change: str) -> dict[str, Any]:
    """Return a state dict that does not match its optimizer."""
    state = {
        "state": {key: dict(value) for key, value in state["state"].items()},
        "param_groups": state["param_groups"],
    }
    if change == "groups":
        state["param_groups"] = [*state["param_groups"], {"params": []}]
    elif change == "missing":
        del state["state"][2]["exp_avg"]
    elif change == "additional":
        state["state"][2]["momentum_buffer"] = state["state"][2]["exp_avg"]
    elif change == "shape":
        state["state"][2]["exp_avg"] = state["state"][0]["exp_avg"]
    elif change == "full":
        state["state"][2]["exp_avg"] = state["state"][2]["exp_avg"].full_tensor()
    return state


def test_mismatching_state_dict_changes_nothing(subtests: pytest.Subtests, tmp_path: Path) -> None:
    with on_nvme(Recipe(model="toy"), 0, tmp_path) as (model, optimizer):
        step(model, optimizer)
        before = state_on_nvme(model, optimizer)
        for change, message in (
            ("groups", "param groups"),
            ("missing", "exp_avg_sq, step for"),
            ("additional", "momentum_buffer, step for"),
            ("shape", r"exp_avg of .* must be sharded like"),
            ("full", "set_state_dict"),
        ):
            with subtests.test(change):
                with pytest.raises(ValueError, match=message):
                    optimizer.load_state_dict(altered(optimizer.state_dict(), change))
                after = state_on_nvme(model, optimizer)
                equal = (
                    torch.equal(after[name][kind], value) for name in before for kind, value in before[name].items()
                )
                assert all(equal)


def test_pending_gradients_raise(tmp_path: Path) -> None:
    with on_nvme(Recipe(model="toy"), 0, tmp_path) as (model, optimizer):
        state = optimizer.state_dict()
        backward(model)
        with pytest.raises(InfinityError, match=r"state_dict.. was called between backward and step"):
            optimizer.state_dict()
        with pytest.raises(InfinityError, match=r"load_state_dict.. was called between backward and step"):
            optimizer.load_state_dict(state)
