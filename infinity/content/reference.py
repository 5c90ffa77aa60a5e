"""The arithmetic of `format.ENCODINGS` in torch: what defines their bits, on every platform and device.

`infinity.content.encoding` has the functions for all others, which may run compiled; what is compiled is compared with
these. All take and return flat tensors whose length is a multiple of `SHARD_ALIGNMENT`; what happens to an element
depends on its block of so many elements only, so a page can be encoded in any pieces.

[Note: a split master needs 17 bits] The weight is the master rounded to bf16, to nearest, ties to even: an even one is
the rounding of 65537 masters (both ties go to it), an odd one of 65535. So no 16 bits beside the weight can tell all
masters apart. Stored are the lower 16 bits and one bit more, whether the weight was rounded up; with it the master is
exact for all 2^32 patterns but the payload of NaNs. Ties are no rarity: of weights that come from fp16, one in eight.

[Note: moments are rounded at random] With beta2 = 0.999 a step changes exp_avg_sq by a thousandth of itself or less,
and half a unit in the last place of bf16 is two to four thousandths: rounded to nearest it would never fall. So an
update rounds up with the probability with which nothing is lost on average. The randomness is a hash of the value and
the step: the same whatever the update schedule, the pages, the number of ranks and wherever the run was resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infinity.content.format import SHARD_ALIGNMENT
from infinity.content.halves import halves

MANTISSA = 23 - 3
"""Bits of fp32 behind the three that an 8-bit code keeps."""
LEAST_SIGNED, LEAST_UNSIGNED = 2.0**-16, 2.0**-32
"""What is added to |x| / scale, by the kind of the block."""
REACH = 16 / 15 - 2**-20
"""The largest number of a block times this is below its scale: the greatest code is 15/16."""
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and factors of the hash that is the noise."""
_LEAST_SCALE = 2.0**-126
_EXPONENT = 0x7F800000


def encode(values: torch.Tensor, encoding: str, step: int | None = None) -> tuple[torch.Tensor, ...]:
    """Return the components of fp32 values; for ``split``, the bf16 weights come first.

    Args:
        values: fp32, shape (n,).
        step: of the update that made them, whose moments are rounded at random; None rounds to nearest.
    """
    if encoding == "split":
        return _split(values)
    if encoding == "8bit":
        return _to_codes(values.view(-1, SHARD_ALIGNMENT), step)
    if step is None:
        return (values.to(torch.bfloat16),)
    bits = values.view(torch.int32)
    rounded = ((bits + _noise(bits, 16, step)) >> 16).to(torch.int16).view(torch.bfloat16)
    if (nan := values.isnan()).any():  # of some the sum overflows, into numbers
        rounded[nan] = values[nan].to(torch.bfloat16)
    return (rounded,)


def decode(components: Sequence[torch.Tensor], encoding: str) -> torch.Tensor:
    """Return fp32 values, a new tensor of shape (n,), from what `encode` returned."""
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
    """Return codes and scales of blocks.

    A scale is a power of two. A code is what is left of |x| / scale + least, a float, when only three bits of its
    mantissa are kept: 8 steps to the octave, finer near zero, which is exact. Blocks without a negative number have
    no sign bit but twice as many octaves, 32; their scale is stored with a minus.
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
    """Return what the 256 codes of a block with negative numbers stand for, then those of one without, negated."""
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
    """Return `width` random bits for each element: a hash of its bits and the step.

    It is lowbias32 of C. Wellons, but that its shifts are arithmetic: `x` and `~x` get the same bits.
    """
    mixed = bits ^ seed(step)
    for shift, factor in MIX:
        mixed.bitwise_xor_(mixed >> shift).mul_(as_int32(factor))
    return mixed.bitwise_xor_(mixed >> 16).bitwise_and_((1 << width) - 1)


def seed(step: int) -> int:
    """Return the int32 that the noise of a step starts from."""
    return as_int32(step * 0x9E3779B9)


def as_int32(value: int) -> int:
    """Return the int32 of the lower 32 bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
