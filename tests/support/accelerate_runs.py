"""Models, optimizers and accelerators for tests of the Accelerate integration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from support import models
from support.train import MIB

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def bare(name: str = "llama", *, meta: bool = False) -> nn.Module:
    """Return an unsharded model."""
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        return models.llama(tied=name == "tied")


def sharded(name: str = "llama", policy: MixedPrecisionPolicy = BF16) -> nn.Module:
    """Return a model that is sharded as in a user script."""
    model = bare(name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=infinity.mesh("cpu"), mp_policy=policy)
    fully_shard(model, mesh=infinity.mesh("cpu"), mp_policy=policy)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two param groups."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


@contextmanager
def accelerator(**named: Any) -> Iterator[Accelerator]:
    """Yield an accelerator for the ranks of the existing process group."""
    infinity.mesh("cpu")
    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # unused: the process group exists already
    variables = {key: str(value) for key, value in (ranks | places).items()} if dist.get_world_size() > 1 else {}
    _forget()
    os.environ.update(variables)
    try:
        yield Accelerator(cpu=True, step_scheduler_with_optimizer=False, **named)
    finally:
        for key in variables:
            del os.environ[key]
        _forget()


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def settings(folder: Path, **run: Any) -> dict[str, Any]:
    """Return settings with which most of the state is paged."""
    return {
        "storage": {"paths": [str(folder / "nvme")]},
        "memory": {"host_bytes": MIB, "page_bytes": "64KiB"},
        "telemetry": {"runtime_dir": str(folder / "runtime")},
        "run": run,
    }
