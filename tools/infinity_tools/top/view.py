"""What is on the screen: made from a state and a size alone."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from infinity_tools.top.drives_view import drive_lines
from infinity_tools.top.reading import Run
from infinity_tools.top.runs_view import BARS, run_table, window
from infinity_tools.top.table_cells import LOOKS
from infinity_tools.top.view_state import SORTS, State

_LEAST_HEIGHT_FOR_KEYS: Final = 8
_MOST_NOTES: Final = 4  # lines
_KEYS: Final = ("q quit", "? help", "j/k choose", "Enter ranks", "s sort", "r reverse", "p pause")
_PARTS: Final = {
    "compute": "forward and backward",
    "collective": "all-gathers, reduce-scatters",
    "copy": "weights out of pages, gradients into them",
    "update": "clipping, the optimizer",
    "read_stall": "waits for a page that is being read",
    "write_stall": "waits for a page that is being written",
    "host_cache_stall": "waits for a free cache slot of the host cache",
    "python": "your loop between steps, bookkeeping",
}
_HELP: Final = (
    ("q", "quit"),
    ("j k, arrows", "choose a run"),
    ("Enter", "show or hide its ranks, and what there was no room for"),
    ("s", f"next order: {', '.join(SORTS)}"),
    ("r", "reverse the order"),
    ("p", "pause; p again goes on"),
    ("", ""),
    ("bar", "where the time of a step goes, in the steps of the last ten seconds:"),
    *((part, text) for part, text in _PARTS.items()),
    ("stall", "the three waits together"),
    ("hit/late", "pages that were ready when they were asked for, and that were not"),
    ("last checkpoint", "how long ago, and how long checkpoints take"),
    ("idle, dead", "live, but without a step for long; gone without having ended"),
    ("profile", "what a drive can do; infinityd and infinity probe measure it"),
    ("-", "not known, or not yet"),
)
_TERM: Final = 14  # columns


def view(state: State, width: int, height: int) -> Text:
    """Return at most `height` lines of at most `width` columns."""
    lines = (_help(state, width) if state.help else _screen(state, width, height))[: max(1, height)]
    for one in lines:
        one.rstrip()
        one.truncate(width, overflow="ellipsis")
    text = Text("\n", no_wrap=True, end="").join(lines)
    if state.ascii:
        text.plain = text.plain.replace("…", "~").encode("ascii", "replace").decode()
    return text


def _screen(state: State, width: int, height: int) -> list[Text]:
    keys = [Text(_beside(_KEYS, width), style="dim")] if state.interactive and height >= _LEAST_HEIGHT_FOR_KEYS else []
    notes = _notes(state, width)[: max(0, min(_MOST_NOTES, height // 5))]
    room = height - 1 - len(notes) - len(keys)
    drives = drive_lines(state, width)
    if not state.runs:
        body = _nothing(state, width)
    else:
        tables = [run_table(state, width, bars) for bars in BARS]  # from much to little
        if len(tables[-1].lines) + len(drives) > room:
            drives = drives[: max(room // 3, room - len(tables[-1].lines))]
        if len(drives) == 1:
            drives = []  # headings of nothing
        left = room - len(drives)
        body = window(next((table for table in tables if len(table.lines) <= left), tables[-1]), left)
    blank = [Text()] if drives and len(body) + len(drives) < room else []
    lines = [_title(state, width), *body, *blank, *drives, *notes]
    if keys:
        lines += [Text()] * (height - len(lines) - 1) + keys
    return lines


def _title(state: State, width: int) -> Text:
    counts = Counter(run.status for run in state.runs)
    said = ", ".join(f"{counts[status]} {status}" for status in ("live", "idle", "dead", "ended") if counts[status])
    pace = "paused" if state.paused else f"every {state.interval:g} s"
    version = state.snapshot.infinityd
    parts = (
        "infinity top",
        f"runs: {said or 'none'}",
        *((pace,) if state.paused else ()),
        f"by {state.sort}{', reversed' if state.reverse else ''}",
        "from stats pages" if version is None else f"from infinityd {version}",
        *((pace,) if state.interactive and not state.paused else ()),
    )
    title = Text(_beside(parts, width))
    title.stylize("bold", 0, len(parts[0]))
    title.highlight_words(["paused"], "bold yellow")
    return title


def _beside(texts: Sequence[str], width: int) -> str:
    """Return those that fit beside each other, the first in any case."""
    line = texts[0]
    for text in texts[1:]:
        if len(line) + 2 + len(text) > width:
            break
        line += "  " + text
    return line


def _notes(state: State, width: int) -> list[Text]:
    """Return what asks for attention, and then the rest, in lines."""
    urgent = [text for run in state.runs for text in _troubles(run)]
    return [
        Text(line, style=style)
        for texts, style in ((urgent, "bold red"), (state.snapshot.notes, "dim"))
        for text in texts
        for line in _wrapped(text, width)
    ]


def _troubles(run: Run) -> list[str]:
    troubles = [f"rank {rank.rank} died" for rank in run.ranks if rank.status == "dead"]
    if run.errors:
        troubles.append(f"transfers that failed: {run.errors:.0f}")
    if run.loss is not None and not math.isfinite(run.loss):
        troubles.append(f"loss is {run.loss}")
    return [f"{run.id}: {', '.join(troubles)}"] if troubles else []


def _nothing(state: State, width: int) -> list[Text]:
    folder = state.snapshot.runtime_dir
    others = ", ".join(run.id for run in state.snapshot.runs)
    if state.only and others:
        said = [f"no run whose id begins with {state.only}; there are {others}"]
    else:
        said = [
            f"no run trains on this node now, or it writes its stats pages to another runtime folder than {folder}",
            "start one: infinity train --model tiny --steps 1000",
        ]
    return [Text(line) for text in ("", *said) for line in (_wrapped(text, width) or [""])]


def _help(state: State, width: int) -> list[Text]:
    lines = [Text("infinity top: help  any key: back", style="bold"), Text()]
    for term, text in _HELP:
        look = LOOKS.get(term)
        first = f"{look.plain if state.ascii else look.mark} {look.name}" if look else term
        for part in _wrapped(text, width - _TERM) or [""]:
            lines.append(Text(f"{first:<{_TERM}}{part}"))
            first = ""
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(10, width), break_on_hyphens=False)
