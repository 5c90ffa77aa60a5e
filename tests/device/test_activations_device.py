"""Activations as pages, on a simulated device and on the CPU: the bits of memory, and every access in one order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.device.cases import compared
from support.device.simulation import KINDS
from support.ranks import RankPool
from support.tables import one_of, variants
from support.train import KIB, Paging, Recipe, compare

PAGE = 64 * KIB
MANY = Recipe(model="toy", steps=4, sequences=44)
"""Its layers are called with two or three pages."""
RECIPES = {
    "plain": MANY,
    "checkpointing": replace(MANY, checkpointing=True),
    "checkpointing-clip": replace(MANY, checkpointing=True, clip=0.5),
    "checkpointing-accumulate": replace(MANY, checkpointing=True, micro=2),
    "checkpointing-evaluate-edit": replace(MANY, checkpointing=True, evaluate=True, edit=True),
    "fp32": replace(MANY, checkpointing=True, policy="fp32"),
    "repeated": replace(MANY, model="repeated"),
    "slices": replace(MANY, slices=4),
    "slices-clip": replace(MANY, slices=2, clip=0.5),
}
PAGINGS = {
    "nvme-least": Paging(arena="least", activations="nvme"),
    "host": Paging(activations="host"),
    "nvme-forward-delays": Paging(placement="in_forward", activations="nvme", delays=True),
    "nvme-two-paths": Paging(placement="after_backward", activations="nvme", paths=2),
}
ON_CPU = {name: paging for name, paging in PAGINGS.items() if paging.activations == "nvme"}


def rows(every: int) -> list[Any]:
    """Return (recipe, paging, kind): all recipes with all pagings, with kinds in turn."""
    kinds = list(KINDS)
    listed = [
        pytest.param(*row.values, kinds[(number + number // 4) % 4], id=row.id, marks=row.marks)
        for number, row in enumerate(variants(RECIPES, PAGINGS))
    ]
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(2))
def test_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """Copies there and back run beside computation."""
    assert compared(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), one_of(2, variants(RECIPES, ON_CPU)))
def test_on_the_cpu(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Where the pages only go to the drives and back."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["", "late-updates"])
@pytest.mark.parametrize("recipe", one_of(3, [RECIPES["checkpointing"], RECIPES["slices"], RECIPES["repeated"]]))
def test_on_two_ranks(recipe: Recipe, kind: str, tmp_path: Path, pair: RankPool) -> None:
    """Each of which has pages and files of its own."""
    paging = PAGINGS["nvme-least"]
    found = pair.run(compared, kind, recipe, paging, str(tmp_path)) if kind else pair.run(
        compare, recipe, paging, str(tmp_path)
    )  # fmt: skip
    assert found == [[], []]
