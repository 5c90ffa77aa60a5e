"""Comparison of the distributions of two random initial values."""

from __future__ import annotations

import torch


def distribution_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return how the distribution of `found` differs from that of `expected`, or ``""``. Constants must be equal.

    The tolerances of mean and standard deviation are about six standard errors for the number of elements.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.shape} {found.dtype}, not {expected.shape} {expected.dtype}"
    a, b, count = expected.double(), found.double(), expected.numel()
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return "" if torch.equal(a, b) else f"{b.flatten()[:2].tolist()}, not {a.flatten()[:2].tolist()}"
    if a.ndim > 1 and not torch.equal((a == 0).flatten(1).all(1), (b == 0).flatten(1).all(1)):
        return "different rows are zero"
    means, stds = abs(a.mean() - b.mean()), abs((a.std() / b.std()).log())
    if means > 6 * a.std() * (2 / count) ** 0.5 or stds > 6 / (count - 1) ** 0.5:
        return f"mean {b.mean():.4g}, std {b.std():.4g}; not {a.mean():.4g}, {a.std():.4g}"
    return ""
