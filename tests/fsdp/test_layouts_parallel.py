"""Tests of tensor parallel weights and of `reshard_after_forward`: training matches memory, or raises an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity
from infinity.errors import UnsupportedError
from support import models
from support.processes import fork_server
from support.ranks import RankPool
from support.train import MIB, Outcome, Paging, local, settings

WIDTH = 16
NORMS = (2.0, 1.0, 3.0, float("inf"))
UPDATE_SCHEDULES = ("in_forward", "after_backward")


class Residual(nn.Module):
    """Blocks of two linear layers, one sharded by columns and one by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def build(shape: tuple[int, int], device: str = "cpu") -> nn.Module:
    """Return a model on a mesh of (data, tensor) parallel ranks."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Residual()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=models.POLICIES["bf16"])
    return fully_shard(model, mesh=mesh["dp"], mp_policy=models.POLICIES["bf16"])


def train(model: nn.Module, optimizer: Any, norm_type: float | None) -> Outcome:
    """Take a few steps with clipping, and edit weights between them."""
    outcome = Outcome()
    data_rank = next(model.parameters()).device_mesh.get_local_rank("dp")
    for step in range(4):
        torch.manual_seed(10 * step + data_rank)
        loss = model(torch.randn(4, WIDTH))
        loss.backward()
        outcome.losses.append(loss.item())
        if norm_type is not None:
            if isinstance(optimizer, infinity.PagedOptimizer):
                norm = optimizer.clip_grad_norm_(0.1, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            outcome.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
                param.to_local()[:1].add_(0.01)
    outcome.state = {name: {"master": local(param)} for name, param in model.named_parameters()}
    return outcome


def compare(shape: tuple[int, int], norm_type: float | None, update_schedule: str, folder: str) -> list[str]:
    """Return the differences from memory on this rank."""
    model = build(shape)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), norm_type)
    model = build(shape)
    config = settings(Path(folder), Paging(update_schedule=update_schedule), 64 * MIB)
    with infinity.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config) as optimizer:
        found = train(model, optimizer, norm_type)
    listed = [what for what in ("losses", "norms") if getattr(expected, what) != getattr(found, what)]
    listed += [
        name
        for name, states in expected.state.items()
        if not torch.equal(states["master"], found.state[name]["master"])
    ]
    return listed + ([] if len(set(expected.losses)) == 4 else ["the loss never changes"])


@pytest.mark.parametrize(
    "shape", [pytest.param((2, 1), id="2x1", marks=pytest.mark.wide), pytest.param((1, 2), id="1x2")]
)
def test_tensor_parallel_training_matches_memory(shape: tuple[int, int], tmp_path: Path, pair: RankPool) -> None:
    """Covers every norm order with several update schedules, and steps without clipping."""
    for index, norm_type in enumerate((*NORMS, None)):
        (folder := tmp_path / str(index)).mkdir()
        update_schedule = "auto" if norm_type is None else UPDATE_SCHEDULES[index % 2]
        assert pair.run(compare, shape, norm_type, update_schedule, str(folder)) == [[], []], norm_type


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.wide
@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_parallel_training_on_four_ranks(norm_type: float, tmp_path: Path, four: RankPool) -> None:
    """Two ranks per parallel dimension."""
    assert four.run(compare, (2, 2), norm_type, "in_forward", str(tmp_path)) == [[]] * 4


def load(folder: str) -> list[str]:
    """Load both formats of full weights into tensor-parallel models on the meta device. Return unequal parameters."""
    expected, listed = {name: local(param) for name, param in build((1, 2)).named_parameters()}, []
    for kind in ("safetensors", "dcp"):
        model = build((1, 2), "meta")
        (nvme := Path(folder, kind, "run")).mkdir(exist_ok=True)
        with infinity.offload(
            model, torch.optim.AdamW(model.parameters()), settings(nvme, Paging(), 64 * MIB), weights=nvme.parent
        ):
            listed += [
                f"{kind}: {name}"
                for name, param in model.named_parameters()
                if not torch.equal(local(param), expected[name])
            ]
    return listed


def test_full_weights_are_loaded_into_tensor_parallel_models(tmp_path: Path, pair: RankPool) -> None:
    torch.manual_seed(0)
    state = Residual().state_dict()
    (tmp_path / "safetensors").mkdir()
    save_file(state, tmp_path / "safetensors/model.safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert pair.run(load, str(tmp_path)) == [[], []]


# Resharding after forward #


def offload_with_partial_reshard(connection: Any) -> None:
    """Reshard to a smaller mesh after forward, on one rank of a fake group of four ranks."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=4)
    model = models.Toy()
    for block in model.blocks:
        fully_shard(block, mesh=infinity.mesh("cpu"), reshard_after_forward=2)
    fully_shard(model, mesh=infinity.mesh("cpu"))
    try:
        infinity.offload(model, torch.optim.AdamW(model.parameters()), {"storage": {"paths": ["/tmp"]}})
        connection.send("no error")
    except UnsupportedError as error:
        connection.send(str(error))


def test_partial_reshard_after_forward_raises() -> None:
    """The error names a supported value."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=offload_with_partial_reshard, args=(theirs,))
    process.start()
    assert ours.poll(600)
    words = ours.recv()
    process.join(60)
    assert "blocks.0" in words
    assert "pass True" in words
