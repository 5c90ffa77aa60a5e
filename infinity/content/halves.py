"""Split fp32 numbers into two 16-bit halves. The upper half is a bf16 number."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper halves (bf16) and the lower halves (int16) of fp32 values, as views of shape (n,).

    Args:
        values: Values in fp32, shape (n,), contiguous.
    """
    lower, upper = values.view(torch.int16).view(-1, 2).unbind(1)
    return upper.view(torch.bfloat16), lower


def joined(components: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return fp32 values, as a new tensor of shape (n,), from their halves.

    Args:
        components: Upper halves, followed by the lower halves unless all of these are zero.
    """
    if len(components) == 1:
        return components[0].float()
    values = torch.empty(len(components[0]), device=components[0].device)
    for component, half in zip(components, halves(values), strict=True):
        half.copy_(component)
    return values
