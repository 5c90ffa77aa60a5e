"""State of the screen, and its changes on key presses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from infinity_tools.top.minute import Curve
from infinity_tools.top.reading import Run, Snapshot

_BY: Final[Mapping[str, Callable[[Run], float | str]]] = {
    "step time": lambda run: -(run.step_seconds or 0.0),
    "stall share": lambda run: -(run.stalled or 0.0),
    "bytes": lambda run: -((run.read_bytes_per_second or 0.0) + (run.written_bytes_per_second or 0.0)),
    "id": lambda run: run.id,
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
    def runs(self) -> tuple[Run, ...]:
        """Displayed runs in sort order. Live runs precede runs that have exited."""
        found = [run for run in self.snapshot.runs if run.id.startswith(self.only)]
        found.sort(key=lambda run: (_BY[self.sort](run), run.id), reverse=self.reverse)
        return tuple(sorted(found, key=lambda run: run.status not in ("live", "idle")))

    @property
    def chosen_run(self) -> Run | None:
        """Selected run, or None if there are no runs."""
        return next((run for run in self.runs if run.id == self.chosen), next(iter(self.runs), None))

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
                return self if run is None else replace(self, chosen=run.id, expanded=self.expanded ^ {run.id})
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
        ids, run = [run.id for run in self.runs], self.chosen_run
        if run is None:
            return self
        return replace(self, chosen=ids[min(max(0, ids.index(run.id) + by), len(ids) - 1)])
