"""Encodings as element-wise loops for numba, which produce the same bits as `infinity.content.reference` in one pass.

Only `infinity.content.compiled` imports this module, and it handles the case that numba is not installed. All kernels
are compiled when the module is imported, for the declared dtypes. They release the GIL and run on the calling thread.
Floats are also passed as a second, integer view of the same memory, so that no cast makes a copy.

[Note: fallback to the reference] A NaN has many bit patterns, and the pattern that an operation produces depends on the
processor and on torch. An encoding kernel therefore reports whether it encountered a NaN, in which case the reference
encodes the whole input. The same happens if the reciprocal of a scale would be denormal, and on threads that flush
denormals to zero.

[Note: integers are narrowed] numba computes with 64-bit integers unless narrower ones are declared, and does not wrap
around at 32 bits. The casts make the width explicit, so that LLVM can use vectors of 32-bit lanes. Loops have a
constant trip count for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from infinity.content.format import SHARD_ALIGNMENT
from infinity.content.reference import LEAST_SIGNED, LEAST_UNSIGNED, MANTISSA, MIX, REACH, as_int32

_BLOCK: Final = SHARD_ALIGNMENT
_MANTISSA: Final = MANTISSA
_REACH: Final = np.float32(REACH)
_SIGNED, _UNSIGNED = np.float32(LEAST_SIGNED), np.float32(LEAST_UNSIGNED)
_SIGNED_BITS, _UNSIGNED_BITS = (int(least.view(np.int32)) for least in (_SIGNED, _UNSIGNED))
_FIRST, _SECOND = (np.int32(as_int32(factor)) for _, factor in MIX)
_FIRST_SHIFT, _SECOND_SHIFT = (shift for shift, _ in MIX)
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITY: Final = 0x7F800000  # also the mask of the exponent
_ONE: Final = np.int32(1 << 23)  # one in the exponent field
_INVERTED: Final = np.int32(254 << 23)  # minus the bits of a power of two, this gives the bits of its reciprocal
_LARGE: Final = 252 << 23  # bits of an upper bound: the scales of smaller numbers have normal reciprocals
_TWO: Final = np.float32(2.0)


def _reinterpreted(to: types.Type) -> Any:
    """Return a function that reinterprets the bits of a number as another type."""

    @intrinsic
    def reinterpret(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> Any:
            return builder.bitcast(given[0], context.get_value_type(to))

        return to(value), generate

    return reinterpret


_float_of = _reinterpreted(types.float32)
_bits_of = _reinterpreted(types.int32)


def _mixed(bits: Any, seed: Any) -> Any:
    mixed = np.int32(bits ^ seed)
    mixed = np.int32(np.int32(mixed ^ (mixed >> _FIRST_SHIFT)) * _FIRST)
    mixed = np.int32(np.int32(mixed ^ (mixed >> _SECOND_SHIFT)) * _SECOND)
    return np.int32(mixed ^ (mixed >> 16))


_noise = njit(types.int32(types.int32, types.int32))(_mixed)


def _encode_bfloat16(bits: Any, rounded: Any, seed: Any) -> Any:
    nan = np.int32(0)
    for i in range(bits.size):
        value = bits[i]
        nan |= np.int32((value & _MAGNITUDE) > _INFINITY)
        rounded[i] = np.int32(value + np.int32(_noise(value, seed) & 0xFFFF)) >> 16
    return nan == 0


def _encode_split(bits: Any, weights: Any, lower: Any, rounded_up: Any) -> Any:
    nan = np.int32(0)
    for i in range(bits.size):
        value = bits[i]
        nan |= np.int32((value & _MAGNITUDE) > _INFINITY)
        weights[i] = np.int16(np.int32(value + np.int32(0x7FFF) + ((value >> 16) & 1)) >> 16)
        lower[i] = np.int16(value)
    for i in range(rounded_up.size):
        eight = 0
        for j in range(8):
            k = 8 * i + j
            eight |= ((np.int32(weights[k]) ^ (bits[k] >> 16)) & 1) << j
        rounded_up[i] = eight
    return nan == 0


def _decode_split(weights: Any, lower: Any, rounded_up: Any, bits: Any) -> None:
    for i in range(rounded_up.size):
        eight = rounded_up[i]
        for j in range(8):
            k = 8 * i + j
            upper = np.int32(weights[k]) - np.int32((eight >> j) & 1)
            bits[k] = np.int32(upper << 16) | (np.int32(lower[k]) & 0xFFFF)


def _encode_8bit(values: Any, bits: Any, codes: Any, scales: Any, seed: Any, denormal: Any) -> Any:
    if denormal * _TWO == 0:
        return False
    for block in range(scales.size):
        start = block * _BLOCK
        most, negative = np.int32(0), np.uint32(0)
        for j in range(_BLOCK):
            value = bits[start + j]
            most = max(most, np.int32(value & _MAGNITUDE))
            negative |= np.uint32(np.uint32(value) > np.uint32(0x80000000))
        if most >= _LARGE:
            return False
        signed = negative != 0
        scale = _bits_of(np.float32(_float_of(np.int32(most)) * _REACH)) & _INFINITY
        scale = np.int32(scale + _ONE)
        inverse = _float_of(np.int32(_INVERTED - scale))
        least = _SIGNED if signed else _UNSIGNED
        lowest = np.int32((_SIGNED_BITS if signed else _UNSIGNED_BITS) >> _MANTISSA)
        sign = np.int32(128 if signed else 0)
        highest = np.int32(255 - sign)
        for j in range(_BLOCK):
            i = start + j
            value = _bits_of(np.float32(abs(values[i] * inverse) + least))
            code = np.int32(value + np.int32(_noise(value, seed) & ((1 << _MANTISSA) - 1))) >> _MANTISSA
            code = min(np.int32(code - lowest), highest)
            codes[i] = np.uint8(code + np.int32(np.int32(bits[i] >> 31) & sign))
        scales[block] = np.int16((scale >> 16) | (0 if signed else -0x8000))
    return True


def _decode_8bit(codes: Any, scales: Any, values: Any) -> None:
    for block in range(scales.size):
        start = block * _BLOCK
        scale = _float_of(np.int32(np.int32(scales[block]) << 16))
        unsigned = scale < 0
        least = _UNSIGNED if unsigned else _SIGNED
        lowest = np.int32(_UNSIGNED_BITS if unsigned else _SIGNED_BITS)
        mask = np.int32(255 if unsigned else 127)
        sign = np.int32(128 if unsigned else 0)  # negates all values, because the scale is negated, too
        for j in range(_BLOCK):
            code = np.int32(codes[start + j])
            value = np.float32(_float_of(np.int32(np.int32((code & mask) << _MANTISSA) + lowest)) - least)
            flipped = np.int32(_bits_of(value) ^ np.int32(((code & ~mask) | sign) << 24))
            values[start + j] = _float_of(flipped) * scale


def _compiled(kernel: Callable[..., Any], result: types.Type, *arguments: types.Type) -> Callable[..., Any]:
    compiled: Callable[..., Any] = njit(result(*arguments), nogil=True)(kernel)
    return compiled


def _each(of: types.Type) -> types.Type:
    return types.Array(of, 1, "C")


_BITS, _HALF, _BYTE, _FLOAT = (_each(kind) for kind in (types.int32, types.int16, types.uint8, types.float32))

encode_bfloat16 = _compiled(_encode_bfloat16, types.boolean, _BITS, _HALF, types.int32)
encode_split = _compiled(_encode_split, types.boolean, _BITS, _HALF, _HALF, _BYTE)
decode_split = _compiled(_decode_split, types.void, _HALF, _HALF, _BYTE, _BITS)
encode_8bit = _compiled(_encode_8bit, types.boolean, _FLOAT, _BITS, _BYTE, _HALF, types.int32, types.float32)
decode_8bit = _compiled(_decode_8bit, types.void, _BYTE, _HALF, _FLOAT)
