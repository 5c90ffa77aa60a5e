"""fp32 numbers as two halves of 16 bits each, of which the upper one is a bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper halves of fp32 values, which are bf16, and the lower ones, int16: views, shape (n,).

    Args:
        values: fp32, shape (n,), contiguous.
    """
    lower, upper = values.view(torch.int16).view(-1, 2).unbind(1)
    return upper.view(torch.bfloat16), lower


def joined(components: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return fp32 values, a new tensor of shape (n,), from their upper halves and, unless all are zero, their lower."""
    if len(components) == 1:
        return components[0].float()
    values = torch.empty(len(components[0]), device=components[0].device)
    for component, half in zip(components, halves(values), strict=True):
        half.copy_(component)
    return values
