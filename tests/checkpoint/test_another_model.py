"""A checkpoint does not go on with a model or groups that only look like those that it was made with."""

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
from support.train import MIB, Paging, settings


class Two(nn.Module):
    """Two linear layers, which share a buffer."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inner, outer, bias=False), nn.Linear(5, 5)
        scale = torch.tensor([2.0, 3.0])
        self.first.register_buffer("scale", scale)
        self.second.register_buffer("scale", scale)


def start(folder: Path, inner: int = 6, outer: int = 10, *, turned: bool = False, **run: Any) -> Any:
    """Offload a model, whose matrices decay and whose bias does not."""
    model = Two(inner, outer)
    fully_shard(model, mesh=infinity.mesh("cpu"))
    groups: list[dict[str, Any]] = [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.second.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, lr=1e-3)
    return infinity.offload(model, optimizer, settings(folder, Paging(), 64 * MIB, run=run))


@pytest.fixture
def checkpointed(tmp_path: Path) -> Path:
    """A folder with a checkpoint."""
    with start(tmp_path) as optimizer:
        optimizer.save_checkpoint()
    return tmp_path


def test_a_parameter_of_another_shape_is_refused(checkpointed: Path) -> None:
    """As many elements would be taken as they lie there."""
    with pytest.raises(
        CheckpointError, match=r"first\.weight has shape \(10, 6\) in the checkpoint of step 0.*\(6, 10\)"
    ):
        start(checkpointed, 10, 6, resume="latest")
    with start(checkpointed, resume="latest") as optimizer:
        assert optimizer.steps == 0


def test_groups_in_another_order_are_refused(checkpointed: Path) -> None:
    """Each would get the other's weight decay."""
    with pytest.raises(CheckpointError, match=r"param group 0 .*\b2\b.*\b1\b"):
        start(checkpointed, turned=True, resume="latest")


def test_a_buffer_of_two_modules_is_saved_under_both_names(checkpointed: Path) -> None:
    """As `state_dict` has it; an export asks for both."""
    (file,) = checkpointed.glob("nvme0/*/checkpoints/*.json")
    folder = RunFolder.of([str(checkpointed / "nvme0")], file.parent.parent.name)
    found = dict(CheckpointReader(folder).buffers())
    assert {name: value.tolist() for name, value in found.items()} == {
        "first.scale": [2.0, 3.0],
        "second.scale": [2.0, 3.0],
    }


class Table(nn.Module):
    """Has a table that is made longer when it is needed, a counter, and what a test adds."""

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
    """Train a step and checkpoint; return the loss."""
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


def test_a_table_that_a_model_makes_longer_is_made_again(tmp_path: Path) -> None:
    """It is in no `state_dict`; in memory, too, a new process has the short one."""
    first = train_table(tmp_path)
    assert train_table(tmp_path, resume="latest") != first


def test_a_persistent_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    """With both shapes; the checkpoint is not said to be damaged."""
    train_table(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"^buffer steps .*\(2,\).*\(1,\)",
    ):
        train_table(tmp_path, resume="latest", model=Table(steps=2))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu])
def test_a_buffer_that_no_checkpoint_can_give_back_is_refused_at_the_start(dtype: torch.dtype, tmp_path: Path) -> None:
    """Not at the first checkpoint, nor when it is resumed; without checkpoints it is taken."""
    with pytest.raises(UnsupportedError, match=r"^buffer odd .*run\.retained_checkpoints = 0"):
        train_table(tmp_path, model=Table(dtype))
    train_table(tmp_path, model=Table(dtype), checkpoint=False, retained_checkpoints=0)


def test_a_sparse_buffer_is_refused_at_the_start(tmp_path: Path) -> None:
    """By its name."""
    model = Table()
    model.register_buffer("odd", torch.eye(4).to_sparse())
    with pytest.raises(UnsupportedError, match=r"^buffer odd .*sparse_coo"):
        train_table(tmp_path, model=model)


def test_a_rate_of_numpy_is_checkpointed(tmp_path: Path) -> None:
    """A schedule that computes with it makes such ones."""
    train_table(tmp_path, np.float32(1e-3))
    assert train_table(tmp_path, resume="latest")


def test_a_setting_that_no_checkpoint_can_have_is_refused_at_the_start(tmp_path: Path) -> None:
    """By its name, before anything is trained."""
    with pytest.raises(CheckpointError, match=r"^lr of the optimizer .*Fraction.*run\.retained_checkpoints = 0"):
        train_table(tmp_path, Fraction(1, 1000))


def test_room_that_a_full_drive_refuses_is_given_back(tmp_path: Path) -> None:
    """ext4 keeps what an allocation got before it failed:

    the drive would stay full, and every later checkpoint fail.
    """
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 8 * MIB)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"there is no ext4 to try it on: {error}")
    try:
        room = CheckpointSpace(place / "room", MIB)
        room.reserve(1)
        before = os.statvfs(place).f_bavail
        room.hold(64)
        assert (place / "room").stat().st_size == MIB
        assert os.statvfs(place).f_bavail > before - 16  # blocks; one may describe extents
    finally:
        subprocess.run(["umount", str(place)], check=True)
