"""The page of what was tried is that of the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.wide_page import page, tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"


def test_the_page_is_made_from_the_tables() -> None:
    """Nobody edits it by hand; ``make docs`` writes it."""
    assert PAGE.read_text() == page()


def test_no_row_is_there_twice() -> None:
    """Each has a name of its own in its table."""
    for title, rows in tables().items():
        names = [row.name for row in rows]
        assert len(names) == len(set(names)), title


@pytest.mark.parametrize("page", ["README.md", "docs/reference/results.md"])
def test_the_rows_are_counted(page: str) -> None:
    """Each table is named once with the number of its rows."""
    named = [int(number) for number in re.findall(r"(\d+) (?:optimizer conf|transformers mod|training-loop pat)", (ROOT / page).read_text())]
    assert named == [len(rows) for rows in tables().values()]
