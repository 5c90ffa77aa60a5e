"""Tests of optimizers from many packages: bitwise equal to training in memory, or rejected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import infinity
from infinity.errors import UnsupportedError
from support.optimizers import build, compare, groups_of
from support.rows import EQUAL, UNSUPPORTED
from support.tables import WIDE, one_of
from support.train import Paging, settings
from wide.wide_optimizers import ROWS, OptimizerRow

BY_NAME = {row.name: row for row in ROWS}
COUNTING = [row.name for row in ROWS if row.counting]
UNSUPPORTED_IN_TORCH = [row.name for row in ROWS if row.package == "torch.optim" and row.outcome == UNSUPPORTED]
OTHERS = [
    pytest.param(row.name, marks=[] if row.package == "torch.optim" else WIDE)
    for row in ROWS
    if row.name not in UNSUPPORTED_IN_TORCH
]


def row_or_skip(name: str) -> OptimizerRow:
    """Return a row, or skip the test if its package is not installed."""
    row = BY_NAME[name]
    package = row.package.partition(".")[0]
    if package not in sys.modules:
        pytest.importorskip(package)
    return row


@pytest.mark.parametrize("name", [*UNSUPPORTED_IN_TORCH, *one_of(6, OTHERS)])
def test_optimizer_has_the_stated_outcome(name: str, tmp_path: Path) -> None:
    row = row_or_skip(name)
    if row.outcome == EQUAL:
        assert compare(row.make, tmp_path, page=row.page) == []
        return
    model = build()
    with pytest.raises(UnsupportedError, match=f"(?s){row.kind}.*{row.words}"):
        infinity.offload(model, row.make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", COUNTING)
def test_counting_optimizers_match_in_every_update_schedule(name: str, tmp_path: Path) -> None:
    """This includes resuming from a checkpoint between `step()` and a deferred update."""
    row = row_or_skip(name)
    assert compare(row.make, tmp_path, page=row.page, update_schedule="in_backward") == []
    assert compare(row.make, tmp_path, page=row.page, update_schedule="in_forward", checkpoint=4) == []
