"""Tables that omit less important columns on narrow screens, and figures as short text, bars and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from infinity.telemetry.trees import Tree
from infinity.units import format_size
from infinity_tools.progress import short
from infinity_tools.tables import span

UNKNOWN: Final = "-"


@dataclass(frozen=True, kw_only=True)
class Look:
    """Appearance of a part of the step time."""

    name: str
    mark: str
    style: str


LOOKS: Final[Mapping[str, Look]] = {
    "compute": Look(name="compute", mark="█", style="green"),
    "collective": Look(name="collective", mark="░", style="cyan"),
    "copy": Look(name="copy", mark="▒", style="blue"),
    "update": Look(name="update", mark="▓", style="magenta"),
    "read_stall": Look(name="read stall", mark="r", style="bold red"),
    "write_stall": Look(name="write stall", mark="w", style="bold yellow"),
    "host_cache_stall": Look(name="host cache stall", mark="h", style="bold bright_red"),
    "python": Look(name="python", mark="·", style="dim"),
}
"""Appearance of each part, in the order of the bar. Marks are distinguishable without colors; stalls are letters."""
_CURVE: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = str.maketrans("█░▒▓·▁▂▃▄▅▆▇…", "#-+=._.:-=+*~")
"""Replacements of marks on ASCII-only terminals."""


def number(value: float | None) -> str:
    """Return a count with about three digits."""
    return UNKNOWN if value is None else short(value) if math.isfinite(value) else str(value)


def whole(value: float | None) -> str:
    """Return a count rounded to an integer, with all digits."""
    return UNKNOWN if value is None else f"{value:.0f}"


def decimal(value: float | None) -> str:
    """Return a number, such as seconds or a loss, with about four digits."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value) or abs(value) >= 99_999.5:
        return f"{value:.0e}" if math.isfinite(value) else str(value)
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 0}f}"


def percent(share: float | None) -> str:
    """Return a fraction as a percentage."""
    return UNKNOWN if share is None else f"{share:.0%}"


def rates(read: float | None, written: float | None) -> str:
    """Return two data rates, both in the unit that suits the larger one."""
    if read is None and written is None:
        return UNKNOWN
    large = max(read or 0.0, written or 0.0) >= 1e9
    texts = (
        UNKNOWN if rate is None else f"{rate / 1e9:.2f}" if large else f"{rate / 1e6:.0f}" for rate in (read, written)
    )
    return "/".join(texts) + (" GB/s" if large else " MB/s")


def filled(used: float | None, size: float | None) -> str:
    """Return the used fraction of a size, and the size."""
    if not size:
        return UNKNOWN
    return f"{percent(None if used is None else used / size)} of {format_size(size)}"


def ago(seconds: float | None) -> str:
    """Return the time since an event."""
    return UNKNOWN if seconds is None else span(max(0.0, seconds))


def bar(parts: Mapping[str, float], width: int) -> Text:
    """Return a stacked bar. The fractions add up to 1, and boundaries are rounded to whole columns."""
    text, at, begun = Text(), 0.0, 0
    for part, look in LOOKS.items():
        at += parts.get(part, 0.0)
        end = min(width, round(at * width))
        text.append(look.mark * (end - begun), style=look.style)
        begun = max(begun, end)
    return text


def legend(parts: Mapping[str, float], width: int) -> Text:
    """Return as many of the largest parts as fit, with their fractions. Parts that round to 0% are omitted."""
    text = Text()
    for part, share in sorted(parts.items(), key=lambda item: -item[1]):
        look, gap = LOOKS[part], "  " if text else ""
        said = f"{look.mark} {look.name} {share:.0%}"
        if share < 0.005 or len(text) + len(gap) + len(said) > width:
            break
        text.append(gap).append(look.mark, style=look.style).append(said[len(look.mark) :])
    return text


def curve(points: Sequence[float | None], top: float) -> str:
    """Return a curve with one column per point, where `top` is the full height. Missing points are blank."""
    return "".join(
        " " if point is None else _CURVE[min(len(_CURVE) - 1, int(point / top * len(_CURVE)) if top > 0 else 0)]
        for point in points
    )


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
