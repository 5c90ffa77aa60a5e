"""Table of drives: current throughput, measured profile, free space and wear."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from infinity.units import format_size
from infinity_tools.top.columns import Column, fitting, headings, row
from infinity_tools.top.minute import buckets
from infinity_tools.top.reading import Drive
from infinity_tools.top.table_cells import UNKNOWN, curve, percent, rates, whole
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
        failed = f"  {drive.name}: {drive.error}"
        lines.append(Text(failed, style="red") if drive.error else row(drive, shown))
    return lines


def _columns(state: State) -> tuple[Column[Drive], ...]:
    longest = max((len(drive.name) for drive in state.snapshot.drives if not drive.error), default=0)

    def last_minute(drive: Drive) -> str:
        seen = state.curves.get(drive.name, ())
        top = drive.profile_bytes_per_second or max((rate for _, rate in seen), default=0.0)
        return curve(buckets(seen, _CURVE), top, plain=state.ascii)

    def space(drive: Drive) -> str:
        free, size = drive.free_bytes, drive.capacity_bytes
        return UNKNOWN if free is None or size is None else f"{format_size(free)} of {format_size(size)}"

    def profile(drive: Drive) -> str:
        rate = drive.profile_bytes_per_second
        return UNKNOWN if rate is None else f"{rate / 1e9:.2f} GB/s"

    return (
        Column(heading="  drive", rank=0, width=2 + min(_MOST_NAME, max(8, longest)), left=True, cell=_name),
        Column(
            heading="read/written", rank=1, width=14,
            cell=lambda drive: rates(drive.read_bytes_per_second, drive.written_bytes_per_second),
        ),
        Column(heading="last minute", rank=3, width=_CURVE, left=True, cell=last_minute),
        Column(heading="profile", rank=4, width=10, cell=profile),
        Column(heading="busy", rank=2, width=5, cell=lambda drive: percent(drive.busy)),
        Column(heading="free", rank=5, width=20, cell=space),
        Column(heading="worn", rank=6, width=5, cell=lambda drive: percent(drive.worn)),
        Column(heading="days left", rank=7, width=9, cell=lambda drive: whole(drive.endurance_days)),
    )  # fmt: skip


def _name(drive: Drive) -> str:
    return f"  {drive.name}"
