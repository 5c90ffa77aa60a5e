"""Tests of bitwise parity on two ranks with gloo, with even and uneven shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.fsdp import shard as shard_module
from support import models
from support.ranks import RankPool
from support.tables import one_of, variants
from support.train import Paging, Recipe, batch, compare, offloaded

LEAST = {"least": Paging(host_cache="least")}
ENDS = {
    "least-auto": Paging(host_cache="least"),
    "least-forward": Paging(host_cache="least", update_schedule="in_forward"),
    "middle-after": Paging(update_schedule="after_backward"),
}
HOST_CACHES = {host_cache: Paging(host_cache=host_cache) for host_cache in ("least", "middle", "all")}

CASES = [
    *variants({"bf16": Recipe(), "clip": Recipe(clip=0.5), "fp32": Recipe(policy="fp32")}, HOST_CACHES),
    *variants(
        {
            "fp32-clip": Recipe(policy="fp32", clip=0.5),
            "accumulate": Recipe(micro=2),
            "accumulate-clip": Recipe(micro=2, clip=0.5),
            "gpt2": Recipe(model="gpt2"),
            "gpt2-clip": Recipe(model="gpt2", clip=0.5),
            "toy": Recipe(model="toy"),
        },
        ENDS,
    ),
    *variants(
        {
            "checkpointing": Recipe(checkpointing=True),
            "eval-between": Recipe(evaluate=True, model="toy"),
            "frozen": Recipe(model="frozen", clip=0.5),
            "repeated": Recipe(model="repeated"),
            "spare": Recipe(model="spare", clip=0.5),
            "groups": Recipe(groups=True, model="toy"),
            "pure-bf16": Recipe(policy="pure_bf16"),
        },
        LEAST,
    ),
    *variants(
        {"plain": Recipe(seed=5), "gpt2": Recipe(model="gpt2", seed=6), "clip": Recipe(clip=0.5, micro=2, seed=7)},
        {"delays": Paging(host_cache="least", delays=True)},
    ),
    *variants({"toy": Recipe(model="toy", clip=0.5)}, {"paths": Paging(paths=2)}),
    *variants(
        {"even": Recipe(model="even"), "eval-between": Recipe(model="even", evaluate=True, seed=1)},
        {"backward-delays": Paging(host_cache="least", update_schedule="in_backward", delays=True)},
    ),
]


@pytest.mark.parametrize(("recipe", "paging"), one_of(2, CASES))
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path, pair: RankPool) -> None:
    """Losses, norms, parameters and moments equal those in memory, on every rank."""
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
