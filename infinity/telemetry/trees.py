"""Figures as trees that become JSON: what is not known is left out, and no number breaks a reader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def known(**values: Any) -> Tree:
    """Return those values that are known."""
    return {name: value for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a tree that every reader of JSON takes, with no more digits than are looked at."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)  # a loss may be: JSON has no such numbers, so they are texts
        rounded = round(value, 1) if abs(value) >= 1000 else float(f"{value:.5g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value
