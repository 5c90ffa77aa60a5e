"""Table of drives: current throughput, measured profile, free space and wear."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from infinity.telemetry.trees import Tree
from infinity.units import format_size
from infinity_tools.top.minute import buckets
from infinity_tools.top.reading import figure, word
from infinity_tools.top.table_cells import UNKNOWN, Column, curve, fitting, headings, percent, rates, row, whole
from infinity_tools.top.view_state import State

_MOST_NAME: Final = 16
_CURVE: Final = 20  # columns


def drive_lines(state: State, width: int) -> list[Text]:
    """Return the lines of the table of drives, or an empty list if no drives are known."""
    drives = state.snapshot.drives
    if not drives:
        return []
    shown = fitting(_columns(state), width)
    lines = [headings(shown)]
    for drive in drives:
        failed = f"  {word(drive, 'name')}: {word(drive, 'error')}"
        lines.append(Text(failed, style="red") if word(drive, "error") else row(drive, shown))
    return lines


def _columns(state: State) -> tuple[Column, ...]:
    longest = max((len(word(one, "name")) for one in state.snapshot.drives if not word(one, "error")), default=0)

    def last_minute(drive: Tree) -> str:
        seen = state.curves.get(word(drive, "name"), ())
        top = _profile(drive) or max((rate for _, rate in seen), default=0.0)
        return curve(buckets(seen, _CURVE), top)

    def space(drive: Tree) -> str:
        free, size = figure(drive, "free"), figure(drive, "capacity")
        return UNKNOWN if free is None or size is None else f"{format_size(free)} of {format_size(size)}"

    def profile(drive: Tree) -> str:
        rate = _profile(drive)
        return UNKNOWN if rate is None else f"{rate / 1e9:.2f} GB/s"

    return (
        Column(
            heading="  drive", rank=0, width=2 + min(_MOST_NAME, max(8, longest)), left=True,
            cell=lambda drive: f"  {word(drive, 'name')}",
        ),
        Column(
            heading="read/written", rank=1, width=14,
            cell=lambda drive: rates(figure(drive, "read"), figure(drive, "write")),
        ),
        Column(heading="last minute", rank=3, width=_CURVE, left=True, cell=last_minute),
        Column(heading="profile", rank=4, width=10, cell=profile),
        Column(heading="busy", rank=2, width=5, cell=lambda drive: percent(figure(drive, "busy"))),
        Column(heading="free", rank=5, width=20, cell=space),
        Column(heading="worn", rank=6, width=5, cell=lambda drive: percent(figure(drive, "wear", "ratio"))),
        Column(heading="days left", rank=7, width=9, cell=lambda drive: whole(figure(drive, "wear", "days"))),
    )  # fmt: skip


def _profile(drive: Tree) -> float | None:
    """Return the measured bandwidth, with half reads and half writes or, if there is none, with only reads."""
    return figure(drive, "profile", "mixed") or figure(drive, "profile", "read")
