"""Tests of bitwise parity on one and two ranks, for all kinds of models, steps, host caches, schedules and delays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.fsdp import shard as shard_module
from support import models
from support.ranks import RankPool
from support.tables import only, variants
from support.train import Paging, Recipe, batch, compare, offloaded

HOST_CACHES = {host_cache: Paging(host_cache=host_cache) for host_cache in ("least", "middle", "all")}
HOST_CACHES_AND_UPDATE_SCHEDULES = {
    f"{host_cache}-{update_schedule}": Paging(host_cache=host_cache, update_schedule=update_schedule)
    for host_cache in ("least", "middle", "all")
    for update_schedule in ("auto", "in_forward", "after_backward")
}
ENDS = {
    "least-auto": Paging(host_cache="least"),
    "least-forward": Paging(host_cache="least", update_schedule="in_forward"),
    "middle-after": Paging(update_schedule="after_backward"),
}
DELAYS = {f"{host_cache}-delays": Paging(host_cache=host_cache, delays=True) for host_cache in ("least", "middle")}

CASES = [
    *variants({"bf16": Recipe(), "fp32": Recipe(policy="fp32")}, HOST_CACHES_AND_UPDATE_SCHEDULES),
    *variants(
        {
            "clip": Recipe(clip=0.5),
            "clip-fp32": Recipe(clip=0.5, policy="fp32"),
            "accumulate": Recipe(micro=3),
            "accumulate-clip": Recipe(micro=2, clip=0.5),
            "eval-between": Recipe(evaluate=True),
            "gpt2": Recipe(model="gpt2"),
        },
        HOST_CACHES,
    ),
    *variants(
        {
            "checkpointing": Recipe(checkpointing=True),
            "toy-checkpointing-clip": Recipe(model="toy", checkpointing=True, clip=1.0),
            "pure-bf16": Recipe(policy="pure_bf16"),
            "toy": Recipe(model="toy"),
            "toy-fp32": Recipe(model="toy", policy="fp32", clip=0.3),
            "no-reshard": Recipe(model="toy", reshard=False),
            "tied": Recipe(model="tied"),
            "frozen": Recipe(model="frozen"),
            "repeated": Recipe(model="repeated"),
            "spare": Recipe(model="spare"),
            "spare-clip": Recipe(model="spare", clip=0.5, micro=2),
            "groups": Recipe(groups=True),
            "groups-clip-eval": Recipe(groups=True, clip=0.5, evaluate=True, model="frozen"),
            "gpt2-clip": Recipe(model="gpt2", clip=0.5),
            "clip-by-torch": Recipe(model="toy", clip=0.5, clips="torch"),
            "edit": Recipe(model="toy", evaluate=True, edit=True),
            "edit-clip": Recipe(model="toy", evaluate=True, edit=True, clip=0.5),
            # In pure fp32, the gathered weights are also the trained ones, and plain SGD has no update pages.
            "gpt2-fp32-sgd": Recipe(model="gpt2", policy="fp32", optimizer="sgd"),
            "gpt2-fp32-nesterov": Recipe(model="gpt2", policy="fp32", optimizer="sgd_nesterov"),
        },
        ENDS,
    ),
    *variants(
        {
            "plain": Recipe(),
            "clip": Recipe(clip=0.5, seed=1),
            "accumulate": Recipe(micro=2, seed=2, policy="fp32"),
            "toy-eval": Recipe(model="toy", evaluate=True, seed=3),
            "repeated": Recipe(model="repeated", clip=0.5, seed=4),
        },
        DELAYS,
    ),
    *variants(
        {"plain": Recipe(), "clip": Recipe(clip=0.5)},
        {
            "paths": Paging(host_cache="least", paths=3, engine="threads", page=192 << 10),
            "threads": Paging(host_cache="least", engine="threads"),
            "no-worker": Paging(host_cache="least", cores=0),
            "large-pages": Paging(host_cache="least", page=192 << 10),
        },
    ),
    *variants(
        {"even": Recipe(model="even"), "even-eval": Recipe(model="even", evaluate=True, seed=1)},
        {"backward-delays": Paging(host_cache="least", update_schedule="in_backward", delays=True)},
    ),
]


ONE_RANK = only(
    CASES,
    "bf16-all-auto",
    "accumulate-clip-least",
    "no-reshard-middle-after",
    "frozen-least-forward",
    "groups-clip-eval-least-auto",
    "edit-clip-least-forward",
    "gpt2-fp32-sgd-middle-after",
    "repeated-least-delays",
    "plain-paths",
    "plain-no-worker",
    "even-eval-backward-delays",
)
TWO_RANKS = only(
    CASES,
    "bf16-all-auto",
    "gpt2-clip-least-forward",  # the shards have different sizes
    "clip-by-torch-middle-after",
    "edit-least-auto",
    "accumulate-least-delays",
    "tied-least-auto",
)


@pytest.mark.parametrize(("recipe", "paging"), ONE_RANK)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), TWO_RANKS)
def test_paging_changes_no_bit_on_two_ranks(recipe: Recipe, paging: Paging, tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(compare, recipe, paging, str(tmp_path)) == [[], []]


def shards_assembled(folder: str) -> int:
    """Return the number of full shards that this rank assembled in a step."""
    assembled = 0
    dense = shard_module._dense

    def counting(value: Any) -> Any:
        nonlocal assembled
        assembled += isinstance(value, shard_module.GatherInput)
        return dense(value)

    shard_module._dense = counting
    try:
        with offloaded(Recipe(model="toy"), Paging(host_cache="least"), Path(folder)) as (model, optimizer):
            models.loss_of(model, batch(model, 0)).backward()
            optimizer.step()
    finally:
        shard_module._dense = dense
    return assembled


def test_pages_are_gathered_without_assembling_shards(tmp_path: Path, pair: RankPool) -> None:
    """Pages are copied directly into the all-gather input."""
    assert pair.run(shards_assembled, str(tmp_path)) == [0, 0]
