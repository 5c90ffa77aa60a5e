"""Progress of a search: the current trial on a terminal, and one line for every new best candidate."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from infinity.units import format_number
from infinity_tools.tune.outcome import Role, Trial
from infinity_tools.tune.search_space import Candidate, changes, describe

ROLES: dict[Role, str] = {
    "start": "initial settings",
    "defaults": "infinity's defaults",
    "change": "",
    "again": "repeated measurement",
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
        self._live: Live | None = None
        if console.is_terminal and not silent:
            self._live = Live(get_renderable=self._line, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal has been closed
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
        words = ROLES[role] if role != "change" else describe(changes(candidate, best))
        self._now, self._since = words, time.monotonic()

    def tried(self, trial: Trial) -> None:
        """Show a completed trial."""
        self._trials = trial.number
        if trial.number == 1 and trial.outcome.counts:
            self.say(f"start: {format_number(trial.outcome.seconds)} s per step")

    def improved(self, relative: float, best: Candidate) -> None:
        """Show a new best candidate."""
        found = describe(changes(best, self._start))
        self.say(f"{self._left()} left: {1 - relative:.1%} less time per step with {found}")

    def _left(self) -> str:
        left = max(0, round(60 * self._minutes - self._clock()))
        return f"{left // 60}:{left % 60:02d}"

    def _line(self) -> Text:
        seconds = time.monotonic() - self._since
        return Text(f"{self._left()} left, trial {self._trials + 1}: {self._now}  {seconds:.0f} s")
