"""The trainings of the simulated device on a real one: `make gpu-test`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.device.tables import (
    ACTIVATIONS,
    GPU_RESIDENT_PAGES,
    LARGE,
    LARGE_PAGINGS,
    PAGINGS,
    RECIPES,
    RECIPES_THAT_KEEP,
    SOME,
)
from support.tables import variants
from support.train import Paging, Recipe, compare, differences, in_memory, reproducible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is seen: `make gpu-test`"),
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
            # The device would take all FSDP modules otherwise, and no page were used.
            paging = replace(paging, device=SOME, gpu_resident_pages="none")
        listed.append(
            pytest.param(
                replace(recipe, device="cuda", updates=where, deterministic=True), paging, id=f"{row.id}-{where}"
            )
        )
    return listed


@pytest.mark.parametrize("updates", ["cpu", "cuda"])
def test_the_device_computes_the_same_bits_again(updates: str) -> None:
    """In memory, twice: otherwise no comparison says anything."""
    recipe = replace(LARGE, device="cuda", updates=updates, deterministic=True)
    with reproducible():
        first, second = in_memory(recipe), in_memory.__wrapped__(recipe)
    assert differences(first, second) == []


@pytest.mark.parametrize("updates", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LARGE_PAGINGS)
def test_paging_changes_no_bit_of_a_large_model(name: str, updates: str, tmp_path: Path) -> None:
    """Where copies, updates and computation really run side by side."""
    recipe = replace(LARGE, device="cuda", updates=updates, deterministic=True)
    assert compare(recipe, LARGE_PAGINGS[name], str(tmp_path)) == []


@pytest.mark.parametrize(
    ("recipe", "paging"),
    [
        *on_a_gpu(RECIPES, PAGINGS, "cpu", "cuda"),
        *on_a_gpu(RECIPES, GPU_RESIDENT_PAGES, "cuda"),
        *on_a_gpu(RECIPES_THAT_KEEP, ACTIVATIONS, "cpu", "cuda"),
    ],
)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments."""
    assert compare(recipe, paging, str(tmp_path)) == []
