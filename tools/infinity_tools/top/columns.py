"""Tables that omit less important columns on narrow screens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from infinity.telemetry.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Column:
    """Column of a table."""

    heading: str
    width: int
    cell: Callable[[Tree], str]
    rank: int
    """Priority of the column. On narrow screens, columns with larger ranks are omitted first."""
    left: bool = False
    """``True`` if cells are left-aligned."""


def fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the most important columns that fit into `width`, but at least one, in their original order."""
    kept: set[int] = set()
    room = width + 1
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width + 1 > room and kept:
            break
        room -= column.width + 1
        kept.add(column.rank)
    return tuple(column for column in columns if column.rank in kept)


def line(cells: Sequence[str], columns: Sequence[Column], style: str = "") -> Text:
    """Return a line of cells, each padded or truncated to the width of its column."""
    texts = []
    for cell, column in zip(cells, columns, strict=True):
        text = Text(cell)
        text.truncate(column.width, overflow="ellipsis")
        blank = " " * (column.width - cell_len(text.plain))
        texts.append(text.plain + blank if column.left else blank + text.plain)
    return Text(" ".join(texts), style=style)


def headings(columns: Sequence[Column]) -> Text:
    """Return the heading line of a table."""
    return line([column.heading for column in columns], columns, style="dim")


def row(entry: Tree, columns: Sequence[Column], style: str = "") -> Text:
    """Return the table row of an entry."""
    return line([column.cell(entry) for column in columns], columns, style)
