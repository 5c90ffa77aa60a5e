"""Reference implementation of `format.ENCODINGS` in torch, which defines their bits on every platform and device.

Other modules use `infinity.content.encoding`, which may run compiled kernels; the kernels are verified against this
module. All functions take and return flat tensors whose length is a multiple of `SHARD_ALIGNMENT`. The encoding of an
element depends only on its block of `SHARD_ALIGNMENT` elements, so a page can be encoded in pieces.

[Note: a split master needs 17 bits] The weight is the master rounded to the nearest bf16 value, with ties to even.
65537 masters round to an even weight (both ties go to it), and 65535 to an odd weight. Therefore 16 bits in addition to
the weight cannot distinguish all masters. The encoding stores the lower 16 bits and one more bit that records whether
the weight was rounded up. With this bit, the master is exact for all 2^32 bit patterns except for the payload of NaNs.
Ties are not rare: one in eight weights that come from fp16 is a tie.

[Note: moments are rounded stochastically] With beta2 = 0.999, a step decreases exp_avg_sq by at most about a thousandth
of its value, whereas half a unit in the last place of bf16 is two to four thousandths. If it were rounded to nearest,
exp_avg_sq would never decrease. An update therefore rounds up with the probability that makes the rounding unbiased.
The randomness is a hash of the value and the step, so it does not depend on the update schedule, the page layout, the
number of ranks, or the step at which the run was resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infinity.content.format import SHARD_ALIGNMENT
from infinity.content.halves import halves

MANTISSA = 23 - 3
"""Number of fp32 mantissa bits that an 8-bit code drops. It keeps only the upper three."""
LEAST_SIGNED, LEAST_UNSIGNED = 2.0**-16, 2.0**-32
"""Offsets that are added to |x| / scale, for blocks with and without a sign bit."""
REACH = 16 / 15 - 2**-20
"""Factor by which the largest magnitude of a block is multiplied before a larger scale is chosen. The largest code is
15/16 of the scale."""
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and factors of the hash that generates the noise."""
_LEAST_SCALE = 2.0**-126
_EXPONENT = 0x7F800000


def encode(values: torch.Tensor, encoding: str, step: int | None = None) -> tuple[torch.Tensor, ...]:
    """Return the components of fp32 values. For ``split``, the bf16 weights come first.

    Args:
        values: Values in fp32, shape (n,).
        encoding: Name of the encoding.
        step: Step of the update that produced the values, which seeds the stochastic rounding of moments. ``None``:
            round to nearest.
    """
    if encoding == "split":
        return _split(values)
    if encoding == "8bit":
        return _to_codes(values.view(-1, SHARD_ALIGNMENT), step)
    if step is None:
        return (values.to(torch.bfloat16),)
    bits = values.view(torch.int32)
    rounded = ((bits + _noise(bits, 16, step)) >> 16).to(torch.int16).view(torch.bfloat16)
    if (nan := values.isnan()).any():  # the sum overflows for some NaNs, which would become numbers
        rounded[nan] = values[nan].to(torch.bfloat16)
    return (rounded,)


def decode(components: Sequence[torch.Tensor], encoding: str) -> torch.Tensor:
    """Return fp32 values, as a new tensor of shape (n,), from the components that `encode` returned."""
    if encoding == "split":
        return _joined(*components)
    if encoding == "8bit":
        return _from_codes(*components)
    return components[0].float()


def _split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = master.to(torch.bfloat16)
    upper, lower = halves(master)
    rounded_up = np.packbits((upper.view(torch.int16) != weights.view(torch.int16)).numpy(), bitorder="little")
    return weights, lower, torch.from_numpy(rounded_up)


def _joined(weights: torch.Tensor, lower: torch.Tensor, rounded_up: torch.Tensor) -> torch.Tensor:
    master = torch.empty(len(weights))
    high, low = halves(master)
    low.copy_(lower)
    bits = torch.from_numpy(np.unpackbits(rounded_up.numpy(), bitorder="little"))
    torch.sub(weights.view(torch.int16), bits, out=high.view(torch.int16))
    return master


def _to_codes(blocks: torch.Tensor, step: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of blocks.

    A scale is a power of two. A code is |x| / scale + least as a float whose mantissa is reduced to three bits: 8 steps
    per octave, finer near zero, and exact at zero. Codes of blocks without a negative number have no sign bit, but
    cover twice as many octaves (32). The scale of such a block is stored negated.
    """
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    unsigned = low >= 0
    most = torch.maximum(high, -low) * REACH
    scale = ((most.view(torch.int32) & _EXPONENT).view(torch.float32) * 2).clamp_min_(_LEAST_SCALE)
    least, sign = torch.where(unsigned, LEAST_UNSIGNED, LEAST_SIGNED), torch.where(unsigned, 0, 128).int()
    bits = (blocks / scale).abs_().add_(least).view(torch.int32)
    bits += 1 << (MANTISSA - 1) if step is None else _noise(bits, MANTISSA, step)
    codes = bits.bitwise_right_shift_(MANTISSA).sub_(least.view(torch.int32) >> MANTISSA)
    codes = torch.minimum(codes, 255 - sign).add_((blocks.view(torch.int32) >> 31).bitwise_and_(sign))
    return codes.to(torch.uint8).view(-1), torch.where(unsigned, -scale, scale).to(torch.bfloat16).view(-1)


def _values_of_codes() -> torch.Tensor:
    """Return the values of the 256 codes for blocks with negative numbers, followed by the negated values for other
    blocks.
    """
    codes = torch.arange(256, dtype=torch.int32)
    signed, unsigned = (
        (((codes & mask) << MANTISSA) + torch.tensor(least).view(torch.int32)).view(torch.float32) - least
        for mask, least in ((127, LEAST_SIGNED), (255, LEAST_UNSIGNED))
    )
    return torch.cat([signed[:128], -signed[128:], -unsigned])


_VALUES = _values_of_codes()


def _from_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scale = scales.float().view(-1, 1)
    index = codes.view(-1, SHARD_ALIGNMENT).int().add_(256 * (scale < 0).int())
    return _VALUES.index_select(0, index.view(-1)).view_as(index).mul_(scale).view(-1)


def _noise(bits: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """Return `width` pseudorandom bits per element: a hash of its bits and the step.

    The hash is lowbias32 by C. Wellons, except that its shifts are arithmetic: `x` and `~x` get the same bits.
    """
    mixed = bits ^ seed(step)
    for shift, factor in MIX:
        mixed.bitwise_xor_(mixed >> shift).mul_(as_int32(factor))
    return mixed.bitwise_xor_(mixed >> 16).bitwise_and_((1 << width) - 1)


def seed(step: int) -> int:
    """Return the int32 seed for the noise of a step."""
    return as_int32(step * 0x9E3779B9)


def as_int32(value: int) -> int:
    """Return the lower 32 bits as a signed int32."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
