"""Tests of the text form of numbers, sizes and bandwidths."""

from __future__ import annotations

import pytest

from infinity.units import format_number, format_setting, parse_size, rate_of


@pytest.mark.parametrize(
    ("value", "text"),
    [(10390.4, "10,390"), (999.6, "1,000"), (99.96, "100"), (0.0005, "0.0005"), (1.5e-7, "0.00000015"), (0.0, "0")],
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("size", [1, 65536, (1 << 20) + 1, 37 << 20, (10 << 30) + 5])
def test_suggested_sizes_are_sufficient(size: int) -> None:
    assert size <= parse_size(format_setting(size), name="size") <= 1.1 * size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25e9", 25e9), ("0", 0), ("10GbE", 1.25e9), ("2.5GbE", 312.5e6), ("100Gbit/s", 12.5e9), ("400 Mbit/s", 50e6),
        ("800Gbps", 100e9), ("1GiB/s", 1 << 30), ("1.5 GB/s", 1.5e9), ("7GB", 7e9),
    ],
)  # fmt: skip
def test_bandwidths_are_in_bytes_per_second(text: str, rate: float) -> None:
    """A network's name and bits per second are divided by eight."""
    assert rate_of(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "10G/bE", "GbE", "-10GbE", "10GbE/s", "1e3GiB/s", "10 G bit/s"])
def test_malformed_bandwidths_raise(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        rate_of(text)
