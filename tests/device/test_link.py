"""Bytes over the link to a device are those that the plan predicts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from support import models
from support.device.simulation import KINDS, simulation
from support.tables import one_of, variants
from support.train import Paging, Recipe, batch, in_memory, offloaded

STEPS = 6
PAGINGS = {
    f"{arena}-{placement}-{device >> 10}KiB": Paging(arena=arena, placement=placement, cores=0, device=device)
    for arena, placement, device in (
        ("least", "in_backward", 0),
        ("least", "in_forward", 64 << 20),
        ("all", "in_backward", 64 << 20),
        ("all", "after_backward", 120 << 10),
    )
}


@pytest.mark.parametrize(("paging", "kind"), one_of(3, variants(PAGINGS, {kind: kind for kind in KINDS})))
def test_bytes_over_the_link_are_the_predicted_ones(paging: Paging, kind: str, tmp_path: Path) -> None:
    """Within 1 %, in every step: what is not planned are numbers that the host reads."""
    recipe = Recipe(model="even", steps=STEPS)
    in_memory(recipe)
    with simulation(kind, 0), offloaded(recipe, paging, tmp_path) as (model, optimizer):
        counted = []
        for number in range(STEPS):
            models.loss_of(model, batch(model, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.append(found(optimizer.run.stats.snapshot(), "link_bytes_total"))
        predicted = found(optimizer.run.stats.snapshot(), "plan_predicted_link_bytes_per_step")
    assert min(predicted) > 0
    for before, after in pairwise(counted[2:]):
        for expected, first, last in zip(predicted, before, after, strict=True):
            assert last - first == pytest.approx(expected, rel=0.01)


def found(snapshot: object, name: str) -> list[float]:
    """Return what a metric says of both directions."""
    return [snapshot.value(name, direction=way) for way in ("to_device", "from_device")]  # type: ignore[attr-defined]
