"""What plain data must look like: settings, manifests, stats pages and requests to the daemon are declared with this.

A *rule* takes a value of TOML or JSON and returns what is to be used in its place; where the value is not what it
should be, it raises a `Mismatch` with place, value and what is wrong: ``pages.0.1 = 512 is not a multiple of 4096``.
Rules are made of rules: `record` makes objects of a class, `sequence` tuples, `table` dicts. They are bounded: time and
memory are those of the value, depth is that of the rule.
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
    """Return a text about a value of at most 100 characters, however long or deep the value is."""
    return _brief.repr(value)[:100]


class Mismatch(ValueError):
    """A value is not what it should be.

    Attributes:
        value: what was found, as `brief` shows it.
        problem: what is wrong with it, a phrase that follows the value.
        place: keys and positions that lead to the value from the outside, joined by dots.
    """

    def __init__(self, value: Any, problem: str) -> None:
        super().__init__(value, problem)
        self.value, self.problem, self.place = brief(value), problem, ""

    def __str__(self) -> str:
        return f"{self.place} = {self.value} {self.problem}" if self.place else f"{self.value} {self.problem}"


class UnknownKey(Mismatch):
    """A record has a key that none of its fields has: `key`. `known` are those that there are."""

    def __init__(self, value: Any, key: str, known: Collection[str]) -> None:
        self.key, self.known = key, known
        listed = ", ".join(known) or "none"
        super().__init__(value, f"has the unknown key {brief(key)}{nearest(key, known)} (known: {listed})")


def at(place: object, rule: Rule, value: Any) -> Any:
    """Return what a rule makes of the value at a place. Raises `Mismatch`, whose place then begins with this one."""
    try:
        return rule(value)
    except Mismatch as error:
        error.place = f"{str(place)[:80]}.{error.place}" if error.place else str(place)[:80]
        raise


def nearest(value: Any, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean X?`` if a known text is near the value, else nothing."""
    near = difflib.get_close_matches(value[:80], known, n=1, cutoff=cutoff) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def anything(value: Any) -> Any:
    """Any JSON."""
    return value


def flag(value: Any) -> bool:
    """True or false. Raises `Mismatch`."""
    if not isinstance(value, bool):
        raise Mismatch(value, "must be true or false")
    return value


def integer(low: int, high: int = MOST, multiple: int = 1) -> Rule:
    """A whole number from `low` to `high`, both included, and a multiple of `multiple`."""

    def check(value: Any) -> int:
        if type(value) is not int:
            raise Mismatch(value, "must be a whole number")
        if value < low:
            raise Mismatch(value, f"is below the minimum of {low}")
        if value > high:
            raise Mismatch(value, f"is above the maximum of {high}")
        if value % multiple:
            raise Mismatch(value, f"is not a multiple of {multiple}")
        return value

    return check


def size(low: int, high: int) -> Rule:
    """A size in bytes from `low` to `high`, as an integer or as text such as ``"64MiB"``."""
    bounds = integer(low, high)

    def check(value: Any) -> Any:
        try:
            return bounds(size_of(value))
        except ValueError as error:
            raise Mismatch(value, error.args[-1]) from None

    return check


def number(low: float = -MOST, high: float = MOST) -> Rule:
    """A finite number from `low` to `high`, both included."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise Mismatch(value, f"must be a number from {low:g} to {high:g}")
        return value  # type: ignore[no-any-return]

    return check


def text(pattern: str = "") -> Rule:
    """A text that matches all of a pattern, if there is one, and can be written as UTF-8."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or (pattern and not compiled.fullmatch(value)):
            raise Mismatch(value, f"must be a text like {pattern}" if pattern else "must be a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Mismatch(value, "must be a text of Unicode") from None
        return value

    return check


def printable(least: int = 0, most: int = MOST) -> Rule:
    """A text of `least` to `most` characters that can be shown in a line: no control characters, no lone surrogates."""
    length = f" of {least} to {most} characters" if most < MOST else ""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
            raise Mismatch(value, f"must be printable text{length}")
        return value

    return check


def one_of(*values: str) -> Rule:
    """One of these texts; where it is none, the nearest is named."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise Mismatch(value, f"is not one of {', '.join(map(repr, values))}{nearest(value, values)}")
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
    """A list of `least` to `most` items that all follow one rule, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise Mismatch(value, f"must be a list of {least} " + ("items or more" if most == MOST else f"to {most}"))
        return tuple(at(position, item, one) for position, one in enumerate(value))

    return check


def row(*rules: Rule) -> Rule:
    """A list with one item for every rule, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(rules):
            raise Mismatch(value, f"must be a list of {len(rules)}")
        return tuple(at(place, rule, one) for place, (rule, one) in enumerate(zip(rules, value, strict=True)))

    return check


def table(key: Rule, item: Rule) -> Rule:
    """An object whose keys all follow one rule, and its values another, as a dict."""

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise Mismatch(value, "must be an object")
        return {at("a key", key, name): at(name, item, one) for name, one in value.items()}

    return check


def record(make: Make = dict, /, *, lacking: Collection[str] = (), more: bool = False, **rules: Rule) -> Rule:
    """An object whose fields follow these rules, given to `make` by their names.

    Args:
        make: a dataclass, for example.
        lacking: fields that need not be there.
        more: pass over fields that have no rule; else they are refused.
        rules: of the fields.
    """
    needed = [name for name in rules if name not in lacking]

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch(value, f"must be a table of {', '.join(rules)}")
        for name in () if more else value.keys() - rules.keys():
            raise UnknownKey(value, name, rules)
        for name in needed:
            if name not in value:
                raise Mismatch(value, f"needs the key {name!r}")
        return make(**{name: at(name, rules[name], value[name]) for name in rules if name in value})

    return check


def distinct(rule: Rule) -> Rule:
    """A sequence without repetitions."""

    def check(value: Any) -> Any:
        found = rule(value)
        if len(set(found)) != len(found):
            raise Mismatch(value, "has an item twice")
        return found

    return check
