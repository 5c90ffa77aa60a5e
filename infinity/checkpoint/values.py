"""Validation of optimizer settings and scalars in a manifest. `model_state` converts them to and from Python values."""

from __future__ import annotations

from typing import Any

from infinity.content.format import ITEMSIZE
from infinity.schema import MOST, Mismatch, Rule, anything, at, flag, integer, one_of, record, sequence, table, text

_TUPLES = 4  # maximum nesting of tuples, lists and dicts


def setting(value: Any, depth: int = _TUPLES) -> Any:
    """Validate an optimizer setting or scalar: null, a bool, a number, a string, a small tensor, or a collection of
    these.

    Raises:
        Mismatch: if the value has an unsupported type or is nested too deeply.
    """
    if isinstance(value, dict) and "tensor" in value:
        found = _TENSOR(value)
        _nested(found["value"], found["shape"], _LEAVES[found["tensor"]])
    elif isinstance(value, dict):
        kind = next((kind for kind in _NESTED if kind in value), "tuple")
        items = _NESTED[kind](value)[kind]
        if not depth:
            raise Mismatch(value, f"is nested more than {_TUPLES} levels deep")
        for place, item in items.items() if kind == "dict" else enumerate(items):
            at(place, lambda item: setting(item, depth - 1), item)
    elif isinstance(value, str):
        text()(value)
    elif value is not None and not isinstance(value, bool):
        _plain_number(value)
    return value


def _plain_number(value: Any) -> Any:
    if type(value) is not float and (type(value) is not int or abs(value) > MOST):
        raise Mismatch(value, "must be a number")
    return value


def _nested(value: Any, shape: tuple[int, ...], leaf: Rule) -> None:
    if not shape:
        leaf(value)
    elif not isinstance(value, list) or len(value) != shape[0]:
        raise Mismatch(value, f"must be a list of length {shape[0]}")
    else:
        for item in value:
            _nested(item, shape[1:], leaf)


_LEAVES: dict[str, Rule] = dict.fromkeys(ITEMSIZE, _plain_number)
_LEAVES |= {f"int{8 * n}": integer(-(1 << 8 * n - 1), (1 << 8 * n - 1) - 1) for n in (1, 2, 4, 8)}
_LEAVES |= {"uint8": integer(0, 255), "bool": flag}
_TENSOR = record(tensor=one_of(*ITEMSIZE), shape=sequence(integer(0, 1 << 15), most=4), value=anything)
_ITEMS = sequence(anything)
_NESTED = {"tuple": record(tuple=_ITEMS), "list": record(list=_ITEMS), "dict": record(dict=table(text(), anything))}
