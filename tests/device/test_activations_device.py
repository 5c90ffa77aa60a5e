"""Tests of paged activations on the simulated device, and on two ranks also on the CPU.

Results are bitwise equal to training in memory, and all accesses are ordered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.device.cases import compare_on_device
from support.device.simulation import KINDS
from support.device.tables import ACTIVATION_RECIPES, ACTIVATIONS
from support.ranks import RankPool
from support.tables import one_of, variants
from support.train import Paging, Recipe, compare


def rows(every: int) -> list[Any]:
    """Return (recipe, paging, kind) for all recipes and pagings; the kinds of simulation alternate."""
    kinds = list(KINDS)
    listed = [
        pytest.param(*row.values, kinds[(number + number // 4) % 4], id=row.id, marks=row.marks)
        for number, row in enumerate(variants(ACTIVATION_RECIPES, ACTIVATIONS))
    ]
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(2))
def test_paged_activations_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["", "late-updates"])
@pytest.mark.parametrize(
    "recipe",
    one_of(3, [ACTIVATION_RECIPES["checkpointing"], ACTIVATION_RECIPES["slices"], ACTIVATION_RECIPES["repeated"]]),
)
def test_paged_activations_on_two_ranks(recipe: Recipe, kind: str, tmp_path: Path, pair: RankPool) -> None:
    paging = ACTIVATIONS["nvme-least"]
    found = pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) if kind else pair.run(
        compare, recipe, paging, str(tmp_path)
    )  # fmt: skip
    assert found == [[], []]
