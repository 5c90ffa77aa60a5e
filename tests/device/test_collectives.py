"""Tests of FSDP2's collectives in a process group with one rank, which FSDP2 skips unless the tests change it.

`test_real_gpu.py` uses NCCL in the same way.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from support.collectives import collectives_with_one_rank
from support.device.cases import problems_of
from support.device.simulation import simulation
from support.device.tables import COLLECTIVE_PAGINGS, COLLECTIVE_RECIPES
from support.tables import with_kinds
from support.train import Paging, Recipe, differences, in_memory, paged


@pytest.mark.parametrize(
    ("recipe", "paging", "kind"),
    with_kinds(COLLECTIVE_RECIPES, COLLECTIVE_PAGINGS, ("order-updates", "late", "late-updates", "none")),
)
def test_collectives_with_one_rank_change_no_bit(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """The reference uses the same collectives. The kind ``none`` stands for training without a simulated device."""
    with collectives_with_one_rank() as found:
        expected = in_memory.__wrapped__(recipe)
        before = dict(found)
        with nullcontext() if kind == "none" else simulation(kind) as device:
            outcome = paged(recipe, paging, tmp_path)
    assert differences(expected, outcome) == []
    assert device is None or problems_of(device) == []
    assert before.keys() == {("DefaultAllGather", "gloo"), ("DefaultReduceScatter", "gloo")}
    assert found == {name: 2 * number for name, number in before.items()}
