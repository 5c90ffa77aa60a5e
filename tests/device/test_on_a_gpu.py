"""The trainings of the simulated device on a real one: `make gpu-test`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.device.tables import ACTIVATIONS, HOMES, PAGINGS, RECIPES, RECIPES_THAT_KEEP, SOME
from support.tables import variants
from support.train import Paging, Recipe, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def on_a_gpu(recipes: dict[str, Recipe], pagings: dict[str, Paging], *updates: str) -> list[Any]:
    """Return (recipe, paging) of all recipes with all pagings, and updates here and there in turn."""
    listed = []
    for number, row in enumerate(variants(recipes, pagings)):
        recipe, paging = row.values
        where = updates[(number + number // len(pagings)) % len(updates)]
        if recipe.groups:
            where = "cuda"  # the reference of updates on the CPU has one param group
        if where == "cuda" and not paging.device:
            # The device would take all units otherwise, and no page were used.
            paging = replace(paging, device=SOME, homes="none")
        listed.append(
            pytest.param(
                replace(recipe, device="cuda", updates=where, deterministic=True), paging, id=f"{row.id}-{where}"
            )
        )
    return listed


@pytest.mark.parametrize(
    ("recipe", "paging"),
    [
        *on_a_gpu(RECIPES, PAGINGS, "cpu", "cuda"),
        *on_a_gpu(RECIPES, HOMES, "cuda"),
        *on_a_gpu(RECIPES_THAT_KEEP, ACTIVATIONS, "cpu", "cuda"),
    ],
)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments."""
    assert compare(recipe, paging, str(tmp_path)) == []
