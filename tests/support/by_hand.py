"""The loop that frameworks run, written by hand with plain FSDP2 in memory: what theirs are compared with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support import models

BATCHES, HALF, CLIP = 8, 4, 0.5
"""Batches of two sequences, where a run is stopped, and the largest norm of gradients."""


def data() -> torch.Tensor:
    """Return all sequences, shape (16, 24)."""
    return torch.randint(0, 256, (2 * BATCHES, 24), generator=torch.Generator().manual_seed(5))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights, whole."""
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in model.named_parameters()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in found.items()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor], accumulation: int
) -> list[float]:
    """Train with clipping and a schedule; return the losses."""
    scheduler, losses = scheduler_of(optimizer), []
    for number, batch in enumerate(batches, 1):
        loss = models.loss_of(model, batch)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses
