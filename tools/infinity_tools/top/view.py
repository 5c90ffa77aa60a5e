"""Rendering of the screen as a pure function of the state and the screen size."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from infinity.telemetry.trees import Tree
from infinity_tools.top.drives_view import drive_lines
from infinity_tools.top.reading import entries, figure, name_of, status_of, word
from infinity_tools.top.runs_view import BARS, run_table, window
from infinity_tools.top.table_cells import ASCII, LOOKS, whole
from infinity_tools.top.view_state import SORTS, State

_LEAST_HEIGHT_FOR_KEYS: Final = 8
_MOST_NOTES: Final = 4  # lines
_KEYS: Final = ("q quit", "? help", "j/k select", "Enter ranks", "s sort", "r reverse", "p pause")
_PARTS: Final = {
    "compute": "forward and backward",
    "collective": "all-gather, reduce-scatter",
    "copy": "copying weights from pages and gradients into pages",
    "update": "gradient clipping, optimizer",
    "read_stall": "waiting for a page to be read",
    "write_stall": "waiting for a page to be written",
    "host_cache_stall": "waiting for a free cache slot",
    "python": "training loop between steps, bookkeeping",
}
_HELP: Final = (
    ("q", "quit"),
    ("j k, arrows", "select a run"),
    ("Enter", "show or hide the ranks and remaining columns of the selected run"),
    ("s", f"change the sort order: {', '.join(SORTS)}"),
    ("r", "reverse the sort order"),
    ("p", "pause or resume updates"),
    ("", ""),
    ("bar", "step time by activity, over the last ten seconds:"),
    *((part, text) for part, text in _PARTS.items()),
    ("stall", "sum of the three kinds of stalls"),
    ("hit/late", "percentage of page requests for which the page was ready, and was not"),
    ("last checkpoint", "time since the last checkpoint, and mean duration of a checkpoint"),
    ("idle, dead", "running without a recent step; exited unexpectedly"),
    ("profile", "measured bandwidth of a drive, half reads and half writes"),
    ("-", "unknown, or not known yet"),
)
_TERM: Final = 20  # columns


def view(state: State, width: int, height: int) -> Text:
    """Return the screen as at most `height` lines of at most `width` columns."""
    lines = (_help(state, width) if state.help else _screen(state, width, height))[: max(1, height)]
    for one in lines:
        one.rstrip()
        one.truncate(width, overflow="ellipsis")
    text = Text("\n", no_wrap=True, end="").join(lines)
    if state.ascii:
        text.plain = text.plain.translate(ASCII).encode("ascii", "replace").decode()
    return text


def _screen(state: State, width: int, height: int) -> list[Text]:
    keys = [Text(_beside(_KEYS, width), style="dim")] if state.interactive and height >= _LEAST_HEIGHT_FOR_KEYS else []
    notes = _notes(state, width)[: max(0, min(_MOST_NOTES, height // 5))]
    room = height - 1 - len(notes) - len(keys)
    drives = drive_lines(state, width)
    if not state.runs:
        body = _nothing(state, width)
    else:
        tables = [run_table(state, width, bars) for bars in BARS]  # from most to least detail
        if len(tables[-1].lines) + len(drives) > room:
            drives = drives[: max(room // 3, room - len(tables[-1].lines))]
        if len(drives) == 1:
            drives = []  # only the headings fit
        left = room - len(drives)
        body = window(next((table for table in tables if len(table.lines) <= left), tables[-1]), left)
    blank = [Text()] if drives and len(body) + len(drives) < room else []
    lines = [_title(state, width), *body, *blank, *drives, *notes]
    if keys:
        lines += [Text()] * (height - len(lines) - 1) + keys
    return lines


def _title(state: State, width: int) -> Text:
    counts = Counter(map(status_of, state.runs))
    said = ", ".join(f"{counts[status]} {status}" for status in ("live", "idle", "dead", "ended") if counts[status])
    pace = "paused" if state.paused else f"every {state.interval:g} s"
    version = state.snapshot.infinityd
    parts = (
        "infinity top",
        f"runs: {said or 'none'}",
        *((pace,) if state.paused else ()),
        f"by {state.sort}{', reversed' if state.reverse else ''}",
        "from stats files" if version is None else f"from infinityd {version}",
        *((pace,) if state.interactive and not state.paused else ()),
    )
    title = Text(_beside(parts, width))
    title.stylize("bold", 0, len(parts[0]))
    title.highlight_words(["paused"], "bold yellow")
    return title


def _beside(texts: Sequence[str], width: int) -> str:
    line = texts[0]
    for text in texts[1:]:
        if len(line) + 2 + len(text) > width:
            break
        line += "  " + text
    return line


def _notes(state: State, width: int) -> list[Text]:
    urgent = [text for run in state.runs for text in _troubles(run)]
    return [
        Text(line, style=style)
        for texts, style in ((urgent, "bold red"), (state.snapshot.notes, "dim"))
        for text in texts
        for line in _wrapped(text, width)
    ]


def _troubles(run: Tree) -> list[str]:
    troubles = [
        f"rank {whole(figure(rank, 'rank'))} died" for rank in entries(run, "ranks") if word(rank, "status") == "dead"
    ]
    if errors := figure(run, "io", "errors"):
        troubles.append(f"failed transfers: {errors:.0f}")
    loss, name, run_id = figure(run, "loss"), name_of(run), word(run, "id")
    if loss is not None and not math.isfinite(loss):
        troubles.append(f"loss is {loss}")
    title = f"{name} ({run_id})" if name else run_id
    return [f"{title}: {', '.join(troubles)}"] if troubles else []


def _nothing(state: State, width: int) -> list[Text]:
    folder = state.snapshot.runtime_dir
    others = ", ".join(word(run, "id") for run in state.snapshot.runs)
    if state.only and others:
        said = [f"no run id starts with {state.only}; available runs: {others}"]
    else:
        said = [
            f"no run on this node uses the runtime folder {folder}",
            "start one, for example: infinity train --model tiny --max_steps 1000",
        ]
    return [Text(line) for text in ("", *said) for line in (_wrapped(text, width) or [""])]


def _help(state: State, width: int) -> list[Text]:
    lines = [Text("infinity top: help  (press any key to return)", style="bold"), Text()]
    for term, text in _HELP:
        look = LOOKS.get(term)
        first = f"{look.mark} {look.name}" if look else term
        for part in _wrapped(text, width - _TERM) or [""]:
            lines.append(Text(f"{first:<{_TERM}}{part}"))
            first = ""
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(10, width), break_on_hyphens=False)
