"""Rows of the tables in docs/reference/compatibility.md: each row is a test with an expected outcome."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, UNSUPPORTED = "equal", "not supported"


@dataclass(frozen=True, kw_only=True)
class Row:
    """An optimizer, a model family or a training-loop pattern.

    `outcome` is `EQUAL` (bitwise equal to plain FSDP2 in memory) or `UNSUPPORTED` (an error with the reason and a fix,
    raised before any result is wrong). `words` is a regular expression that matches the error, and `note` is a note
    for readers of the page.
    """

    name: str
    outcome: str = EQUAL
    words: str = ""
    note: str = ""
