"""Tests of reserved space: a run has all the space that it needs before its first step, or fails at startup."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.errors import BudgetError, StorageError
from infinity.units import KIB
from support.mounts import mounted
from support.session import Session
from support.train import MIB, Paging, settings

UNTIL = 2


def attempt(folder: Path, size: int, retained: int) -> bool:
    """Run on a file system of the given size, saving every step; return whether startup failed."""
    with mounted(folder / "nvme0", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as mount_point:
        try:
            session = Session(folder, run={"retained_checkpoints": retained})
        except BudgetError:
            assert list(mount_point.iterdir()) == []
            return True
        with session:
            session.run(UNTIL, every=1)
        with Session(folder, run={"resume": "latest", "retained_checkpoints": retained}) as session:
            assert session.optimizer.steps == UNTIL
            session.run(UNTIL + 1, every=1)
        return False


@pytest.mark.parametrize("retained", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_drive_of_any_size_is_rejected_or_sufficient(retained: int, tmp_path: Path) -> None:
    """For sizes around the minimum, block by block, no run fails after its first step."""
    (tmp_path / "sizing").mkdir()
    with Session(tmp_path / "sizing", run={"retained_checkpoints": retained}) as session:
        paths = list((tmp_path / "sizing" / "nvme0").rglob("*"))
        need = sum(file.stat().st_blocks * 512 for file in paths if file.is_file())
        assert any(file.name.endswith(".reserved.tmp") for file in paths)
        session.run(1, every=1)
    rejected = [attempt(tmp_path, need + extra * 4 * KIB, retained) for extra in (-20, -1, 0, 8)]
    assert rejected == sorted(rejected, reverse=True), "startup failed on a larger drive but not on a smaller one"
    assert rejected[0]
    assert not rejected[-1]


def test_close_removes_the_reserved_space(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.run(3)
    assert not list(tmp_path.rglob("*.tmp"))


def test_extra_that_does_not_fit_raises(undisturbed: list[float], tmp_path: Path) -> None:
    """The size of `extra` is not known in advance; the error names the file, and the previous checkpoint is kept."""
    with mounted(tmp_path / "nvme0", "-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        with Session(tmp_path) as session:
            session.run(3)
            with pytest.raises(StorageError, match=r"checkpoint .*No space left"):
                session.optimizer.save_checkpoint({"text": "x" * (16 << 20)})
            assert session.run(6) == undisturbed[3:6]
        with Session(tmp_path, run={"resume": "latest"}) as session:
            assert session.run() == undisturbed[6:]


class _SharedBuffers(nn.Module):
    """Modules that share a buffer of 256 KiB, which a checkpoint contains under the name of each module."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        table = torch.randn(1 << 16)
        for part in self.parts:
            part.register_buffer("table", table)


def test_reserved_space_counts_every_copy_of_shared_buffers(tmp_path: Path) -> None:
    """The reservation suffices before the first checkpoint shows the actual size."""
    model = _SharedBuffers()
    fully_shard(model, mesh=infinity.mesh("cpu"))
    optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters()), settings(tmp_path, Paging(), 64 * MIB))
    with optimizer:
        (reserved_file,) = tmp_path.rglob("*.reserved.tmp")
        reserved = reserved_file.stat().st_size
        optimizer.save_checkpoint()
        saved = [file.stat().st_size for file in reserved_file.parent.glob("step*")]
        assert sum(saved) > 4 * 256 * KIB
        assert reserved >= sum(saved)
