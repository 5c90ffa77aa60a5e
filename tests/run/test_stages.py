"""A start of a run that fails, at any of its stages, leaves nothing open and nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import InfinityError
from infinity.memory.host_cache import HostCache
from infinity.store.folder import holders
from support import models
from support.ranks import RankPool
from support.train import MIB, Paging, Recipe, batch, build, make_optimizer, settings

RECIPE = Recipe(model="toy")
STAGES = (
    "run_directory.make_paths",
    "run_directory.FolderLock.acquire",
    "run_directory._agree_on_stripe_weights",
    "run.Peers",
    "space_reservation.reserve",
    "run.HostCache",
    "run.open_engine",
    "run._stats_file",
    "run.Ledger",
    "run.PageStore",
    "run.Pager",
    "run.UpdateWorker",
    "run.StepPlanner",
    "initial_state.ModuleInitializer",
    "offload.BaseOptimizer",
    "offload.StepRunner",
    "offload.ShardIO",
    "checkpointing.CheckpointSpace",
    "checkpointing.CheckpointWriter.reserve",
    "initial_state.OwnValues.check",
    "initial_state.OwnValues.values",
    "offload.ShardIO.initialize",
    "initial_state.keep_companions",
    "initial_state.OwnValues.restore",
    "offload.Attachment",
    "offload.Attachment._attach",
    "offload.Checkpointer",
    "offload.StateReader",
    "offload.PagedOptimizer.__init__",
    "offload.open_runs.add",
)


class PlantedError(InfinityError):
    """What a stage fails with."""


def left_open(before: set[str], folder: Path, model: nn.Module, host_caches: list[weakref.ref[HostCache]]) -> list[str]:
    """Return what a start has left open."""
    gc.collect()
    found = [f"thread {name}" for name in {thread.name for thread in threading.enumerate()} - before]
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in _descriptors()]
    found += [f"file {name}" for name in opened if str(folder) in name]
    found += [f"lock {holder}" for holder in holders(folder / "nvme0")] if (folder / "nvme0").exists() else []
    dist.barrier()
    found += [f"folder {file}" for file in (folder / "nvme0").glob("**/*")]
    found += [f"page {file}" for file in (folder / "runtime").glob("**/*.stats")]
    found += [f"hook of {name}" for name, module in model.named_modules() if ours(module._forward_pre_hooks.values())]
    hooks = {name: param._post_accumulate_grad_hooks or {} for name, param in model.named_parameters()}
    found += [f"hook of {name}" for name, of_param in hooks.items() if ours(of_param.values())]
    return found + ["host_cache" for host_cache in host_caches if host_cache() is not None]


def ours(hooks: Any) -> bool:
    """Whether some hooks are of this package."""
    return any(getattr(hook, "__module__", "").startswith("infinity.") for hook in hooks)


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            yield number


def start(stage: str, folder: str) -> list[str]:
    """Let a stage fail on the last rank, then offload anew; return what is left open, and what else is wrong."""
    module, _, name = stage.partition(".")
    model = build(RECIPE)  # makes a process group where there is none
    where = Path(folder)
    optimizer = make_optimizer(RECIPE, model)
    config = settings(where, Paging(), 64 * MIB)
    before = {thread.name for thread in threading.enumerate()}
    host_caches: list[weakref.ref[HostCache]] = []
    made = HostCache.__init__

    def note(self: HostCache, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        host_caches.append(weakref.ref(self))

    def fail(*_: Any, **__: Any) -> None:
        raise PlantedError(f"{stage} fails")

    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCache, "__init__", note)
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(f"infinity.run.{module}.{name}", fail)
        try:
            infinity.offload(model, optimizer, config)
            wrong.append("it has started")
        except InfinityError as error:
            if f"{stage} fails" not in str(error):
                wrong.append(f"it says {error}")
    wrong += left_open(before, where, model, host_caches)
    dist.barrier()
    model = build(RECIPE)
    with infinity.offload(model, make_optimizer(RECIPE, model), config) as paged:
        models.loss_of(model, batch(model, 0)).backward()
        paged.step()
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """Threads, files, locks, memory, hooks; another start works at once."""
    assert start(stage, str(tmp_path)) == []


@pytest.mark.parametrize(
    "stage",
    ["run_directory.FolderLock.acquire", "run.HostCache", "initial_state.OwnValues.values", "offload.Attachment"],
)
def test_a_stage_that_fails_on_one_rank_leaves_nothing_on_any(stage: str, pair: RankPool, tmp_path: Path) -> None:
    """The other rank says why, and waits for nobody."""
    assert pair.run(start, stage, str(tmp_path)) == [[], []]
