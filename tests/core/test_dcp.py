"""Commits out to `torch.distributed.checkpoint`, plain FSDP2 runs in; every bit goes on as if nothing had happened."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import core_models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from core_ranks import RankPool
from core_train import (
    MIB,
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
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import infinity
from infinity.checkpoint.dcp import DcpExport
from infinity.checkpoint.reader import CommitReader
from infinity.config import load_config
from infinity.errors import CommitError, ConfigError, CorruptPageError, InfinityError
from infinity.store.folder import RunFolder, find_runs

HALF, WHOLE = 2, 4
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
}
AT_TWO = ("adamw-groups", "uneven", "momentum")


def steps(recipe: Recipe, number: int) -> Recipe:
    """Return a recipe that ends after a number of steps."""
    return Recipe(**{**recipe.__dict__, "steps": number})


def rate(optimizer: torch.optim.Optimizer, first: int) -> Any:
    """Return a schedule that is at some step already."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step), last_epoch=first - 1)


def go_on(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
    """Take the second half of the steps."""
    scheduler = rate(optimizer, HALF) if recipe.groups else None
    if scheduler is not None:  # it has just taken the rate a step on
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + HALF)
    train(steps(recipe, WHOLE), model, optimizer, outcome, first=HALF, scheduler=scheduler)


def undisturbed(recipe: Recipe) -> Outcome:
    """Train in memory, both halves; return the second."""
    model, optimizer = plain(recipe)
    train(steps(recipe, HALF), model, optimizer, Outcome())
    outcome = Outcome()
    go_on(recipe, model, optimizer, outcome)
    outcome.state = state_in_memory(model, optimizer)
    return outcome


def plain(recipe: Recipe, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, without infinity."""
    model = core_models.build(recipe.model, policy=recipe.policy, **options)
    optimizer = make_optimizer(recipe, model)
    if recipe.groups:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return model, optimizer


def save_plain(recipe: Recipe, folder: str) -> None:
    """Train the first half in memory and save as a user does. Runs on every rank."""
    model, optimizer = plain(recipe)
    train(steps(recipe, HALF), model, optimizer, Outcome())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def load_plain(recipe: Recipe, folder: str) -> list[str]:
    """Load as a user does, into other values, and go on; return what differs. Runs on every rank."""
    model, optimizer = plain(recipe, seed=99)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optim": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    found = Outcome()
    go_on(recipe, model, optimizer, found)
    found.state = state_in_memory(model, optimizer)
    return differences(undisturbed(recipe), found)


def commit_paged(recipe: Recipe, folder: str) -> None:
    """Train the first half with everything on NVMe, and commit. Runs on every rank."""
    with offloaded(recipe, Paging(arena="least"), Path(folder)) as (model, optimizer):
        train(steps(recipe, HALF), model, optimizer, Outcome())
        optimizer.commit({"note": "mine"})


def load_paged(recipe: Recipe, weights: str, folder: str) -> list[str]:
    """Begin a run with a folder and go on; return what differs. Runs on every rank."""
    model, optimizer = plain(recipe, meta=True, seed=99)
    tree = settings(Path(folder), Paging(), 4 * MIB)
    found = Outcome()
    with infinity.offload(model, optimizer, tree, weights=weights) as paged:
        go_on(recipe, model, paged, found)
        found.state = state_on_nvme(model, paged)
    return differences(undisturbed(recipe), found)


def newest(folder: Path) -> CommitReader:
    """Return the newest commit of the newest run."""
    path = folder / "nvme0"
    run_id = find_runs([path])[-1]
    return CommitReader(RunFolder(run_id, (path / run_id,)))


def keys_of(folder: Path) -> set[str]:
    """Return the keys of a checkpoint."""
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_plain_fsdp2_goes_on_from_a_commit(name: str, tmp_path: Path) -> None:
    """The keys are those of a plain run; losses, weights and moments those of a run that nobody disturbed."""
    recipe = RECIPES[name]
    commit_paged(recipe, str(tmp_path))
    out, seen = tmp_path / "dcp", []
    export = DcpExport(newest(tmp_path))
    export.write(out, file_bytes=64 << 10, advance=seen.append)
    assert sum(seen) == export.nbytes
    assert len(list(out.glob("*.distcp"))) > 3
    save_plain(recipe, str(tmp_path / "plain"))
    assert keys_of(out) == keys_of(tmp_path / "plain") | {"infinity.step", "infinity.extra"}
    assert load_plain(recipe, str(out)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_plain_run_goes_on_paged(name: str, tmp_path: Path) -> None:
    """From a model on the meta device, whose values come from the folder alone."""
    save_plain(RECIPES[name], str(tmp_path / "plain"))
    assert load_paged(RECIPES[name], str(tmp_path / "plain"), str(tmp_path)) == []
