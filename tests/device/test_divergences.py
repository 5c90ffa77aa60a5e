"""Tests of steps that diverge from the plan: data that was prefetched but is not gathered does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import models
from support.device.cases import problems_of
from support.device.simulation import KINDS, simulation
from support.tables import one_of, variants
from support.train import Paging, Recipe, batch, build, make_optimizer, offloaded

RECIPE = Recipe(model="even")
FULL = tuple(range(6))
ORDERS = (
    *[FULL] * 2,
    (0, 5, 2, 5, 4),  # agrees with FULL at every second gather: the prefetched module is never gathered next
    FULL,
    (1, 3, 5),
    FULL[::-1],
    FULL,
)
PAGINGS = {
    "prefetched": Paging(host_cache="least", device=300 << 10),
    "kept": Paging(host_cache="least", update_schedule="in_forward", device=64 << 20),
}
GPU_RESIDENT_PAGES = {
    "some": Paging(host_cache="least", device=3 << 20),
    "some-forward": Paging(host_cache="least", update_schedule="in_forward", device=4 << 20),
}
"""With GPU-resident FSDP modules of about 1 MiB. After a step that diverges, other modules are GPU-resident."""


def losses_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train one step per order of the blocks and return the losses."""
    losses = []
    for number, order in enumerate(ORDERS):
        model.order = order  # type: ignore[assignment]
        loss = models.loss_of(model, batch(model, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


UPDATED = [kind for kind in KINDS if kind.endswith("updates")]
ROWS = [
    *variants(PAGINGS, {kind: kind for kind in KINDS}, wide=True),
    *one_of(2, variants(GPU_RESIDENT_PAGES, {kind: kind for kind in UPDATED})),
]


@pytest.mark.parametrize(("paging", "kind"), ROWS)
def test_skipped_and_reordered_layers_match_memory(paging: Paging, kind: str, tmp_path: Path) -> None:
    """The losses equal training in memory, and all accesses are ordered."""
    reference = build(RECIPE)
    expected = losses_of(reference, make_optimizer(RECIPE, reference))
    with simulation(kind) as device:
        with offloaded(RECIPE, paging, tmp_path) as (model, optimizer):
            assert losses_of(model, optimizer) == expected
        assert problems_of(device) == []
