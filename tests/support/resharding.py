"""Runs that resume from a checkpoint with a different page layout, and comparison of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.reader import CheckpointReader
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs
from support.train import Outcome, Paging, Recipe, offloaded, train

LATEST = {"resume": "latest"}


def train_and_save(recipe: Recipe, folder: str) -> None:
    """Train a recipe and save a checkpoint. Called on every rank."""
    with offloaded(recipe, Paging(host_cache="least"), Path(folder)) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        optimizer.save_checkpoint({"note": "mine"})


def resume_and_train(recipe: Recipe, folder: str, steps: int, state_format: str = "fp32") -> tuple[int, Any]:
    """Resume, train more steps, save a checkpoint; return the resumed step and its `extra`. Called on every rank."""
    paging = Paging(host_cache="least", format=state_format)
    with offloaded(recipe, paging, Path(folder), run=LATEST) as (model, optimizer):
        first, extra = optimizer.steps, optimizer.resumed_extra
        if steps:
            train(replace(recipe, steps=first + steps), model, optimizer, Outcome(), first=first)
            optimizer.save_checkpoint()
        return first, extra


def newest_checkpoint(folder: Path) -> CheckpointReader:
    """Return a reader of the newest checkpoint of the newest run."""
    path = folder / "nvme0"
    run_id = look_for_runs([path])[0][-1].run_id
    return CheckpointReader(RunFolder(run_id, (path / run_id,)))


def all_tensors(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """Return all full parameters, states and scalars of a checkpoint by name."""
    found: dict[str, torch.Tensor] = {}
    for index, spec in enumerate(reader.tensors):
        found[spec.names[0]] = reader.read(index)
        for kind, _ in reader.kinds(index):
            found[f"{spec.names[0]}/{kind}"] = reader.read(index, kind)
    for rank in range(reader.world_size):
        for shard, scalars in reader.manifest(rank).scalars.items():
            for key, value in scalars.items():
                found[f"{reader.tensors[shard].names[0]}/{key}"] = torch.as_tensor(value)
    return found


def unequal_names(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise equal."""
    return [name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name))]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
