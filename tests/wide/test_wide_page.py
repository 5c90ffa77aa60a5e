"""Tests of docs/reference/compatibility.md: it is generated from the tables of models, optimizers and patterns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wide.wide_page import page, tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"


def test_the_page_is_current() -> None:
    """`make docs` regenerates it."""
    assert PAGE.read_text() == page()


def test_row_names_are_unique() -> None:
    for title, rows in tables().items():
        names = [row.name for row in rows]
        assert len(names) == len(set(names)), title


@pytest.mark.parametrize("page", ["README.md", "docs/reference/results.md"])
def test_documents_state_the_number_of_rows(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    named = [int(number) for number in re.findall(r"(\d+) (?:optimizer conf|transformers mod|training-loop pat)", text)]
    assert named == [len(rows) for rows in tables().values()]
