"""Paging changes no bit: one rank, every kind of model, step, arena, placement and delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tables import variants
from support.train import Paging, Recipe, compare

ARENAS = {arena: Paging(arena=arena) for arena in ("least", "middle", "all")}
ARENAS_AND_PLACEMENTS = {
    f"{arena}-{placement}": Paging(arena=arena, placement=placement)
    for arena in ("least", "middle", "all")
    for placement in ("auto", "in_forward", "after_backward")
}
ENDS = {
    "least-auto": Paging(arena="least"),
    "least-forward": Paging(arena="least", placement="in_forward"),
    "middle-after": Paging(placement="after_backward"),
}
DELAYS = {f"{arena}-delays": Paging(arena=arena, delays=True) for arena in ("least", "middle")}

CASES = [
    *variants({"bf16": Recipe(), "fp32": Recipe(policy="fp32")}, ARENAS_AND_PLACEMENTS),
    *variants(
        {
            "clip": Recipe(clip=0.5),
            "clip-fp32": Recipe(clip=0.5, policy="fp32"),
            "accumulate": Recipe(micro=3),
            "accumulate-clip": Recipe(micro=2, clip=0.5),
            "eval-between": Recipe(evaluate=True),
            "gpt2": Recipe(model="gpt2"),
        },
        ARENAS,
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
            "paths": Paging(arena="least", paths=3),
            "threads": Paging(arena="least", engine="threads"),
            "no-worker": Paging(arena="least", cores=0),
            "large-pages": Paging(arena="least", page=192 << 10),
        },
    ),
]


@pytest.mark.parametrize(("recipe", "paging"), CASES)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []
