"""Tests of models, param groups and buffers that do not match a checkpoint or cannot be saved in one."""

from __future__ import annotations

import os
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.reserved_space import CheckpointSpace
from infinity.errors import CheckpointError, UnsupportedError
from infinity.store.folder import RunFolder
from support.mounts import mounted
from support.train import MIB, Paging, settings


class TwoLayers(nn.Module):
    """Two linear layers that share a buffer."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inner, outer, bias=False), nn.Linear(5, 5)
        scale = torch.tensor([2.0, 3.0])
        self.first.register_buffer("scale", scale)
        self.second.register_buffer("scale", scale)


def start(folder: Path, inner: int = 6, outer: int = 10, *, reversed_groups: bool = False, **run: Any) -> Any:
    """Offload a model whose matrices have weight decay and whose bias has none."""
    model = TwoLayers(inner, outer)
    fully_shard(model, mesh=infinity.mesh("cpu"))
    groups: list[dict[str, Any]] = [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.second.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if reversed_groups else groups, lr=1e-3)
    return infinity.offload(model, optimizer, settings(folder, Paging(), 64 * MIB, run=run))


@pytest.fixture
def checkpointed(tmp_path: Path) -> Path:
    """Folder with a checkpoint."""
    with start(tmp_path) as optimizer:
        optimizer.save_checkpoint()
    return tmp_path


def test_parameter_with_a_different_shape_is_rejected(checkpointed: Path) -> None:
    """The number of elements is equal, so it cannot show the difference."""
    with pytest.raises(
        CheckpointError, match=r"step 0.*first\.weight has shape \(10, 6\) in the checkpoint, but \(6, 10\)"
    ):
        start(checkpointed, 10, 6, resume="latest")
    with start(checkpointed, resume="latest") as optimizer:
        assert optimizer.steps == 0


def test_param_groups_in_a_different_order_are_rejected(checkpointed: Path) -> None:
    """Otherwise each group would get the weight decay of the other."""
    with pytest.raises(CheckpointError, match=r"param group 0 .*\b2\b.*\b1\b"):
        start(checkpointed, reversed_groups=True, resume="latest")


def test_shared_buffer_is_saved_under_both_names(checkpointed: Path) -> None:
    """An export reads both names, as in `state_dict`."""
    (file,) = checkpointed.glob("nvme0/*/checkpoints/*.json")
    folder = RunFolder.of([str(checkpointed / "nvme0")], file.parent.parent.name)
    found = dict(CheckpointReader(folder).buffers())
    assert {name: value.tolist() for name, value in found.items()} == {
        "first.scale": [2.0, 3.0],
        "second.scale": [2.0, 3.0],
    }


class Table(nn.Module):
    """Module with a non-persistent table that grows on demand, a counter, and optionally a buffer of a given dtype."""

    def __init__(self, dtype: torch.dtype | None = None, steps: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make(4)
        self.register_buffer("steps", torch.zeros(steps))
        if dtype is not None:
            self.register_buffer("odd", torch.ones(4).to(dtype))

    def make(self, length: int) -> None:
        self.register_buffer("table", torch.arange(length) + 1.0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.make(len(x))
        return (self.linear(x) * self.table[: len(x), None]).sum()


def train_table(folder: Path, lr: Any = 1e-3, *, checkpoint: bool = True, model: Any = None, **run: Any) -> float:
    """Train one step and save a checkpoint; return the loss."""
    torch.manual_seed(0)
    model = fully_shard(model or Table(), mesh=infinity.mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = lr
    with infinity.offload(model, optimizer, settings(folder, Paging(), 64 * MIB, run=run)) as paged:
        loss = model(torch.ones(6, 8))
        loss.backward()
        paged.step()
        paged.zero_grad()
        if checkpoint:
            paged.save_checkpoint()
        return float(loss.item())


def test_resized_nonpersistent_buffer_is_recreated(tmp_path: Path) -> None:
    """The buffer is in no `state_dict`, so a new process starts with the short one, as in memory."""
    first = train_table(tmp_path)
    assert train_table(tmp_path, resume="latest") != first


def test_persistent_buffer_with_a_different_shape_is_rejected(tmp_path: Path) -> None:
    """The error reports both shapes, not a damaged checkpoint."""
    train_table(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"^buffer steps .*\(2,\).*\(1,\)",
    ):
        train_table(tmp_path, resume="latest", model=Table(steps=2))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu])
def test_buffer_that_cannot_be_restored_is_rejected_at_startup(dtype: torch.dtype, tmp_path: Path) -> None:
    """If the run retains no checkpoints, the buffer is accepted."""
    with pytest.raises(UnsupportedError, match=r"^buffer odd .*run\.retained_checkpoints = 0"):
        train_table(tmp_path, model=Table(dtype))
    train_table(tmp_path, model=Table(dtype), checkpoint=False, retained_checkpoints=0)


def test_sparse_buffer_is_rejected_at_startup(tmp_path: Path) -> None:
    model = Table()
    model.register_buffer("odd", torch.eye(4).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^buffer odd .*sparse_coo"):
        train_table(tmp_path, model=model)


def test_numpy_learning_rate_is_saved(tmp_path: Path) -> None:
    """Schedules that use NumPy produce such learning rates."""
    train_table(tmp_path, np.float32(1e-3))
    assert train_table(tmp_path, resume="latest")


def test_unsupported_optimizer_setting_is_rejected_at_startup(tmp_path: Path) -> None:
    """The error is raised before the first step and names the setting."""
    with pytest.raises(CheckpointError, match=r"^lr of the optimizer .*Fraction.*run\.retained_checkpoints = 0"):
        train_table(tmp_path, Fraction(1, 1000))


def test_failed_allocation_returns_its_space(tmp_path: Path) -> None:
    """ext4 keeps the blocks that it allocated before a failure, so later checkpoints would fail too."""
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 8 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create an ext4 file system: {error}")
    with mounted(tmp_path / "mount_point", "-o", "loop", image) as mount_point:
        space = CheckpointSpace(mount_point / "space", MIB)
        space.reserve(1)
        before = os.statvfs(mount_point).f_bavail
        space.hold(64)
        assert (mount_point / "space").stat().st_size == MIB
        assert os.statvfs(mount_point).f_bavail > before - 16  # blocks; some may store extent metadata
