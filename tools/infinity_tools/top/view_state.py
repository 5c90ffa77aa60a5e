"""What is on the screen, and what a key changes of it."""

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
"""Sort orders: the largest first, but ids from a to z."""
SORTS: Final = tuple(_BY)


@dataclass(frozen=True, kw_only=True)
class State:
    """All that the view is made from."""

    snapshot: Snapshot
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Of each drive."""
    only: str = ""
    """Begin of the ids of those runs that are shown."""
    sort: str = SORTS[0]
    reverse: bool = False
    chosen: str = ""
    """Id of a run; one that is not there stands for the first."""
    expanded: frozenset[str] = frozenset()
    """Ids of runs that are shown with their ranks."""
    paused: bool = False
    help: bool = False
    """Whether the keys are explained instead."""
    interval: float = 1.0
    """Seconds from look to look."""
    interactive: bool = True
    """Whether there are keys to press."""
    ascii: bool = False
    """Whether a terminal has no other characters."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those that are shown, in order: those that go on first."""
        found = [run for run in self.snapshot.runs if run.id.startswith(self.only)]
        found.sort(key=lambda run: (_BY[self.sort](run), run.id), reverse=self.reverse)
        return tuple(sorted(found, key=lambda run: run.status not in ("live", "idle")))

    @property
    def chosen_run(self) -> Run | None:
        """The one that keys are about; None where there is none."""
        return next((run for run in self.runs if run.id == self.chosen), next(iter(self.runs), None))

    def pressed(self, key: str) -> State:
        """Return what is shown after a key; a key without a meaning changes nothing."""
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
