"""Tests of paged activations on the simulated device, and on two ranks also on the CPU.

Results are bitwise equal to training in memory, and all accesses are ordered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.device.cases import compare_on_device
from support.device.simulation import KINDS
from support.device.tables import ACTIVATION_RECIPES, ACTIVATIONS
from support.ranks import RankPool
from support.tables import alternate, one_of, with_kinds
from support.train import Paging, Recipe, compare


@pytest.mark.parametrize(("recipe", "paging", "kind"), one_of(3, with_kinds(ACTIVATION_RECIPES, ACTIVATIONS, KINDS)))
def test_paged_activations_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "kind"), one_of(3, alternate(("checkpointing", "slices", "repeated"), ("late-updates", "")))
)
def test_paged_activations_on_two_ranks(name: str, kind: str, tmp_path: Path, pair: RankPool) -> None:
    recipe, paging = ACTIVATION_RECIPES[name], ACTIVATIONS["nvme-least"]
    found = pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) if kind else pair.run(
        compare, recipe, paging, str(tmp_path)
    )  # fmt: skip
    assert found == [[], []]
