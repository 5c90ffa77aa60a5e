"""Tables and text shared by several commands."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(title: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table. Columns whose headings start with ``>`` are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    made.show_header = any(headings)
    for heading in headings:
        number = heading.startswith(">")
        made.add_column(heading.lstrip(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # cells are plain text, not markup
    return made


def show_whole(console: Console, shown: Table) -> None:
    """Print a table at its full width, so that ids and paths stay whole. A narrow terminal wraps its lines."""
    console.print(Text(str(shown.title), "bold"))
    columns = []
    for column in shown.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if column.justify == "right" else cell.ljust(width) for cell in cells])
    for number, line in enumerate(zip(*columns, strict=True)):
        console.print(Text("  ".join(line).rstrip(), "" if number else "dim"), soft_wrap=True)


def span(seconds: float) -> str:
    """Return a duration in one time unit."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(moment: float) -> str:
    """Return the time since a Unix time, in one time unit."""
    return span(max(0.0, time.time() - moment))
