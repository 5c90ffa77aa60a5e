"""What the tables of the wide suite are made of: one row for everything that was tried, with what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, UNSUPPORTED = "equal", "refused"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer, model family or habit.

    `outcome` is `EQUAL` (the same bits as plain FSDP2 in memory) or `UNSUPPORTED` (an error, before anything is wrong, that
    says why and what to do). `words` is a regular expression that the error of a refusal matches; `note` is what a
    reader of the documentation should know. Rows that are `slow`, or need packages that only the wide suite installs,
    run behind ``make test-wide``.
    """

    name: str
    outcome: str = EQUAL
    words: str = ""
    note: str = ""
    slow: bool = False
