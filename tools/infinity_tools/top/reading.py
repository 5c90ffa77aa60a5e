"""Snapshots of the node's state, from its daemon or from the stats files of its ranks.

Both sources have the same structure, because `infinityd` also computes its figures with `infinity.telemetry.run_views`.
Figures that only the daemon knows (drive profiles and wear) are None without it.
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
from infinity.telemetry.drive_views import DriveLooks
from infinity.telemetry.metrics import PARTS
from infinity.telemetry.run_views import Runs
from infinity.telemetry.stats import KEEP_CLOSED_SECONDS
from infinity.telemetry.stats_cells import CLOSED_CELL
from infinity.telemetry.trees import Tree, plain

_MOST_FILES: Final = 1024
_NO_DAEMON: Final = "infinityd is not running: drive profiles and wear are unknown (-)"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Figures for a rank on this node. Unknown figures are None."""

    rank: int
    pid: int
    status: str
    """``live``, ``ended``, or ``dead`` (exited unexpectedly)."""
    step: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    parts: Mapping[str, float]
    """Fraction of the step time spent in each part (sum: 1). Empty before the first step."""
    stalled: float | None
    """Fraction of the step time during which the training thread was stalled on storage."""
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None
    host_cache_used: float | None
    host_cache_bytes: float | None
    errors: float | None
    """Number of stats transfers that failed after all retries."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures for a run, from its ranks on this node. Unknown figures are None."""

    id: str
    name: str
    """Name of the run (`run.name`), or an empty string if it has no other name than its id."""
    user: str
    status: str
    """``dead`` if a rank is dead, ``idle`` if the run is live but has no recent step, otherwise ``live`` or ``ended``.
    """
    world_size: int
    step: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    loss: float | None
    parts: Mapping[str, float]
    stalled: float | None
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None
    host_cache_used: float | None
    host_cache_bytes: float | None
    checkpointed: float | None
    """Unix time of the last checkpoint that all ranks completed."""
    checkpoint_seconds: float | None
    """Mean duration of a checkpoint."""
    checkpoints: float | None
    prefetch_hit: float | None
    """Fraction of stats requests for which the stats was ready."""
    prefetch_late: float | None
    """Fraction of stats requests for which the stats was still being read or not yet being read."""
    errors: float | None
    retries: float | None
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Figures for a drive that runs use. Unknown figures are None."""

    name: str
    read_bytes_per_second: float | None
    """Like `written_bytes_per_second` and `busy`, this includes the requests of all processes."""
    written_bytes_per_second: float | None
    busy: float | None
    """Fraction of the time during which the drive is processing requests."""
    free_bytes: float | None
    capacity_bytes: float | None
    profile_bytes_per_second: float | None
    """Measured bandwidth with half reads and half writes, or with only reads if there is no mixed measurement."""
    worn: float | None
    """Used fraction of the rated life."""
    endurance_days: float | None
    error: str
    """Reason why the drive cannot be inspected, or an empty string."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of the node at one point in time."""

    time: float
    """Unix time of the snapshot."""
    infinityd: str | None
    """Version of the daemon that reported the state, or None if the state comes from stats files."""
    runtime_dir: str
    runs: tuple[Run, ...]
    drives: tuple[Drive, ...]
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
            return self._snapshot(tree, _text(_at(tree, "node", "version")), self._daemon_notes(tree))
        found, notes = self._stats_files()
        now, unix = time.monotonic(), time.time()
        looked = self._drives.look((path for stats in found if stats.alive for path in stats.header.paths), now)
        tree = {
            "time": unix,
            "runs": self._runs.look(found, {}, now, unix),
            "drives": [drive for _, drive in looked],
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
                wrong.append(_text(str(error).removeprefix(f"{self._folder}/")))
                continue
            if stats.status != "ended" or time.time() - stats.values[CLOSED_CELL] < KEEP_CLOSED_SECONDS:
                found.append(stats)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return found, [f"ignored {wrong[0]}{more}"] if wrong else []

    def _daemon_notes(self, tree: Tree) -> list[str]:
        broken = _number(tree, "node", "broken_stats_files")
        if not broken:
            return []
        files = (
            "a stats file that is unreadable or from a different version"
            if broken == 1
            else f"{broken:.0f} stats files that are unreadable or from a different version"
        )
        return [f"ignored {files}; see the log of infinityd"]

    def _snapshot(self, tree: Tree, version: str | None, notes: list[str]) -> Snapshot:
        return Snapshot(
            time=_number(tree, "time") or time.time(),
            infinityd=version,
            runtime_dir=_text(str(self._folder)),
            runs=tuple(map(_run, _list(tree, "runs"))),
            drives=tuple(map(_drive, _list(tree, "drives"))),
            notes=tuple(notes),
        )


# Conversion of the state. An entry that is missing or malformed becomes None (unknown).


def _run(tree: Tree) -> Run:
    host_cache, late = (
        _at(tree, "host_cache", "roles"),
        (_number(tree, "fetches", "late"), _number(tree, "fetches", "miss")),
    )
    return Run(
        id=_text(tree.get("id")),
        name=_text(tree.get("name", "")) if tree.get("name") != tree.get("id") else "",
        user=_text(tree.get("user", "")),
        status="idle" if tree.get("idle") is True else _text(tree.get("status")),
        world_size=int(_number(tree, "world_size") or 0),
        step=_number(tree, "steps"),
        step_seconds=_number(tree, "step_seconds"),
        tokens_per_second=_number(tree, "tokens_per_second"),
        loss=_number(tree, "loss"),
        parts=_parts(tree),
        stalled=_number(tree, "stalled"),
        read_bytes_per_second=_number(tree, "io", "read"),
        written_bytes_per_second=_number(tree, "io", "write"),
        host_cache_used=sum(_number(host_cache, role) or 0.0 for role in host_cache)
        if isinstance(host_cache, Mapping)
        else None,
        host_cache_bytes=_number(tree, "host_cache", "capacity"),
        checkpointed=_number(tree, "checkpoint", "last"),
        checkpoint_seconds=_number(tree, "checkpoint", "seconds"),
        checkpoints=_number(tree, "checkpoint", "count"),
        prefetch_hit=_number(tree, "fetches", "hit"),
        prefetch_late=None if None in late else sum(filter(None, late)),
        errors=_number(tree, "io", "errors"),
        retries=_number(tree, "io", "retries"),
        ranks=tuple(map(_rank, _list(tree, "ranks"))),
    )


def _rank(tree: Tree) -> Rank:
    return Rank(
        rank=int(_number(tree, "rank") or 0),
        pid=int(_number(tree, "pid") or 0),
        status=_text(tree.get("status")),
        step=_number(tree, "steps"),
        step_seconds=_number(tree, "step_seconds"),
        tokens_per_second=_number(tree, "tokens_per_second"),
        parts=_parts(tree),
        stalled=_number(tree, "stalled"),
        read_bytes_per_second=_number(tree, "read"),
        written_bytes_per_second=_number(tree, "write"),
        host_cache_used=_number(tree, "host_cache_used"),
        host_cache_bytes=_number(tree, "host_cache_capacity"),
        errors=_number(tree, "errors"),
    )


def _drive(tree: Tree) -> Drive:
    return Drive(
        name=_text(tree.get("name")),
        read_bytes_per_second=_number(tree, "read"),
        written_bytes_per_second=_number(tree, "write"),
        busy=_number(tree, "busy"),
        free_bytes=_number(tree, "free"),
        capacity_bytes=_number(tree, "capacity"),
        profile_bytes_per_second=_number(tree, "profile", "mixed") or _number(tree, "profile", "read"),
        worn=_number(tree, "wear", "ratio"),
        endurance_days=_number(tree, "wear", "days"),
        error=_text(tree.get("error", "")),
    )


def _parts(tree: Tree) -> Mapping[str, float]:
    found = {part: _number(tree, "parts", part) for part in PARTS}
    return {part: share for part, share in found.items() if share is not None and math.isfinite(share)}


def _at(tree: Any, *names: str) -> Any:
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _number(tree: Any, *names: str) -> float | None:
    """Return the number at a location, or None. JSON represents non-finite numbers as text (see `trees.plain`)."""
    value = _at(tree, *names)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _list(tree: Tree, name: str) -> list[Tree]:
    found = tree.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _text(value: object) -> str:
    """Return `value` as text without control characters, so that it cannot affect the terminal."""
    text = value if isinstance(value, str) else "?"
    return text if text.isprintable() else ascii(text)[1:-1]
