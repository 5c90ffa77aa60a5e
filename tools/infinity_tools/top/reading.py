"""Snapshots of the node's state, from its daemon or from the stats files of its ranks.

Both sources have the same structure, because `infinityd` also computes its figures with `infinity.telemetry.run_views`.
Figures that only the daemon knows (drive profiles and wear) are absent without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infinity.daemon_client import NodeDaemon
from infinity.telemetry import Snapshot as StatsSnapshot
from infinity.telemetry import StatsFileError, find_stats_files, read_stats_file
from infinity.telemetry.drive_views import DriveLooks, without_counters
from infinity.telemetry.metrics import PARTS
from infinity.telemetry.run_views import Runs
from infinity.telemetry.stats import KEEP_CLOSED_SECONDS
from infinity.telemetry.stats_cells import CLOSED_CELL
from infinity.telemetry.stats_file import without_replaced
from infinity.telemetry.trees import Tree, plain

_MOST_FILES: Final = 1024
_NO_DAEMON: Final = "infinityd is not running: drive profiles and wear are unknown (-)"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of the node at one point in time."""

    time: float
    """Unix time of the snapshot."""
    infinityd: str | None
    """Version of the daemon that reported the state, or None if the state comes from stats files."""
    runtime_dir: str
    runs: tuple[Tree, ...]
    """Figures of the runs and their ranks, as in `infinity.telemetry.run_views`. Unknown figures are absent."""
    drives: tuple[Tree, ...]
    """Figures of the drives that runs use, as in `infinity.telemetry.drive_views`."""
    notes: tuple[str, ...]
    """Remarks to display with the figures."""


class Reader:
    """Reads snapshots of the node's state from the daemon or, if it is not running, from the stats files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node = NodeDaemon(folder)
        self._runs = Runs(lambda path: None)  # used without a daemon
        self._drives = DriveLooks()  # used without a daemon

    def read(self) -> Snapshot:
        """Return the current state of the node."""
        tree = self._node.ask("state")
        if tree is not None and isinstance(tree.get("runs"), list):
            version = _at(_printable(tree), "node", "version")
            return self._snapshot(tree, version if isinstance(version, str) else "?", self._daemon_notes(tree))
        found, notes = self._stats_files()
        now, unix = time.monotonic(), time.time()
        looked = self._drives.look((path for stats in found if stats.alive for path in stats.header.paths), now)
        tree = {
            "time": unix,
            "runs": self._runs.look(found, {}, now, unix),
            "drives": [without_counters(drive) for _, drive in looked],
        }
        return self._snapshot(plain(tree), None, [_NO_DAEMON, *notes])

    def _stats_files(self) -> tuple[list[StatsSnapshot], list[str]]:
        """Return the stats files of live ranks and of ranks that exited recently, and remarks about unreadable
        files."""
        found: list[StatsSnapshot] = []
        wrong: list[str] = []
        for path in find_stats_files(self._folder)[:_MOST_FILES]:
            try:
                stats = read_stats_file(path)
            except StatsFileError as error:
                wrong.append(_printable(str(error).removeprefix(f"{self._folder}/")))
                continue
            if stats.status != "ended" or time.time() - stats.values[CLOSED_CELL] < KEEP_CLOSED_SECONDS:
                found.append(stats)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return without_replaced(found), [f"ignored {wrong[0]}{more}"] if wrong else []

    def _daemon_notes(self, tree: Tree) -> list[str]:
        broken = figure(tree, "node", "broken_stats_files")
        if not broken:
            return []
        files = (
            "a stats file that is unreadable or from a different version"
            if broken == 1
            else f"{broken:.0f} stats files that are unreadable or from a different version"
        )
        return [f"ignored {files}; see the log of infinityd"]

    def _snapshot(self, tree: Tree, version: str | None, notes: list[str]) -> Snapshot:
        tree = _printable(tree)
        return Snapshot(
            time=figure(tree, "time") or time.time(),
            infinityd=version,
            runtime_dir=_printable(str(self._folder)),
            runs=tuple(entries(tree, "runs")),
            drives=tuple(entries(tree, "drives")),
            notes=tuple(notes),
        )


def _printable(value: Any) -> Any:
    """Return a tree whose texts contain no control characters, so that they cannot affect the terminal."""
    if isinstance(value, Mapping):
        return {name: _printable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return value if not isinstance(value, str) or value.isprintable() else ascii(value)[1:-1]


# Figures of a run, a rank or a drive. An entry that is missing or malformed is unknown. #


def _at(tree: Any, *names: str) -> Any:
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def figure(tree: Tree, *names: str) -> float | None:
    """Return the number at a location, or None. JSON represents non-finite numbers as text (see `trees.plain`)."""
    value = _at(tree, *names)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def word(tree: Tree, name: str) -> str:
    """Return a text, or an empty string."""
    value = tree.get(name, "")
    return value if isinstance(value, str) else "?"


def words(tree: Tree, name: str) -> list[str]:
    """Return a list of texts."""
    found = tree.get(name)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def entries(tree: Tree, name: str) -> list[Tree]:
    """Return a list of trees, for example the ranks of a run."""
    found = tree.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def parts_of(tree: Tree) -> Mapping[str, float]:
    """Return the fraction of the step time spent in each part (sum: 1). Empty before the first step."""
    found = {part: figure(tree, "parts", part) for part in PARTS}
    return {part: share for part, share in found.items() if share is not None and math.isfinite(share)}


def status_of(run: Tree) -> str:
    """Return ``live``, ``idle`` (live, but without a recent step), ``ended``, or ``dead`` (exited unexpectedly)."""
    return "idle" if run.get("idle") is True else word(run, "status")


def name_of(run: Tree) -> str:
    """Return the name of a run (`run.name`), or an empty string if it has no other name than its id."""
    return "" if run.get("name") == run.get("id") else word(run, "name")


def bytes_per_second(run: Tree) -> tuple[float | None, float | None]:
    """Return the bytes per second that a run reads and writes."""
    return figure(run, "io", "read"), figure(run, "io", "write")
