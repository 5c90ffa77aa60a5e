"""Progress of a search: a small table on a terminal, and one line for every new best candidate."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.units import format_number
from infinity_tools.tune.outcome import Role, Trial
from infinity_tools.tune.search_space import Candidate, describe

ROLES: dict[Role, str] = {
    "start": "initial settings",
    "defaults": "infinity's defaults",
    "change": "",
    "again": "repeated measurement",
    "put back": "one change reverted",
    "compare": "final comparison",
}
"""Readable purpose of a trial; empty if its settings are shown instead."""


class View:
    """Display of a search. As a context manager, it restores the terminal on exit."""

    def __init__(self, console: Console, start: Candidate, *, minutes: float, silent: bool) -> None:
        self._console, self._start, self._minutes, self._silent = console, dict(start), minutes, silent
        self._clock: Callable[[], float] = lambda: 0.0
        self._now = "starting the trial process"  # current activity
        self._since = time.monotonic()  # start of the current activity
        self._trials = 0  # number of completed trials
        self._first = 0.0  # step time of the first trial, in seconds
        self._best: tuple[float, str] | None = None  # step time relative to the start, and the settings
        self._live: Live | None = None
        if console.is_terminal and not silent:
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self._silent:
            self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def begin(self, clock: Callable[[], float]) -> None:
        """Begin the search. `clock` returns the seconds since then."""
        self._clock = clock

    def trying(self, role: Role, candidate: Candidate, best: Candidate) -> None:
        """Show the candidate that is being measured."""
        changes = {name: value for name, value in candidate.items() if value != best[name]}
        words = ROLES[role] if role != "change" else describe(changes)
        self._now, self._since = words, time.monotonic()

    def tried(self, trial: Trial) -> None:
        """Show a completed trial."""
        self._trials = trial.number
        if trial.number == 1 and trial.outcome.counts:
            self._first = trial.outcome.seconds
            self.say(f"start: {format_number(self._first)} s per step")

    def improved(self, relative: float, best: Candidate) -> None:
        """Show a new best candidate."""
        changes = {name: value for name, value in best.items() if value != self._start[name]}
        self._best = relative, describe(changes)
        self.say(f"{self._left()} left: {1 - relative:.1%} less time per step with {describe(changes)}")

    def _left(self) -> str:
        left = max(0, round(60 * self._minutes - self._clock()))
        return f"{left // 60}:{left % 60:02d}"

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        best = "the start" if self._best is None else f"{1 - self._best[0]:.1%} less time per step: {self._best[1]}"
        if self._first:
            table.add_row("best so far", Text(best))
        table.add_row("now", Text(f"{self._now}  {time.monotonic() - self._since:.0f} s"))
        table.add_row("trials", Text(str(self._trials)))
        table.add_row("time left", Text(self._left()))
        return table
