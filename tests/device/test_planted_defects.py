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
        "copies: the thread does not wait",
        "gradients: copied to pages before they are there",
        "gradients: dropped before the copy has ended",
        "number: copied to the thread of updates before it is there",
        "number: used on the device before it is there",
        "staging: a slot is copied out of before it is filled",
        "update: the training thread does not wait for it",
        "page: used while it is being read",
        "weights: computed with before their copy",
        "update there: copied back before it has been computed",
        "update there: no mark behind the copies back",
    ),
)
def test_planted_defect_is_detected(name: str, tmp_path: Path) -> None:
    found = DEFECTS[name].found(tmp_path)
    assert sides(DEFECTS[name], found), "\n".join(found) or "no race was reported"
