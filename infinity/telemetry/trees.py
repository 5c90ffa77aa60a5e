"""Nested dictionaries of figures that can be serialized as JSON. Unknown values are omitted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def known(**values: Any) -> Tree:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a tree that any JSON parser accepts, with numbers rounded to about five significant digits."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)  # JSON cannot represent NaN and infinity, for example of a loss
        rounded = round(value, 1) if abs(value) >= 1000 else float(f"{value:.5g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value
