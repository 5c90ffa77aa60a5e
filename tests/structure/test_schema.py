"""Tests of validation rules for plain data: settings, manifests, stats files and requests share one form of errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from infinity import schema
from infinity.schema import Mismatch, UnknownKey, brief, integer, one_of, record, row, sequence, table, text


@dataclass(frozen=True)
class Drive:
    """Example record."""

    name: str
    slots: tuple[int, ...]
    spare: int = 0


DRIVES = table(
    text(), record(Drive, lacking=("spare",), name=text("[a-z]+"), slots=sequence(integer(1, 9)), spare=integer(0))
)


def test_records_become_dataclasses() -> None:
    """Lists become tuples, and missing optional fields take their defaults."""
    assert DRIVES({"a": {"name": "x", "slots": [1, 2]}}) == {"a": Drive("x", (1, 2))}


def test_errors_report_place_value_and_problem(subtests: pytest.Subtests) -> None:
    for rule, value, message in [
        (DRIVES, {"a": {"name": "x", "slots": [1, 0]}}, "a.slots.1 = 0 is below the minimum of 1"),
        (DRIVES, {"a": {"name": "x", "slots": [10]}}, "a.slots.0 = 10 is above the maximum of 9"),
        (DRIVES, {"a": {"name": "x", "slots": [True]}}, "a.slots.0 = True must be an integer"),
        (DRIVES, {"a": {"name": "X", "slots": []}}, "a.name = 'X' must be a string that matches [a-z]+"),
        (DRIVES, {"a": {"name": "x"}}, "a = {'name': 'x'} lacks the key 'slots'"),
        (DRIVES, {"a": 5}, "a = 5 must be a table with name, slots, spare"),
        (DRIVES, {"\ud800": {}}, r"a key = '\ud800' must be valid Unicode"),
        (integer(0, multiple=4), 6, "6 is not a multiple of 4"),
        (one_of("threads", "io_uring"), "iouring", "not one of 'threads', 'io_uring'; did you mean io_uring?"),
        (schema.number(0, 1), float("nan"), "nan must be a number from 0 to 1"),
        (schema.size(4096, 1 << 20), "2MiB", "'2MiB' is above the maximum of 1048576"),
        (schema.size(0, 1 << 20), "2 parsecs", "'2 parsecs' is not a size"),
        (schema.printable(1, 4), "a\nb", r"'a\nb' must be printable text of 1 to 4 characters"),
        (schema.distinct(sequence(text())), ["a", "a"], "['a', 'a'] contains a duplicate item"),
        (row(integer(0), text()), [1], "[1] must be a list of 2 items"),
    ]:
        with subtests.test(message):
            with pytest.raises(Mismatch) as caught:
                rule(value)
            assert message in str(caught.value)


def test_an_unknown_key_error_suggests_the_nearest_key() -> None:
    """The exception carries the place of the record, so that callers can search other records for the key."""
    with pytest.raises(UnknownKey, match=r"a = .* has the unknown key 'slot'; did you mean slots\?") as caught:
        DRIVES({"a": {"name": "x", "slots": [], "slot": 1}})
    assert (caught.value.place, caught.value.key) == ("a", "slot")


def test_errors_are_short_for_any_value() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for value in ("x" * 10**6, list(range(10**5)), deep):
        assert len(brief(value)) <= 100
        with pytest.raises(Mismatch) as caught:
            table(text(), schema.flag)({"k" * 10**5: value})
        assert len(str(caught.value)) < 300
