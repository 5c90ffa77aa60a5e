"""Ranks with separate folders and host names, as on nodes with private drives, in the processes of a `RankPool`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity_tools.export import _export_together
from support.resharding import unequal_names
from support.train import PAGE, Outcome, Paging, Recipe, offloaded, state_on_nvme, train

RECIPE = Recipe(model="toy", steps=2)


@contextmanager
def node(folder: str, *, meshes: str = "", swapped: bool = False) -> Iterator[Path]:
    """Act as a node of its own: yield its folder, and return its name as host name.

    Args:
        folder: Folder of all nodes.
        meshes: ``hsdp`` for one replica per rank, ``local`` for one replica per rank that FSDP2 does not synchronize,
            ``permuted`` for replicas of ranks 0, 3 and 2, 1 that FSDP2 does not synchronize.
        swapped: Whether ranks run on the nodes in reverse order.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    name = f"node{size - 1 - rank if swapped else rank}"
    place = Path(folder) / name
    place.mkdir(exist_ok=True)
    with patch.object(socket, "gethostname", lambda: name):
        if not meshes:
            yield place
            return
        names = ("replicate", "shard")
        if meshes == "permuted":
            mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [2, 1]]), mesh_dim_names=names)
        else:
            mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=names)
        chosen: DeviceMesh = mesh if meshes == "hsdp" else mesh["shard"]
        with patch.object(infinity, "mesh", lambda *_: chosen):
            yield place


State = dict[str, dict[str, torch.Tensor]]


def save(
    folder: str, meshes: str = "", steps: tuple[int, ...] = (2,), *, other_pages: bool = False, **run: Any
) -> State:
    """Train and save a checkpoint after each of `steps`; return this rank's state. Called on every rank."""
    page = 2 * PAGE if other_pages and dist.get_rank() else PAGE
    with (
        node(folder, meshes=meshes) as place,
        offloaded(RECIPE, Paging(host_cache="least", page=page), place, run=run) as (model, optimizer),
    ):
        for step in steps:
            train(replace(RECIPE, steps=step), model, optimizer, Outcome(), first=optimizer.steps)
            optimizer.save_checkpoint()
        return state_on_nvme(model, optimizer)


def resume(folder: str, meshes: str = "", *, swapped: bool = False, **run: Any) -> tuple[int, State]:
    """Resume; return the step and this rank's state. Called on every rank."""
    settings = {"resume": "latest", **run}
    with (
        node(folder, meshes=meshes, swapped=swapped) as place,
        offloaded(RECIPE, Paging(host_cache="least"), place, run=settings) as (model, optimizer),
    ):
        return optimizer.steps, state_on_nvme(model, optimizer)


def export(folder: str) -> list[int]:
    """Export from all nodes, and return the steps that this rank has read. Called on every rank."""
    found = []

    def write(reader: CheckpointReader) -> None:
        reader.read(0)
        found.append(reader.step)

    with node(folder) as place, patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT):
        _export_together([place / "nvme0"], "", -1, -1, write)
    return found


def flat(state: State) -> dict[str, torch.Tensor]:
    """Return a rank's state by name and kind."""
    return {f"{name}/{kind}": value for name, kinds in state.items() for kind, value in kinds.items()}


def different(one: State, other: State) -> list[str]:
    """Return the names of the tensors of two ranks' states that differ."""
    return unequal_names(flat(one), flat(other))
