"""Tests of the simulated device's training runs on a real GPU: `make gpu-test`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support import models
from support.collectives import collectives_with_one_rank
from support.device.tables import (
    ACTIVATION_RECIPES,
    ACTIVATIONS,
    COLLECTIVE_PAGINGS,
    COLLECTIVE_RECIPES,
    GPU_RESIDENT_PAGES,
    LARGE,
    LARGE_PAGINGS,
    PAGINGS,
    RECIPES,
    SOME,
)
from support.tables import variants
from support.train import (
    Outcome,
    Paging,
    Recipe,
    compare,
    differences,
    in_memory,
    offloaded,
    paged,
    reproducible,
    train,
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available: `make gpu-test`"),
]


def on_a_gpu(recipes: dict[str, Recipe], pagings: dict[str, Paging], *updates: str) -> list[Any]:
    """Return (recipe, paging) for all recipes and pagings; the devices that run updates alternate."""
    listed = []
    for number, row in enumerate(variants(recipes, pagings)):
        recipe, paging = row.values
        where = updates[(number + number // len(pagings)) % len(updates)]
        if recipe.groups:
            where = "cuda"  # the reference of updates on the CPU has one param group
        if where == "cuda" and not paging.device:
            # Otherwise all FSDP modules would be GPU-resident, and no pages would be used.
            paging = replace(paging, device=SOME, gpu_resident_pages="none")
        listed.append(
            pytest.param(
                replace(recipe, device="cuda", updates=where, deterministic=True), paging, id=f"{row.id}-{where}"
            )
        )
    return listed


@pytest.mark.parametrize("updates", ["cpu", "cuda"])
def test_training_in_memory_is_deterministic(updates: str) -> None:
    """The other comparisons are only meaningful if training in memory is reproducible."""
    recipe = replace(LARGE, device="cuda", updates=updates, deterministic=True)
    with reproducible():
        first, second = in_memory(recipe), in_memory.__wrapped__(recipe)
    assert differences(first, second) == []


@pytest.mark.parametrize("updates", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LARGE_PAGINGS)
def test_paging_changes_no_bit_of_a_large_model(name: str, updates: str, tmp_path: Path) -> None:
    """The model is large enough for copies, updates and computation to overlap."""
    recipe = replace(LARGE, device="cuda", updates=updates, deterministic=True)
    assert compare(recipe, LARGE_PAGINGS[name], str(tmp_path)) == []


def test_cuda_graphs_can_be_captured_while_pages_are_copied(tmp_path: Path) -> None:
    """In the default mode of a capture, a query or allocation by any other thread would invalidate it."""
    recipe = replace(LARGE, device="cuda", updates="cuda")
    unrelated, example = torch.nn.Linear(256, 256, device="cuda"), torch.ones(8, 256, device="cuda")
    expected = unrelated(example).detach()
    captured: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def capture(*_: object) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            for _ in range(200):  # long enough for other threads to use the device
                result = unrelated(example)
        graph.replay()
        captured.append((graph, result))

    with offloaded(recipe, LARGE_PAGINGS["forward-prefetched"], tmp_path) as (model, optimizer):
        for layer in models.layers_of(model):
            layer.register_forward_pre_hook(capture)
        train(recipe, model, optimizer, Outcome())
        layers = len(models.layers_of(model))
    assert len(captured) == recipe.steps * layers
    assert all(torch.equal(result, expected) for _, result in captured)


@pytest.mark.parametrize(
    ("recipe", "paging"),
    [
        *on_a_gpu(RECIPES, PAGINGS, "cpu", "cuda"),
        *on_a_gpu(RECIPES, GPU_RESIDENT_PAGES, "cuda"),
        *on_a_gpu(ACTIVATION_RECIPES, ACTIVATIONS, "cpu", "cuda"),
    ],
)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("recipe", "paging"),
    [
        *on_a_gpu(COLLECTIVE_RECIPES, COLLECTIVE_PAGINGS, "cpu", "cuda"),
        *on_a_gpu({"large": LARGE}, LARGE_PAGINGS, "cuda"),
    ],
)
def test_nccl_with_one_rank_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """NCCL gathers and reduces on FSDP2's streams, as with several GPUs. The reference uses NCCL, too."""
    with reproducible(), collectives_with_one_rank() as found:
        expected = in_memory.__wrapped__(recipe)
        before = dict(found)
        assert differences(expected, paged(recipe, paging, tmp_path)) == []
    assert before.keys() == {("DefaultAllGather", "nccl"), ("DefaultReduceScatter", "nccl")}
    assert found == {name: 2 * number for name, number in before.items()}
