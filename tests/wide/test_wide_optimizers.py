"""Optimizers of many packages, bit by bit against memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import infinity
from infinity.errors import UnsupportedError
from support.optimizers import build, compare, groups_of
from support.rows import EQUAL
from support.train import Paging, settings
from support.wide_optimizers import ROWS, OptimizerRow

pytestmark = pytest.mark.wide
BY_NAME = {row.name: row for row in ROWS}
COUNTING = [row.name for row in ROWS if row.counting]


def found(name: str) -> OptimizerRow:
    """Return a row, or skip where its package is not there."""
    row = BY_NAME[name]
    package = row.package.partition(".")[0]
    if package not in sys.modules:
        pytest.importorskip(package)
    return row


@pytest.mark.parametrize("name", BY_NAME)
def test_equal_or_refused(name: str, tmp_path: Path) -> None:
    """What the table says, and nothing else."""
    row = found(name)
    if row.outcome == EQUAL:
        assert compare(row.make, tmp_path, page=row.page) == []
        return
    model = build()
    with pytest.raises(UnsupportedError, match=f"(?s){row.kind}.*{row.words}"):
        infinity.offload(model, row.make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


@pytest.mark.parametrize("name", COUNTING)
def test_what_is_counted_is_counted_in_every_update_schedule_and_resumed(name: str, tmp_path: Path) -> None:
    """Updates in backward, or after `step` returned and from a checkpoint: the same bits."""
    row = found(name)
    assert compare(row.make, tmp_path, page=row.page, update_schedule="in_backward") == []
    assert compare(row.make, tmp_path, page=row.page, update_schedule="in_forward", checkpoint=4) == []


def test_the_table_is_as_long_as_it_should_be() -> None:
    """At least 60 classes, 40 of them of pytorch_optimizer."""
    kinds = {(row.package, row.kind) for row in ROWS}
    assert len(kinds) >= 60
    assert sum(package == "pytorch_optimizer" for package, _ in kinds) >= 40
