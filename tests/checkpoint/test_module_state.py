"""Tests of the state of modules outside of parameters: buffers, extra state, and modules around the sharded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.config import load_config
from infinity.errors import CheckpointError, UnsupportedError
from infinity.run.offload import offload_inside
from support import format_reader as document
from support.train import MIB, Paging, settings


class Scaled(nn.Linear):
    """Layer whose extra state changes in every forward."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.amax: Any = 1.0
        self.history = torch.zeros(3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.amax = 0.5 * self.amax + y.detach().abs().max().item()
        self.history = torch.cat([self.history[1:], self.history.new_full((1,), self.amax)])
        return y / self.amax

    def get_extra_state(self) -> Any:
        return {"amax": self.amax, 3: (None, {"history": self.history})}

    def set_extra_state(self, state: Any) -> None:
        self.amax, self.history = state["amax"], state[3][1]["history"]


def start(folder: Path, layer: nn.Module, around: type[nn.Module] = nn.Module, **run: Any) -> tuple[nn.Module, Any]:
    """Offload a model with one layer that is part of another module; return that module and the optimizer."""
    outer = around()
    outer.net = nn.Sequential(layer)
    fully_shard(outer.net, mesh=infinity.mesh("cpu"))
    optimizer = torch.optim.AdamW(outer.net.parameters(), lr=1e-3)
    config = load_config(settings(folder, Paging(), 64 * MIB, run=run))
    paged = offload_inside(outer, outer.net, optimizer, config, weights=None, strict=True, init=None)
    return outer, paged


def step(outer: nn.Module, optimizer: Any) -> None:
    outer.net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("meta", [False, True])
def test_extra_state_is_restored(meta: bool, tmp_path: Path) -> None:
    """It is in checkpoints of any device, and resuming continues bit for bit."""
    with torch.device("meta" if meta else "cpu"):
        first = Scaled()
    first.history = torch.zeros(3, dtype=torch.bfloat16)
    outer, optimizer = start(tmp_path, first)
    with optimizer:
        step(outer, optimizer)
        optimizer.save_checkpoint()
        expected = outer.net[0].get_extra_state()
    assert expected["amax"] != 1.0
    outer, optimizer = start(tmp_path, Scaled(), resume="latest")
    with optimizer:
        found = outer.net[0].get_extra_state()
    assert found["amax"] == expected["amax"]
    assert torch.equal(found[3][1]["history"], expected[3][1]["history"])


def test_extra_state_of_a_different_model_is_rejected(tmp_path: Path) -> None:
    with start(tmp_path, Scaled())[1] as optimizer:
        optimizer.save_checkpoint()
    with pytest.raises(CheckpointError, match=r"only the checkpoint has net\.0\._extra_state"):
        start(tmp_path, nn.Linear(8, 8), resume="latest")


class OneWay(nn.Linear):
    """Layer with an extra state that cannot be restored."""

    def get_extra_state(self) -> Any:
        return 1


class Odd(Scaled):
    """Layer with an extra state of a type that `torch.load` does not load."""

    def get_extra_state(self) -> Any:
        return Path("x")


class Rejecting(Scaled):
    """Layer that rejects its own extra state."""

    def set_extra_state(self, state: Any) -> None:
        raise ValueError("not today")


class Metric(nn.Linear):
    """Layer that adds an entry to `state_dict`, like a persistent state of torchmetrics."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = torch.zeros(())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: OneWay(8, 8), r"OneWay defines .*net\.0\._extra_state"),
        (Odd, r"net\.0\._extra_state cannot be loaded.*get_extra_state"),
        (lambda: Metric(8, 8), r"state_dict\(\) contains net\.0\.total"),
    ],
)
def test_state_that_checkpoints_cannot_contain_is_rejected_at_startup(layer: Any, reason: str, tmp_path: Path) -> None:
    """The error names the entry. A run without checkpoints starts."""
    with pytest.raises(UnsupportedError, match=reason):
        start(tmp_path, layer())
    start(tmp_path, layer(), retained_checkpoints=0)[1].close()


def test_first_checkpoint_is_read_back(tmp_path: Path) -> None:
    """An extra state that its module rejects is reported before a checkpoint exists."""
    with (
        start(tmp_path, Rejecting())[1] as optimizer,
        pytest.raises(CheckpointError, match=r"net\.0\._extra_state cannot be restored .* not today"),
    ):
        optimizer.save_checkpoint()
    assert not list(tmp_path.glob("nvme0/*/checkpoints/step*"))


class Counting(nn.Module):
    """Module around the sharded one, with its own buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2).expand(3, 2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_buffers_around_the_model_are_restored(tmp_path: Path) -> None:
    """Persistent buffers only, as in `state_dict`. The independent reader accepts the checkpoint."""
    outer, optimizer = start(tmp_path, nn.Linear(8, 8), Counting)
    with optimizer:
        outer.seen[0].copy_(torch.tensor([4.0, 5.0]))
        outer.cache.fill_(7)
        optimizer.save_checkpoint()
    (run,) = document.find_runs([tmp_path / "nvme0"])
    (checkpoint,) = document.find_checkpoints(run)
    assert document.read(checkpoint).module_state.keys() == {"seen"}
    outer, optimizer = start(tmp_path, nn.Linear(8, 8), Counting, resume="latest")
    optimizer.close()
    assert outer.seen.tolist() == [[4.0, 5.0]] * 3
    assert outer.cache.tolist() == [0.0, 0.0]


class Slopes(nn.Linear):
    """Layer with a buffer whose elements overlap, and an inference tensor as a buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(8, 8)
        self.register_buffer("slopes", torch.ones(2, 1).expand(2, 8), persistent=persistent)
        self.register_buffer("windows", torch.arange(6.0).unfold(0, 3, 1), persistent=persistent)
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(8), persistent=persistent)


@pytest.mark.parametrize("persistent", [False, True])
def test_overlapping_buffers_and_inference_tensors_are_restored(persistent: bool, tmp_path: Path) -> None:
    outer, optimizer = start(tmp_path, Slopes(persistent))
    layer: Any = outer.net[0]
    with optimizer:
        layer.slopes[:, 0].copy_(torch.tensor([3.0, 4.0]))
        with torch.inference_mode():
            layer.table.fill_(5)
        step(outer, optimizer)
        optimizer.save_checkpoint()
    outer, optimizer = start(tmp_path, Slopes(persistent), resume="latest")
    optimizer.close()
    layer = outer.net[0]
    assert layer.slopes.tolist() == [[3.0] * 8, [4.0] * 8]
    assert layer.table.tolist() == [5.0] * 8
    assert layer.windows.tolist() == torch.arange(6.0).unfold(0, 3, 1).tolist()
    assert layer.slopes.stride() == (1, 0)


def test_persistent_buffers_must_match_the_checkpoint(tmp_path: Path) -> None:
    """A buffer that only the model or only the checkpoint has is named, instead of losing its value."""
    with start(tmp_path, nn.Linear(8, 8))[1] as optimizer:
        optimizer.save_checkpoint()
    with pytest.raises(CheckpointError, match=r"the model has the persistent buffer 0\.slopes, but the checkpoint"):
        start(tmp_path, Slopes(persistent=True), resume="latest")


def test_persistent_buffer_registered_during_training_is_named(tmp_path: Path) -> None:
    outer, optimizer = start(tmp_path, nn.Linear(8, 8))
    with optimizer:
        outer.net[0].register_buffer("late", torch.zeros(1))
        with pytest.raises(CheckpointError, match=r"buffer 0\.late.* before infinity\.offload"):
            optimizer.save_checkpoint()
