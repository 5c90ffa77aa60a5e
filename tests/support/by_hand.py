"""Reference training loop with plain FSDP2 in memory, for comparison with the loops of frameworks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support import models

BATCHES, HALF, CLIP = 8, 4, 0.5
"""Number of batches (of two sequences), number of batches before an interruption, and maximum gradient norm."""


def data() -> torch.Tensor:
    """Return all sequences, with shape (16, 24)."""
    return torch.randint(0, 256, (2 * BATCHES, 24), generator=torch.Generator().manual_seed(5))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that changes lr in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all full weights by name."""
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in model.named_parameters()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in found.items()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor], accumulation: int
) -> list[float]:
    """Train with gradient clipping and a scheduler; return the losses."""
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
