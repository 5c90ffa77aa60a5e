"""Log of the starts, ends and deaths of runs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from infinity.telemetry import Snapshot
from infinity.telemetry.stats_file import run_status
from infinity_daemon.log import event

_EVENTS: Final = {"live": "run.started", "ended": "run.ended", "dead": "run.died"}


class RunLog:
    """Log each change of the status of a run on this node. Not thread-safe."""

    def __init__(self) -> None:
        self._statuses: dict[str, str] | None = None  # status of each run by its id; None before the first reading

    def observe(self, snapshots: Iterable[Snapshot]) -> None:
        """Compare a reading of the stats files with the previous one, and log the differences."""
        runs: dict[str, list[Snapshot]] = defaultdict(list)
        for snapshot in snapshots:
            runs[snapshot.header.run_id].append(snapshot)
        before, self._statuses = self._statuses, {run: run_status(ranks) for run, ranks in runs.items()}
        for run, status in self._statuses.items():
            if before is None:
                _log("run.found", run, runs[run], status=status)
            elif before.get(run) != status:
                _log(_EVENTS[status], run, runs[run])
        for run, status in (before or {}).items():
            if status == "live" and run not in runs:  # a run without a step leaves no stats file
                event(logging.INFO, "run.ended", run=run, steps=0)


def _log(name: str, run: str, ranks: list[Snapshot], **values: object) -> None:
    header, dead = ranks[0].header, [snapshot.header for snapshot in ranks if snapshot.status == "dead"]
    values = {"run": run, "name": header.name, **values, "world_size": header.world_size}
    if name != "run.started":
        values["steps"] = int(min(snapshot.value("steps_total") for snapshot in ranks))
    if dead:
        values["dead_ranks"] = ",".join(str(rank.rank) for rank in dead)
        values["dead_pids"] = ",".join(str(rank.pid) for rank in dead)
    event(logging.WARNING if dead else logging.INFO, name, **values)
