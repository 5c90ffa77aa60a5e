"""What plain data in a file must look like: declared once for every format, checked whole before anything is used.

A rule takes a value and returns what is to be used in its place; where the value is not what it should be, it raises a
`ValueError` that says where and what. Rules are bounded: time and memory are those of the value, depth is fixed.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

from infinity.content.format import ITEMSIZE

Rule = Callable[[Any], Any]

MOST = (1 << 63) - 1
_TUPLES = 4


def brief(value: Any) -> str:
    """Return a text about a value that is short, however long or deep the value is."""
    return reprlib.repr(value)[:100]


def refuse(value: Any, expected: str) -> ValueError:
    """Return the error about a value."""
    return ValueError(f"{brief(value)} is not {expected}")


def anything(value: Any) -> Any:
    """Any JSON."""
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(value, "true or false")
    return value


def integer(low: int, high: int = MOST, multiple: int = 1) -> Rule:
    """An integer from `low` to `high`."""
    expected = f"an integer from {low} to {high}" + (f" and a multiple of {multiple}" if multiple > 1 else "")

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high or value % multiple:
            raise refuse(value, expected)
        return value

    return check


def number(low: float = -MOST, high: float = MOST) -> Rule:
    """A finite number from `low` to `high`."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise refuse(value, f"a number from {low:g} to {high:g}")
        return value  # type: ignore[no-any-return]

    return check


def text(pattern: str = r"(?s:.*)") -> Rule:
    """A text that matches a pattern and can be written as UTF-8."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise refuse(value, f"a text like {pattern}" if compiled.pattern != r"(?s:.*)" else "a text")
        value.encode()
        return value

    return check


def one_of(*values: str) -> Rule:
    """One of these texts."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise refuse(value, f"one of {', '.join(map(repr, values))}")
        return value

    return check


def optional(rule: Rule) -> Rule:
    """Null, or what the rule says."""
    return lambda value: None if value is None else rule(value)


def index(value: Any) -> int:
    """A key that is a number in decimal, as JSON has no others."""
    return int(_index(value))


_index = text(r"0|[1-9][0-9]{0,17}")


def sequence(item: Rule, *, least: int = 0, most: int = MOST) -> Rule:
    """A list of items that all follow one rule, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise refuse(value, f"a list of {least} items or more" if most == MOST else f"a list of {least} to {most}")
        return tuple(_at(number, item, one) for number, one in enumerate(value))

    return check


def row(*rules: Rule) -> Rule:
    """A list with one item for every rule, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(rules):
            raise refuse(value, f"a list of {len(rules)}")
        return tuple(_at(number, rule, one) for number, (rule, one) in enumerate(zip(rules, value, strict=True)))

    return check


def table(key: Rule, item: Rule) -> Rule:
    """An object whose keys all follow one rule, and its values another, as a dict."""

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise refuse(value, "an object")
        return {_at("a key", key, name): _at(name, item, one) for name, one in value.items()}

    return check


def record(**rules: Rule) -> Rule:
    """An object with exactly these fields, as a dict."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(value, "an object")
        if value.keys() != rules.keys():
            lacking, unknown = sorted(rules.keys() - value.keys()), sorted(value.keys() - rules.keys())
            raise ValueError(f"fields lacking: {lacking}, unknown: {brief(unknown)}")
        return {name: _at(name, rule, value[name]) for name, rule in rules.items()}

    return check


def _at(place: object, rule: Rule, value: Any) -> Any:
    try:
        return rule(value)
    except ValueError as error:
        raise ValueError(f"{str(place)[:80]}: {error}") from None


def distinct(rule: Rule, what: str) -> Rule:
    """A sequence without repetitions."""

    def check(value: Any) -> Any:
        found = rule(value)
        if len(set(found)) != len(found):
            raise ValueError(f"{what} are there twice")
        return found

    return check


_LEAVES: dict[str, Rule] = {name: lambda value: _plain_number(value) for name in ITEMSIZE}
_LEAVES |= {f"int{8 * n}": integer(-(1 << 8 * n - 1), (1 << 8 * n - 1) - 1) for n in (1, 2, 4, 8)}
_LEAVES |= {"uint8": integer(0, 255), "bool": flag}
_TENSOR = record(tensor=one_of(*ITEMSIZE), shape=sequence(integer(0, 1 << 15), most=4), value=anything)
_NESTED = {name: record(**{name: sequence(anything)}) for name in ("tuple", "list")}
_NESTED["dict"] = record(dict=table(text(), anything))


def setting(value: Any, depth: int = _TUPLES) -> Any:
    """A setting or scalar of an optimizer: null, flag, number, text, small tensor; tuple, list, dict of them."""
    if isinstance(value, dict) and "tensor" in value:
        found = _TENSOR(value)
        _nested(found["value"], found["shape"], _LEAVES[found["tensor"]])
    elif isinstance(value, dict):
        kind = next((kind for kind in _NESTED if kind in value), "tuple")
        items = _NESTED[kind](value)[kind]
        if not depth:
            raise ValueError(f"tuples are nested more than {_TUPLES} deep")
        for place, item in items.items() if kind == "dict" else enumerate(items):
            _at(place, lambda item: setting(item, depth - 1), item)
    elif isinstance(value, str):
        text()(value)
    elif value is not None and not isinstance(value, bool):
        _plain_number(value)
    return value


def _plain_number(value: Any) -> Any:
    if type(value) is not float and (type(value) is not int or abs(value) > MOST):
        raise refuse(value, "a number")
    return value


def _nested(value: Any, shape: tuple[int, ...], leaf: Rule) -> None:
    if not shape:
        leaf(value)
    elif not isinstance(value, list) or len(value) != shape[0]:
        raise refuse(value, f"a list of {shape[0]}")
    else:
        for item in value:
            _nested(item, shape[1:], leaf)
