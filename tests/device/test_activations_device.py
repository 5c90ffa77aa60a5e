"""Activations as pages, on a simulated device and on the CPU: the bits of memory, and every access in one order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.device.cases import compared
from support.device.simulation import KINDS
from support.device.tables import ACTIVATIONS, RECIPES_THAT_KEEP
from support.ranks import RankPool
from support.tables import one_of, variants
from support.train import Paging, Recipe, compare

ON_CPU = {name: paging for name, paging in ACTIVATIONS.items() if paging.activations == "nvme"}


def rows(every: int) -> list[Any]:
    """Return (recipe, paging, kind): all recipes with all pagings, with kinds in turn."""
    kinds = list(KINDS)
    listed = [
        pytest.param(*row.values, kinds[(number + number // 4) % 4], id=row.id, marks=row.marks)
        for number, row in enumerate(variants(RECIPES_THAT_KEEP, ACTIVATIONS))
    ]
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(2))
def test_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """Copies there and back run beside computation."""
    assert compared(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), one_of(2, variants(RECIPES_THAT_KEEP, ON_CPU)))
def test_on_the_cpu(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Where the pages only go to the drives and back."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["", "late-updates"])
@pytest.mark.parametrize(
    "recipe",
    one_of(3, [RECIPES_THAT_KEEP["checkpointing"], RECIPES_THAT_KEEP["slices"], RECIPES_THAT_KEEP["repeated"]]),
)
def test_on_two_ranks(recipe: Recipe, kind: str, tmp_path: Path, pair: RankPool) -> None:
    """Each of which has pages and files of its own."""
    paging = ACTIVATIONS["nvme-least"]
    found = pair.run(compared, kind, recipe, paging, str(tmp_path)) if kind else pair.run(
        compare, recipe, paging, str(tmp_path)
    )  # fmt: skip
    assert found == [[], []]
