"""State of the screen, and its changes on key presses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from infinity.telemetry.trees import Tree
from infinity_tools.top.minute import Curve
from infinity_tools.top.reading import Snapshot, bytes_per_second, figure, status_of, word

_BY: Final[Mapping[str, Callable[[Tree], float | str]]] = {
    "step time": lambda run: -(figure(run, "step_seconds") or 0.0),
    "stall share": lambda run: -(figure(run, "stalled") or 0.0),
    "bytes": lambda run: -sum(rate or 0.0 for rate in bytes_per_second(run)),
    "id": lambda run: word(run, "id"),
}
"""Sort keys by name. Figures are sorted from largest to smallest, ids alphabetically."""
SORTS: Final = tuple(_BY)


@dataclass(frozen=True, kw_only=True)
class State:
    """State from which the screen is rendered."""

    snapshot: Snapshot
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Throughput during the last minute, by drive name."""
    only: str = ""
    """Prefix of the ids of the runs to show."""
    sort: str = SORTS[0]
    reverse: bool = False
    chosen: str = ""
    """Id of the selected run. The first run is selected if no run has this id."""
    expanded: frozenset[str] = frozenset()
    """Ids of runs whose ranks are shown."""
    paused: bool = False
    help: bool = False
    """``True`` if the help screen is shown."""
    interval: float = 1.0
    """Seconds between updates."""
    interactive: bool = True
    """``True`` if the view responds to keys."""
    ascii: bool = False
    """``True`` if to use only ASCII characters."""

    @property
    def runs(self) -> tuple[Tree, ...]:
        """Displayed runs in sort order. Live runs precede runs that have exited."""
        found = [run for run in self.snapshot.runs if word(run, "id").startswith(self.only)]
        found.sort(key=lambda run: (_BY[self.sort](run), word(run, "id")), reverse=self.reverse)
        return tuple(sorted(found, key=lambda run: status_of(run) not in ("live", "idle")))

    @property
    def chosen_run(self) -> str:
        """Id of the selected run, or an empty string if there are no runs."""
        ids = [word(run, "id") for run in self.runs]
        return self.chosen if self.chosen in ids else next(iter(ids), "")

    def pressed(self, key: str) -> State:
        """Return the state after a key press. Unknown keys are ignored."""
        if self.help:
            return replace(self, help=False)
        match key:
            case "down" | "j":
                return self._moved(1)
            case "up" | "k":
                return self._moved(-1)
            case "enter":
                run = self.chosen_run
                return replace(self, chosen=run, expanded=self.expanded ^ {run}) if run else self
            case "s":
                return replace(self, sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)])
            case "r":
                return replace(self, reverse=not self.reverse)
            case "p":
                return replace(self, paused=not self.paused)
            case "?":
                return replace(self, help=True)
        return self

    def _moved(self, by: int) -> State:
        ids = [word(run, "id") for run in self.runs]
        if not ids:
            return self
        return replace(self, chosen=ids[min(max(0, ids.index(self.chosen_run) + by), len(ids) - 1)])
