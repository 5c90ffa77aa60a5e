"""Conversion of sizes and bandwidths: numbers in bytes in the code, text such as ``"64MiB"`` for people."""

from __future__ import annotations

import re
from decimal import Decimal

from infinity.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
LARGEST = 2**63 - 1  # largest file size, and largest integer in TOML

_SUFFIX = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": KIB,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": 10**9, "gb": 10**9, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_BITS = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]?)(?:be|bps|bit/s|bits/s)\s*", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([a-zA-Z]{0,3})\s*", re.ASCII)


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Return a size in bytes, given as an integer or as text such as ``"64MiB"`` or ``"1.5 GB"``.

    Raises:
        ConfigError: if the value is not a size. The message contains `name` and the value.
    """
    try:
        return size_of(value)
    except ValueError as error:
        raise ConfigError(f"{name} = {value!r:.80} {error}") from None


def size_of(value: object) -> int:
    """Return a size in bytes, like `parse_size`.

    Raises:
        ValueError: if the value is not a size. The message is a phrase that follows the value.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        factor = _SUFFIX.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError("is not a size; use a number of bytes or text such as '64MiB' or '2GiB'")
        size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
        if size == 0 and float(match[1]):
            raise ValueError("is less than a byte; use a number of bytes or text such as '64MiB' or '2GiB'")
    if size < 0:
        raise ValueError("is negative; use a number of bytes or text such as '64MiB' or '2GiB'")
    if size > LARGEST:
        raise ValueError("exceeds the maximum of 2^63 - 1 bytes; use a size such as '64MiB' or '2GiB'")
    return size


def rate_of(text: str) -> float:
    """Return a bandwidth in bytes per second.

    Args:
        text: A number of bytes per second such as ``"25e9"``, a size with or without ``"/s"`` such as ``"1GiB/s"``, or
            a number of bits per second such as ``"100Gbit/s"`` or ``"10GbE"``.

    Raises:
        ValueError: if the text is not a bandwidth.
    """
    if bits := _BITS.fullmatch(text):
        return float(bits[1]) * _SUFFIX[bits[2].lower()] / 8
    try:
        return float(text)
    except ValueError:
        return float(size_of(text.strip().removesuffix("/s")))


def format_size(size: float) -> str:
    """Return a size in binary units with three significant digits, such as ``"1.25 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{_digits(size)} {unit}"
        size /= 1024
    return f"{_digits(size)} TiB"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_number(value: float) -> str:
    """Return a number with three significant digits, or with all integer digits, and never with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{Decimal(f'{value:.3g}'):f}"


def format_setting(size: int) -> str:
    """Return a size as text that `parse_size` reads back as at least `size`, for messages that suggest a value."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= 10 * factor or size % factor == 0:
            return f"{-(-size // factor)}{unit}"
    return str(size)


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """Return the largest multiple of `alignment` that is at most `value`."""
    return value // alignment * alignment
