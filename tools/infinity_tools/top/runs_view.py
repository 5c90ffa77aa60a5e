"""Table of runs, with a bar below each run that breaks down the step time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.text import Text

from infinity.telemetry.trees import Tree
from infinity.untrusted_files import user_name
from infinity_tools.top.reading import bytes_per_second, entries, figure, name_of, parts_of, status_of, word, words
from infinity_tools.top.table_cells import (
    Column,
    ago,
    bar,
    decimal,
    filled,
    fitting,
    headings,
    legend,
    line,
    number,
    percent,
    rates,
    row,
    whole,
)
from infinity_tools.top.view_state import State

Bars = Literal["all", "runs", "chosen", "none"]
"""Rows with a bar below: all runs and ranks, all runs, only the chosen run, or none."""
BARS: Final[tuple[Bars, ...]] = ("all", "runs", "chosen", "none")

_MOST_ID: Final = 22
_STYLES: Final = {"live": "green", "idle": "yellow", "dead": "bold red", "ended": "dim"}
_LEAST_BAR: Final = 10


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines of the table of runs, starting with the headings."""

    lines: tuple[Text, ...]
    chosen: range
    """Range of the lines of the chosen run."""


def run_table(state: State, width: int, bars: Bars) -> Table:
    """Return the table of runs."""
    columns = _columns(state)
    shown = fitting(columns, width)
    dropped = [column for column in columns if column not in shown]
    lines, chosen, chosen_run = [headings(shown)], range(0), state.chosen_run
    for run in state.runs:
        run_id, name = word(run, "id"), name_of(run)
        mine = run_id == chosen_run
        block = [_first_line(run, shown, mine=mine and state.interactive)]
        barred = bars in ("all", "runs") or (bars == "chosen" and mine)
        if barred:
            begin = f"  {run_id}" if name else _of_ranks(run)
            block.append(_bar_line(begin, parts_of(run), shown[0].width, width))
        ranks = "" if barred and not name else _of_ranks(run)  # unless the line of the bar begins with them
        hosts = words(run, "other_hosts")
        if hosts and (barred or run_id in state.expanded):
            block.append(_hosts_line(hosts, f"{ranks} here; also on" if ranks else "  also on", width))
            ranks = ""
        if run_id in state.expanded:
            user = word(run, "user")
            other_user = "" if user in ("", user_name(os.geteuid())) else f"user {user}"
            about = ("" if barred or not name else run_id, other_user, ranks.strip())
            if any(about):
                block.append(Text("    " + ", ".join(filter(None, about))))
            block += _more(run, dropped, width)
            for rank in entries(run, "ranks"):
                block.append(_rank_line(rank, shown))
                if bars == "all":
                    begin = f"    process {whole(figure(rank, 'pid'))}"
                    block.append(_bar_line(begin, parts_of(rank), shown[0].width, width))
        if mine:
            chosen = range(len(lines), len(lines) + len(block))
        lines += block
    return Table(lines=tuple(lines), chosen=chosen)


def window(table: Table, room: int) -> list[Text]:
    """Return at most `room` lines of the table, including the headings and the first line of the chosen run."""
    lines = table.lines
    if len(lines) <= room or room < 3:
        return list(lines[: max(0, room)])
    fit = room - 2  # without the headings and the line "lines 1-4 of 6"
    last = min(max(fit, table.chosen.stop - 1), table.chosen.start + fit - 1)
    first = last - fit + 1
    end = Text(f"  lines {first}-{last} of {len(lines) - 1}", style="dim")
    return [lines[0], *lines[first : last + 1], end]


def _columns(state: State) -> tuple[Column, ...]:
    now = state.snapshot.time
    longest = max((len(name) for run in state.runs for name in (word(run, "id"), name_of(run))), default=0)

    def checkpoint(run: Tree) -> str:
        last, took = figure(run, "checkpoint", "last"), figure(run, "checkpoint", "seconds")
        if last is None:
            return "none" if figure(run, "checkpoint", "count") == 0 else ago(None)
        return ago(now - last) + ("" if took is None else f" ({decimal(took)} s)")

    def host_cache(run: Tree) -> str:
        roles = run["host_cache"].get("roles") if isinstance(run.get("host_cache"), dict) else None
        used = sum(figure(roles, role) or 0.0 for role in roles) if isinstance(roles, dict) else None
        return filled(used, figure(run, "host_cache", "capacity"))

    def fetches(run: Tree) -> str:
        late, miss = figure(run, "fetches", "late"), figure(run, "fetches", "miss")
        not_ready = None if late is None or miss is None else late + miss
        return f"{percent(figure(run, 'fetches', 'hit'))}/{percent(not_ready)}"

    return (
        Column(
            heading="  run", rank=0, width=2 + min(_MOST_ID, max(8, longest)), left=True,
            cell=lambda run: f"  {name_of(run) or word(run, 'id')}",
        ),
        Column(heading="", rank=3, width=5, left=True, cell=status_of),
        Column(heading="step", rank=1, width=7, cell=lambda run: whole(figure(run, "steps"))),
        Column(heading="s/step", rank=2, width=6, cell=lambda run: decimal(figure(run, "step_seconds"))),
        Column(heading="tok/s", rank=6, width=5, cell=lambda run: number(figure(run, "tokens_per_second"))),
        Column(heading="loss", rank=4, width=6, cell=lambda run: decimal(figure(run, "loss"))),
        Column(heading="stall", rank=5, width=5, cell=lambda run: percent(figure(run, "stalled"))),
        Column(heading="read/written", rank=7, width=14, cell=lambda run: rates(*bytes_per_second(run))),
        Column(heading="host cache", rank=8, width=15, cell=host_cache),
        Column(heading="last checkpoint", rank=9, width=15, cell=checkpoint),
        Column(heading="hit/late", rank=10, width=9, cell=fetches),
        Column(
            heading="errors/retries", rank=11, width=14,
            cell=lambda run: f"{whole(figure(run, 'io', 'errors'))}/{whole(figure(run, 'io', 'retries'))}",
        ),
    )  # fmt: skip


def _first_line(run: Tree, shown: Sequence[Column], *, mine: bool) -> Text:
    text, status = row(run, shown, "bold" if mine else ""), status_of(run)
    if any(not column.heading for column in shown):
        at = shown[0].width + 1
        text.stylize(_STYLES.get(status, ""), at, at + len(status))
    return Text(">", style="bold") + text[1:] if mine else text


def _of_ranks(run: Tree) -> str:
    numbers, of = (figure(rank, "rank") for rank in entries(run, "ranks")), figure(run, "world_size") or 0
    ranks = [int(number) for number in numbers if number is not None and math.isfinite(number)]
    if len(ranks) == of:
        return f"  {len(ranks)} rank{'s' if len(ranks) != 1 else ''}"
    return f"  ranks {_spans(ranks)} of {of:.0f}"


def _spans(ranks: Sequence[int]) -> str:
    """Return increasing numbers as text: ``0-3, 8``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _hosts_line(hosts: Sequence[str], begin: str, width: int) -> Text:
    """Return a line that names as many hosts as fit, but at least one."""
    for count in range(len(hosts), 0, -1):
        more = f" and {len(hosts) - count} more" if count < len(hosts) else ""
        said = f"{begin} {', '.join(hosts[:count])}{more}"
        if len(said) <= width:
            break
    return Text(said, style="dim")


def _bar_line(begin: str, parts: Mapping[str, float], indent: int, width: int) -> Text:
    text = Text(begin)
    text.truncate(indent, overflow="ellipsis", pad=True)
    room = width - indent - 1
    length = max(_LEAST_BAR, room * 2 // 5)
    if not parts:
        return text.append(" no step yet", style="dim")
    said = legend(parts, room - length - 2)
    return text.append(" ") + bar(parts, length) + Text("  ") + said


def _more(run: Tree, dropped: Sequence[Column], width: int) -> list[Text]:
    lines: list[str] = []
    for column in dropped:
        said = f"{column.heading} {column.cell(run)}"
        if lines and len(lines[-1]) + 3 + len(said) <= width:
            lines[-1] += "   " + said
        else:
            lines.append("    " + said)
    return [Text(line) for line in lines]


def _rank_line(rank: Tree, shown: Sequence[Column]) -> Text:
    values = {
        0: f"    rank {whole(figure(rank, 'rank'))}",
        1: whole(figure(rank, "steps")),
        2: decimal(figure(rank, "step_seconds")),
        3: word(rank, "status"),
        5: percent(figure(rank, "stalled")),
        6: number(figure(rank, "tokens_per_second")),
        7: rates(figure(rank, "read"), figure(rank, "write")),
        8: filled(figure(rank, "host_cache_used"), figure(rank, "host_cache_capacity")),
        11: f"{whole(figure(rank, 'errors'))}/-",
    }
    return line([values.get(column.rank, "") for column in shown], shown)
