"""Table of runs, with a bar below each run that breaks down the step time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.text import Text

from infinity.untrusted_files import user_name
from infinity_tools.top.columns import Column, fitting, headings, line, row
from infinity_tools.top.reading import Rank, Run
from infinity_tools.top.table_cells import ago, bar, decimal, filled, legend, number, percent, rates, whole
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
    lines, chosen = [headings(shown)], range(0)
    for run in state.runs:
        mine = run is state.chosen_run
        block = [_first_line(run, shown, mine=mine and state.interactive)]
        if bars in ("all", "runs") or (bars == "chosen" and mine):
            begin = f"  {run.id}" if run.name else _of_ranks(run)
            block.append(_bar_line(begin, run.parts, shown[0].width, width, plain=state.ascii))
        if run.id in state.expanded:
            others = [] if run.user in ("", user_name(os.geteuid())) else [f"user {run.user}"]
            if run.name or others:
                block.append(Text("    " + ", ".join([run.id, *others, _of_ranks(run).strip()])))
            block += _more(run, dropped, width)
            for rank in run.ranks:
                block.append(_rank_line(rank, shown))
                if bars == "all":
                    block.append(_bar_line(f"    process {rank.pid}", rank.parts, shown[0].width, width, state.ascii))
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


def _columns(state: State) -> tuple[Column[Run], ...]:
    now = state.snapshot.time
    longest = max((len(text) for run in state.runs for text in (run.id, run.name)), default=0)

    def checkpoint(run: Run) -> str:
        if run.checkpointed is None:
            return "none" if run.checkpoints == 0 else ago(None)
        took = "" if run.checkpoint_seconds is None else f" ({decimal(run.checkpoint_seconds)} s)"
        return ago(now - run.checkpointed) + took

    return (
        Column(
            heading="  run", rank=0, width=2 + min(_MOST_ID, max(8, longest)), left=True,
            cell=lambda run: f"  {run.name or run.id}",
        ),
        Column(heading="", rank=3, width=5, left=True, cell=lambda run: run.status),
        Column(heading="step", rank=1, width=7, cell=lambda run: whole(run.step)),
        Column(heading="s/step", rank=2, width=6, cell=lambda run: decimal(run.step_seconds)),
        Column(heading="tok/s", rank=6, width=5, cell=lambda run: number(run.tokens_per_second)),
        Column(heading="loss", rank=4, width=6, cell=lambda run: decimal(run.loss)),
        Column(heading="stall", rank=5, width=5, cell=lambda run: percent(run.stalled)),
        Column(
            heading="read/written", rank=7, width=14,
            cell=lambda run: rates(run.read_bytes_per_second, run.written_bytes_per_second),
        ),
        Column(
            heading="host cache", rank=8, width=15, cell=lambda run: filled(run.host_cache_used, run.host_cache_bytes)
        ),
        Column(heading="last checkpoint", rank=9, width=15, cell=checkpoint),
        Column(
            heading="hit/late", rank=10, width=9,
            cell=lambda run: f"{percent(run.prefetch_hit)}/{percent(run.prefetch_late)}",
        ),
        Column(
            heading="errors/retries", rank=11, width=14, cell=lambda run: f"{whole(run.errors)}/{whole(run.retries)}"
        ),
    )  # fmt: skip


def _first_line(run: Run, shown: Sequence[Column[Run]], *, mine: bool) -> Text:
    text = row(run, shown, "bold" if mine else "")
    if any(not column.heading for column in shown):
        at = shown[0].width + 1
        text.stylize(_STYLES.get(run.status, ""), at, at + len(run.status))
    return Text(">", style="bold") + text[1:] if mine else text


def _of_ranks(run: Run) -> str:
    here, of = len(run.ranks), run.world_size
    if here == of:
        return f"  {of} rank{'s' if of != 1 else ''}"
    return f"  {here} of {of} ranks local"


def _bar_line(begin: str, parts: Mapping[str, float], indent: int, width: int, plain: bool) -> Text:
    text = Text(begin)
    text.truncate(indent, overflow="ellipsis", pad=True)
    room = width - indent - 1
    length = max(_LEAST_BAR, room * 2 // 5)
    if not parts:
        return text.append(" no step yet", style="dim")
    said = legend(parts, room - length - 2, plain=plain)
    return text.append(" ") + bar(parts, length, plain=plain) + Text("  ") + said


def _more(run: Run, dropped: Sequence[Column[Run]], width: int) -> list[Text]:
    lines: list[str] = []
    for column in dropped:
        said = f"{column.heading} {column.cell(run)}"
        if lines and len(lines[-1]) + 3 + len(said) <= width:
            lines[-1] += "   " + said
        else:
            lines.append("    " + said)
    return [Text(line) for line in lines]


def _rank_line(rank: Rank, shown: Sequence[Column[Run]]) -> Text:
    values = {
        0: f"    rank {rank.rank}",
        1: whole(rank.step),
        2: decimal(rank.step_seconds),
        3: rank.status,
        5: percent(rank.stalled),
        6: number(rank.tokens_per_second),
        7: rates(rank.read_bytes_per_second, rank.written_bytes_per_second),
        8: filled(rank.host_cache_used, rank.host_cache_bytes),
        11: f"{whole(rank.errors)}/-",
    }
    return line([values.get(column.rank, "") for column in shown], shown)
