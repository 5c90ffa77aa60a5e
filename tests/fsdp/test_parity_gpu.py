"""Tests of bitwise parity on a device: training on NVMe equals training in memory.

Updates run on the CPU or on the device. In memory, FSDP2 keeps weights and gradients on the device, which computes the
norm. The optimizer runs on the device or on CPU copies, with the kernel that updates pages. No value is read from the
device before the last step, so that steps run ahead of the device, as in a loop that does not print.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from support.ranks import RankPool
from support.train import (
    Outcome,
    Paging,
    Recipe,
    build,
    compare,
    differences,
    in_memory,
    local_optimizer,
    make_optimizer,
    reproducible,
    state_in_memory,
    train,
)

NO_GPU = "no CUDA device is available: `make gpu-test`"
UPDATE_SCHEDULES = ("auto", "in_forward", "after_backward")  # auto means in_backward, except with clipping
HOST_CACHES = ("least", "middle", "all")
DEVICE_BYTES = (0, 300 << 10, 1 << 20)
"""Device memory if updates run on the device: for all FSDP modules, for prefetched weights, or for some modules."""
RECIPES = {
    "plain": {},
    "clip": {"clip": 0.5},
    "accumulate": {"micro": 2},
    "fp32-clip": {"clip": 0.5, "policy": "fp32"},
    "checkpointing": {"checkpointing": True},
}


def cases() -> list[pytest.ParameterSet]:
    """Return all combinations of a recipe, an update schedule, a host cache and the device of updates."""
    found = []
    for updates in ("cpu", "cuda"):
        for number, (name, update_schedule, host_cache) in enumerate(product(RECIPES, UPDATE_SCHEDULES, HOST_CACHES)):
            device_bytes = DEVICE_BYTES[(number + number // len(HOST_CACHES)) % len(DEVICE_BYTES)]
            found.append(
                pytest.param(
                    Recipe(device="cuda", updates=updates, deterministic=True, steps=6, **RECIPES[name]),
                    Paging(
                        host_cache=host_cache,
                        update_schedule=update_schedule,
                        device=device_bytes if updates == "cuda" else 0,
                    ),
                    id=f"{name}-{update_schedule}-{host_cache}-{updates}",
                )
            )
    return found


@pytest.fixture(scope="module")
def devices() -> Iterator[RankPool]:
    """Two ranks, each with its own GPU; if only one GPU is available, they share it and use gloo instead of NCCL."""
    pool = RankPool(2, backend=f"cpu:gloo,cuda:{'nccl' if torch.cuda.device_count() > 1 else 'gloo'}")
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize(("recipe", "paging"), cases())
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize(("recipe", "paging"), cases())
def test_paging_changes_no_bit_on_two_ranks(recipe: Recipe, paging: Paging, tmp_path: Path, devices: RankPool) -> None:
    assert devices.run(compare, recipe, paging, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_reference_optimizer_matches_training_in_memory(clip: float | None) -> None:
    """On the CPU, an optimizer on copies of the shards equals an optimizer on the sharded parameters."""
    recipe = Recipe(clip=clip, deterministic=True)
    with reproducible():
        expected, found = Outcome(), Outcome()
        for outcome, make in ((expected, make_optimizer), (found, local_optimizer)):
            model = build(recipe)
            optimizer = make(recipe, model)
            train(recipe, model, optimizer, outcome)
            outcome.state = state_in_memory(model, optimizer)
    assert differences(expected, found) == []


def test_steps_do_not_synchronize_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in memory reads no value before the last step, because reads would hide missing synchronization."""
    reads: list[int] = []
    steps: list[int] = []
    item, step = torch.Tensor.item, torch.optim.AdamW.step
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(len(steps)) or item(self))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(1) or step(self))
    in_memory(Recipe(steps=4, clip=0.5, seed=11))
    assert reads
    assert min(reads) == 4
