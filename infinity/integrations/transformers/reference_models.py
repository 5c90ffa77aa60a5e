"""Reference models of TRL's trainers, which stay in memory while the trained weights are on NVMe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def sync_from_shards(trainer: Any) -> None:
    """Let TRL's `SyncRefModelCallback` (`sync_ref_model`) read sharded weights.

    The callback itself adds a parameter of the model to one of the reference model, which fails for a DTensor.
    """
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "SyncRefModelCallback":
            callback.sync_target_model = _mix


@torch.no_grad()
def _mix(model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Move the weights of `target` towards those of `model`, one full parameter at a time, with TRL's arithmetic."""
    for other, param in zip(target.parameters(), model.parameters(), strict=True):
        own: torch.Tensor = param.detach()
        if isinstance(own, DTensor) and not isinstance(other, DTensor):
            own = own.full_tensor()
        other.data.mul_(1.0 - alpha).add_(own, alpha=alpha)
