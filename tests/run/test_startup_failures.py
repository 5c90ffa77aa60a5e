"""Tests of startup failures: a failure at any stage releases all resources."""

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
    "offload.Peers",
    "run_directory.make_paths",
    "run_directory.FolderLock.acquire",
    "run_directory.run_ids",
    "run_directory.FolderLock.name",
    "offload.plan_memory",
    "run_directory._agree_on_stripe_weights",
    "run.FreedMemory",
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
    "offload.ShardIO.write_module",
    "initial_state.keep_companions",
    "initial_state.OwnValues.restore",
    "offload.Attachment",
    "offload.Attachment._attach",
    "offload.Checkpointer",
    "offload.StateReader",
    "offload.PagedOptimizer.__init__",
    "offload.open_runs.add",
)


class InjectedError(InfinityError):
    """Error that the failing stage raises."""


def leaked_resources(
    before: set[str], folder: Path, model: nn.Module, host_caches: list[weakref.ref[HostCache]]
) -> list[str]:
    """Return the resources that a failed startup has not released."""
    gc.collect()
    found = [f"thread {name}" for name in {thread.name for thread in threading.enumerate()} - before]
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in _descriptors()]
    found += [f"file {name}" for name in opened if str(folder) in name]
    found += [f"lock {holder}" for holder in holders(folder / "nvme0")] if (folder / "nvme0").exists() else []
    dist.barrier()
    found += [f"folder {file}" for file in (folder / "nvme0").glob("**/*")]
    found += [f"page {file}" for file in (folder / "runtime").glob("**/*.stats")]
    found += [
        f"hook of {name}" for name, module in model.named_modules() if has_own_hook(module._forward_pre_hooks.values())
    ]
    hooks = {name: param._post_accumulate_grad_hooks or {} for name, param in model.named_parameters()}
    found += [f"hook of {name}" for name, of_param in hooks.items() if has_own_hook(of_param.values())]
    return found + ["host_cache" for host_cache in host_caches if host_cache() is not None]


def has_own_hook(hooks: Any) -> bool:
    """Return whether any of the hooks belongs to this package."""
    return any(getattr(hook, "__module__", "").startswith("infinity.") for hook in hooks)


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            yield number


def fail_at(stages: tuple[str, ...], folder: str) -> list[str]:
    """Make each stage fail on the last rank, then start; return leaked resources and other deviations.

    Later stages are reached only if the folder and the locks are usable after each failure.
    """
    infinity.mesh("cpu")  # creates a process group if there is none yet
    where = Path(folder)
    config = settings(where, Paging(), 64 * MIB)
    before = {thread.name for thread in threading.enumerate()}
    host_caches: list[weakref.ref[HostCache]] = []
    made = HostCache.__init__

    def note(self: HostCache, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        host_caches.append(weakref.ref(self))

    wrong = []
    for stage in stages:
        module, _, name = stage.partition(".")
        model = build(RECIPE)

        def fail(*_: Any, stage: str = stage, **__: Any) -> None:
            raise InjectedError(f"{stage} fails")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostCache, "__init__", note)
            if dist.get_rank() == dist.get_world_size() - 1:
                patch.setattr(f"infinity.run.{module}.{name}", fail)
            try:
                infinity.offload(model, make_optimizer(RECIPE, model), config)
                wrong.append(f"{stage} did not fail")
            except InfinityError as error:
                if f"{stage} fails" not in str(error):
                    wrong.append(f"{stage}: unexpected error: {error}")
        wrong += [f"{stage}: {leaked}" for leaked in leaked_resources(before, where, model, host_caches)]
        dist.barrier()
    model = build(RECIPE)
    with infinity.offload(model, make_optimizer(RECIPE, model), config) as paged:
        models.loss_of(model, batch(model, 0)).backward()
        paged.step()
    return wrong


@pytest.mark.parametrize(
    "stages", [STAGES[::2], pytest.param(STAGES[1::2], marks=pytest.mark.wide)], ids=["even", "odd"]
)
def test_failed_stages_release_all_resources(stages: tuple[str, ...], tmp_path: Path) -> None:
    """Threads, files, locks, memory and hooks are released, and the next startup succeeds."""
    assert fail_at(stages, str(tmp_path)) == []


def test_failed_stages_on_one_rank_release_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    """The other rank reports the reason without waiting for its peer."""
    stages = ("run_directory.FolderLock.acquire", "run.HostCache", "initial_state.OwnValues.values",
              "offload.Attachment")  # fmt: skip
    assert pair.run(fail_at, stages, str(tmp_path)) == [[], []]
