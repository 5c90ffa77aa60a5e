"""Space for everything that a run writes is there before its first step, or the run is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.errors import BudgetError, StorageError
from infinity.units import KIB
from support.session import Session, reference
from support.train import MIB, Paging, settings

UNTIL = 4


def attempt(folder: Path, size: int, retained: int) -> bool:
    """Run on a file system of a size, checkpointing every step; return whether it was refused at its start."""
    place = folder / "nvme0"
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        try:
            session = Session(folder, run={"retained_checkpoints": retained})
        except BudgetError:
            assert list(place.iterdir()) == []
            return True
        with session:
            session.run(UNTIL, every=1)
        with Session(folder, run={"resume": "latest", "retained_checkpoints": retained}) as session:
            assert session.optimizer.steps == UNTIL
            session.run(UNTIL + 1, every=1)
        return False
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("retained", [1, 2])
def test_a_drive_of_any_size_is_refused_or_enough(retained: int, tmp_path: Path) -> None:
    """Around the size at which a run begins to fit, block by block: no error after the first step."""
    (tmp_path / "sizing").mkdir()
    with Session(tmp_path / "sizing", run={"retained_checkpoints": retained}) as session:
        paths = list((tmp_path / "sizing" / "nvme0").rglob("*"))
        need = sum(file.stat().st_blocks * 512 for file in paths if file.is_file())
        assert any(file.name.endswith(".reserved.tmp") for file in paths)
        session.run(1, every=1)
    refused = [attempt(tmp_path, need + extra * 4 * KIB, retained) for extra in (-20, -8, -2, -1, 0, 1, 2, 8)]
    assert refused == sorted(refused, reverse=True), "not refused from some size on"
    assert refused[0]
    assert not refused[-1]


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    """Neither after a run that ends well nor after one whose checkpoint fails."""
    with Session(tmp_path) as session:
        session.run(3)
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_extra_that_does_not_fit(tmp_path: Path) -> None:
    """Larger than could be known: an error that names the file, and the checkpoint before it stays."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = reference(tmp_path / "undisturbed")
    place = tmp_path / "nvme0"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system")
    try:
        with Session(tmp_path) as session:
            session.run(3)
            with pytest.raises(StorageError, match=r"checkpoint .*No space left"):
                session.optimizer.save_checkpoint({"text": "x" * (16 << 20)})
            assert session.run(6) == undisturbed[3:6]
        with Session(tmp_path, run={"resume": "latest"}) as session:
            assert session.run() == undisturbed[6:]
    finally:
        subprocess.run(["umount", str(place)], check=True)


class _Sharing(nn.Module):
    """Modules that share a buffer of 256 KiB, which the checkpoint has under the name of each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        table = torch.randn(1 << 16)
        for part in self.parts:
            part.register_buffer("table", table)


def test_shared_buffers_take_their_space_as_often_as_they_are_saved(tmp_path: Path) -> None:
    """What is held for a checkpoint is at least what it takes, before the first one has shown that."""
    model = _Sharing()
    fully_shard(model, mesh=infinity.mesh("cpu"))
    optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters()), settings(tmp_path, Paging(), 64 * MIB))
    with optimizer:
        (room,) = tmp_path.rglob("*.reserved.tmp")
        held = room.stat().st_size
        optimizer.save_checkpoint()
        took = [file.stat().st_size for file in room.parent.glob("step*")]
        assert sum(took) > 4 * 256 * KIB
        assert held >= sum(took)
