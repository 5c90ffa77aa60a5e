"""Tests of the text form of numbers and sizes in output for people."""

from __future__ import annotations

import pytest

from infinity.units import format_number, format_setting, parse_size


@pytest.mark.parametrize(
    ("value", "text"),
    [(10390.4, "10,390"), (999.6, "1,000"), (99.96, "100"), (0.0005, "0.0005"), (1.5e-7, "0.00000015"), (0.0, "0")],
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("size", [1, 65536, (1 << 20) + 1, 37 << 20, (10 << 30) + 5])
def test_suggested_sizes_are_sufficient(size: int) -> None:
    assert size <= parse_size(format_setting(size), name="size") <= 1.1 * size
