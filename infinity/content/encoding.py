"""Encode and decode sections of the state, as specified by `format.ENCODINGS`.

The results are bitwise equal to `infinity.content.reference` on every platform. Once
`infinity.content.compiled.prepare` has compiled the kernels, tensors in host memory are encoded and decoded in a single
pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.content import reference
from infinity.content.compiled import kernels
from infinity.content.format import ENCODINGS

_DTYPES = {"bfloat16": torch.bfloat16, "int16": torch.int16, "uint8": torch.uint8}


def encode(
    values: torch.Tensor, encoding: str, step: int | None = None, into: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the components of fp32 values. For ``split``, the bf16 weights come first.

    Args:
        values: Values in fp32, shape (n,), with n a multiple of `SHARD_ALIGNMENT`.
        encoding: Name of the encoding.
        step: Step of the update that produced the values, which seeds the stochastic rounding of moments. ``None``:
            round to nearest.
        into: Contiguous components to write to. By default, new tensors are created.
    """
    ready = kernels(values.device)
    if ready is not None and (step is not None or encoding == "split"):
        made = into or _empty(len(values), encoding)
        if ready.encode(values, encoding, step, made):
            return tuple(made)
    components = reference.encode(values, encoding, step)
    if into is None:
        return components
    for target, component in zip(into, components, strict=True):
        target.copy_(component)
    return tuple(into)


def decode(components: Sequence[torch.Tensor], encoding: str, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fp32 values, of shape (n,), that are encoded in the components returned by `encode`.

    Args:
        components: Components of the values.
        encoding: Name of the encoding.
        into: Contiguous tensor to write to. By default, a new tensor is created.
    """
    ready = kernels(components[0].device)
    if ready is None or encoding == "bfloat16":
        if encoding == "bfloat16" and into is not None:
            return into.copy_(components[0])
        values = reference.decode(components, encoding)
        return values if into is None else into.copy_(values)
    values = torch.empty(len(components[0])) if into is None else into
    ready.decode(components, encoding, values)
    return values


def _empty(count: int, encoding: str) -> list[torch.Tensor]:
    weights = [torch.empty(count, dtype=torch.bfloat16)] if encoding == "split" else []
    return weights + [torch.empty(count // each, dtype=_DTYPES[dtype]) for dtype, each in ENCODINGS[encoding]]
