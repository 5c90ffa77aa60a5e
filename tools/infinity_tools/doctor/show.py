"""Display of findings on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from infinity_tools.doctor.finding import Finding, Status

STYLES: Final[Mapping[Status, str]] = {
    Status.OK: "green",
    Status.NOTE: "cyan",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
}
_NAMES: Final = 17  # columns; the length of the longest check name


def shown(title: str, findings: Sequence[Finding]) -> Group:
    """Return findings as lines with status, check name and observed state, each followed by a fix if there is one."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(width=max(map(len, Status)), no_wrap=True)
    lines.add_column(width=_NAMES, no_wrap=True)
    lines.add_column(overflow="fold")
    for one in findings:
        lines.add_row(
            Text(one.status, STYLES[one.status]), Text(one.check), Text(one.value)
        )  # Text does not interpret markup
        if one.fix:
            lines.add_row("", "", Text(f"fix: {one.fix}", "dim"))
    return Group("", Text(title, "bold", overflow="fold"), lines)


def summary(counts: Mapping[Status, int]) -> Group:
    """Return the last line of the output: the number of findings by status, and their consequence."""
    words = [
        f"{counts[status]} {status}{'s' if counts[status] > 1 else ''}"
        for status in (Status.PROBLEM, Status.WARNING, Status.NOTE)
        if counts.get(status)
    ]
    if counts.get(Status.PROBLEM):
        means, style = "training does not work until the problems are fixed", STYLES[Status.PROBLEM]
    elif counts.get(Status.WARNING):
        means, style = "training works, but more slowly or not in every case", STYLES[Status.WARNING]
    else:
        means, style = "training works", STYLES[Status.OK]
    return Group("", Text(": ".join([*([", ".join(words)] if words else []), means]), style))
