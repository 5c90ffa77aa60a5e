"""Validation of plain data: rules that declare settings, manifests, stats files and requests to the daemon.

A *rule* takes a value from TOML or JSON and returns the value to use in its place. If the value is invalid, the rule
raises a `Mismatch` with the place, value and problem: ``pages.0.1 = 512 is not a multiple of 4096``. Rules are
composed of other rules: `record` creates objects of a class, `sequence` creates tuples, and `table` creates dicts.
The cost of validation is bounded: time and memory are proportional to the size of the value, and the recursion depth
is the depth of the rule.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from infinity.units import LARGEST, size_of

Rule = Callable[[Any], Any]
Make = Callable[..., Any]

MOST = LARGEST
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


def brief(value: Any) -> str:
    """Return a representation of a value in at most 100 characters, however long or deeply nested the value is."""
    return _brief.repr(value)[:100]


class Mismatch(ValueError):
    """A value violates a rule.

    Attributes:
        value: the value, as returned by `brief`.
        problem: the violation, a phrase that follows the value.
        place: path from the outermost value: keys and positions, joined by dots.
    """

    def __init__(self, value: Any, problem: str) -> None:
        super().__init__(value, problem)
        self.value, self.problem, self.place = brief(value), problem, ""

    def __str__(self) -> str:
        return f"{self.place} = {self.value} {self.problem}" if self.place else f"{self.value} {self.problem}"


class UnknownKey(Mismatch):
    """A record contains a key that is not one of the `known` fields."""

    def __init__(self, value: Any, key: str, known: Collection[str]) -> None:
        self.key, self.known = key, known
        listed = ", ".join(known) or "none"
        super().__init__(value, f"has the unknown key {brief(key)}{did_you_mean(key, known)} (known: {listed})")


def at(place: object, rule: Rule, value: Any) -> Any:
    """Apply a rule to the value at a place. Raises `Mismatch` with `place` prepended to its path."""
    try:
        return rule(value)
    except Mismatch as error:
        error.place = f"{str(place)[:80]}.{error.place}" if error.place else str(place)[:80]
        raise


def did_you_mean(value: Any, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean X?`` if a known string is similar to the value, otherwise an empty string."""
    near = difflib.get_close_matches(value[:80], known, n=1, cutoff=cutoff) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def anything(value: Any) -> Any:
    """Accept any JSON value."""
    return value


def flag(value: Any) -> bool:
    """Accept a bool.

    Raises:
        Mismatch: if the value is not a bool.
    """
    if not isinstance(value, bool):
        raise Mismatch(value, "must be true or false")
    return value


def integer(low: int, high: int = MOST, multiple: int = 1) -> Rule:
    """Return a rule for an integer from `low` to `high` (inclusive) that is a multiple of `multiple`."""

    def check(value: Any) -> int:
        if type(value) is not int:
            raise Mismatch(value, "must be an integer")
        if value < low:
            raise Mismatch(value, f"is below the minimum of {low}")
        if value > high:
            raise Mismatch(value, f"is above the maximum of {high}")
        if value % multiple:
            raise Mismatch(value, f"is not a multiple of {multiple}")
        return value

    return check


def size(low: int, high: int) -> Rule:
    """Return a rule for a size from `low` to `high` bytes (inclusive), as an integer or as text such as ``"64MiB"``."""
    bounds = integer(low, high)

    def check(value: Any) -> Any:
        try:
            return bounds(size_of(value))
        except ValueError as error:
            raise Mismatch(value, error.args[-1]) from None

    return check


def number(low: float = -MOST, high: float = MOST) -> Rule:
    """Return a rule for a finite number from `low` to `high` (inclusive)."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise Mismatch(value, f"must be a number from {low:g} to {high:g}")
        return value  # type: ignore[no-any-return]

    return check


def text(pattern: str = "") -> Rule:
    """Return a rule for a string that can be encoded as UTF-8 and, if `pattern` is set, matches it completely."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or (pattern and not compiled.fullmatch(value)):
            raise Mismatch(value, f"must be a string that matches {pattern}" if pattern else "must be a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Mismatch(value, "must be valid Unicode") from None
        return value

    return check


def printable(least: int = 0, most: int = MOST) -> Rule:
    """Return a rule for a string of `least` to `most` printable characters.

    Control characters and lone surrogates are not printable.
    """
    length = f" of {least} to {most} characters" if most < MOST else ""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
            raise Mismatch(value, f"must be printable text{length}")
        return value

    return check


def one_of(*values: str) -> Rule:
    """Return a rule for one of several strings. The error suggests the most similar one."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise Mismatch(value, f"is not one of {', '.join(map(repr, values))}{did_you_mean(value, values)}")
        return value

    return check


def optional(rule: Rule) -> Rule:
    """Return a rule that accepts null, and any value that `rule` accepts."""
    return lambda value: None if value is None else rule(value)


def index(value: Any) -> int:
    """Accept a key that is a non-negative decimal integer, because JSON keys are strings. Returns the integer."""
    return int(_index(value))


_index = text(r"0|[1-9][0-9]{0,17}")


def sequence(item: Rule, *, least: int = 0, most: int = MOST) -> Rule:
    """Return a rule for a list of `least` to `most` items, each validated by `item`. The result is a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise Mismatch(
                value, f"must be a list of {least} " + ("or more items" if most == MOST else f"to {most} items")
            )
        return tuple(at(position, item, one) for position, one in enumerate(value))

    return check


def row(*rules: Rule) -> Rule:
    """Return a rule for a list with exactly one item per rule. The result is a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(rules):
            raise Mismatch(value, f"must be a list of {len(rules)} items")
        return tuple(at(place, rule, one) for place, (rule, one) in enumerate(zip(rules, value, strict=True)))

    return check


def table(key: Rule, item: Rule) -> Rule:
    """Return a rule for an object whose keys are validated by `key` and values by `item`. The result is a dict."""

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise Mismatch(value, "must be an object")
        return {at("a key", key, name): at(name, item, one) for name, one in value.items()}

    return check


def record(make: Make = dict, /, *, lacking: Collection[str] = (), more: bool = False, **rules: Rule) -> Rule:
    """Return a rule for an object with named fields, which are passed to `make` as keyword arguments.

    Args:
        make: constructor of the result, for example a dataclass.
        lacking: names of optional fields.
        more: ignore fields without a rule instead of raising an error.
        rules: rules by field name.
    """
    needed = [name for name in rules if name not in lacking]

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch(value, f"must be a table with {', '.join(rules)}")
        for name in () if more else value.keys() - rules.keys():
            raise UnknownKey(value, name, rules)
        for name in needed:
            if name not in value:
                raise Mismatch(value, f"lacks the key {name!r}")
        return make(**{name: at(name, rules[name], value[name]) for name in rules if name in value})

    return check


def distinct(rule: Rule) -> Rule:
    """Return a rule for a sequence without duplicates."""

    def check(value: Any) -> Any:
        found = rule(value)
        if len(set(found)) != len(found):
            raise Mismatch(value, "contains a duplicate item")
        return found

    return check
