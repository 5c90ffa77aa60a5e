"""Tests of the simulated device: it detects deliberate synchronization defects and names both operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.device.defects import DEFECTS, sides
from support.tables import all_but


@pytest.mark.parametrize(
    "name",
    all_but(
        DEFECTS,
        "copies: no thread waits for their events",
        "gradients: copied to pages before the reduction has completed",
        "gradients: released before the copy has completed",
        "number: copied to the update thread before it is computed",
        "number: used on the device before it is computed",
        "prefetch: slot read before it is filled",
        "update: the training thread does not wait",
        "page: used while it is being read",
        "weights: used before the copy has completed",
        "device update: copied back before it has completed",
        "device update: no event after the copies back",
    ),
)
def test_planted_defect_is_detected(name: str, tmp_path: Path) -> None:
    found: list[str] = []
    for seed in range(5 if DEFECTS[name].by_chance else 1):
        (folder := tmp_path / str(seed)).mkdir()
        found += DEFECTS[name].found(folder, seed)
        if sides(DEFECTS[name], found):
            return
    raise AssertionError("\n".join(found) or "no race was reported")
