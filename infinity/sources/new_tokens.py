"""Initial values of tokens that a pretrained vocabulary lacks, as in transformers' `resize_token_embeddings`.

The rows of new tokens are drawn from a normal distribution with the mean and 1e-9 times the covariance of the existing
rows. transformers computes the covariance matrix. Here, a weighted sum of the existing rows with normally distributed
weights has the same distribution, and needs only one pass over the rows, a part at a time. Sums are computed in fp64,
so that the values do not depend on the number of ranks or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from infinity.formats import transformers_names as names
from infinity.sources.init_plan import module_seed

_SCALE = 1e-9  # factor of the covariance in transformers
_ELEMENTS = 1 << 22  # maximum number of elements of one part


def vocabulary(model: nn.Module) -> dict[int, bool]:
    """Return the ids of the parameters of a transformers model that have one row per token.

    Each value is ``True`` if new elements are zero, as in the bias of a head that is tied to the embeddings.
    """
    inner = names.pretrained_model(model)
    if inner is None:
        return {}
    embeddings, head = None, inner.get_output_embeddings()
    with suppress(NotImplementedError):
        embeddings = inner.get_input_embeddings()
    if embeddings is None or not any(isinstance(module, nn.Embedding) for module in embeddings.modules()):
        return {}  # a vision model, for example
    found = {id(param): False for param in embeddings.parameters()}
    of_head = [] if head is None else list(head.parameters())
    tied = any(id(param) in found for param in of_head)
    return {id(param): tied and param.dim() == 1 for param in of_head} | found


def new_rows(
    read: Callable[[slice], torch.Tensor], shape: torch.Size, count: int, *, seed: int, name: str
) -> torch.Tensor:
    """Return the rows of new tokens in fp64.

    Args:
        read: function that returns existing rows.
        shape: shape of the existing rows together.
        count: number of new tokens.
        seed: seed of the run.
        name: name of the parameter, from which the seed of the rows is derived.
    """
    generator = torch.Generator().manual_seed(module_seed(seed, f"new tokens:{name}"))
    rows, width = shape[0], shape[1:].numel()
    if len(shape) == 1:  # a bias, for which transformers scales the standard deviation
        old = read(slice(0, rows)).double()
        return old.mean() + _SCALE * old.std() * torch.randn(count, generator=generator, dtype=torch.float64)
    total = torch.zeros(width, dtype=torch.float64)
    deviation = torch.zeros(count, width, dtype=torch.float64)
    weights_sum = torch.zeros(count, 1, dtype=torch.float64)
    step = max(1, _ELEMENTS // max(width, count))
    for start in range(0, rows, step):
        part = read(slice(start, min(start + step, rows))).double()
        weights = torch.randn(count, len(part), generator=generator, dtype=torch.float64)
        total += part.sum(0)
        deviation += weights @ part
        weights_sum += weights.sum(1, keepdim=True)
    mean = total / rows
    if rows <= width:  # the covariance is singular, so transformers uses the mean
        return mean.repeat(count, 1)
    return mean + (deviation - weights_sum * mean) * math.sqrt(_SCALE / rows)
