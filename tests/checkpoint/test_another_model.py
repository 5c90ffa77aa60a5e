"""A commit does not go on with a model or groups that only look like those that it was made with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.checkpoint.reader import CommitReader
from infinity.checkpoint.room import CommitRoom
from infinity.errors import CommitError
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
def committed(tmp_path: Path) -> Path:
    """A folder with a commit."""
    with start(tmp_path) as optimizer:
        optimizer.commit()
    return tmp_path


def test_a_parameter_of_another_shape_is_refused(committed: Path) -> None:
    """As many elements would be taken as they lie there."""
    with pytest.raises(CommitError, match=r"first\.weight has shape \(10, 6\) in the commit of step 0.*\(6, 10\) here"):
        start(committed, 10, 6, resume="latest")
    with start(committed, resume="latest") as optimizer:
        assert optimizer.steps == 0


def test_groups_in_another_order_are_refused(committed: Path) -> None:
    """Each would get the other's weight decay."""
    with pytest.raises(CommitError, match=r"param group 0 of the commit has other parameters.*\(2 there, 1 here\)"):
        start(committed, turned=True, resume="latest")


def test_a_buffer_of_two_modules_is_saved_under_both_names(committed: Path) -> None:
    """As `state_dict` has it; an export asks for both."""
    (file,) = committed.glob("nvme0/*/commits/*.json")
    folder = RunFolder.of([str(committed / "nvme0")], file.parent.parent.name)
    found = dict(CommitReader(folder).buffers())
    assert {name: value.tolist() for name, value in found.items()} == {
        "first.scale": [2.0, 3.0],
        "second.scale": [2.0, 3.0],
    }


def test_room_that_a_full_drive_refuses_is_given_back(tmp_path: Path) -> None:
    """ext4 keeps what an allocation got before it failed: the drive would stay full, and every later commit fail."""
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
        room = CommitRoom(place / "room", MIB)
        room.reserve(1)
        before = os.statvfs(place).f_bavail
        room.hold(64)
        assert (place / "room").stat().st_size == MIB
        assert os.statvfs(place).f_bavail > before - 16  # blocks; one may describe extents
    finally:
        subprocess.run(["umount", str(place)], check=True)
