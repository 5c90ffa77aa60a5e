"""What is shown of the node at one moment, from its daemon or from the stats pages of its ranks.

Both make the same tree: `infinity.telemetry.run_views` turns pages into figures for `infinityd` too. What only the
daemon
knows (profiles of drives, their wear) is None without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infinity.daemon_client import NodeDaemon
from infinity.telemetry import Snapshot as Page
from infinity.telemetry import StatsPageError, read_stats_page, stats_page_files
from infinity.telemetry.drive_views import DriveLooks
from infinity.telemetry.metrics import PARTS
from infinity.telemetry.run_views import Runs
from infinity.telemetry.stats import KEEP_CLOSED_SECONDS
from infinity.telemetry.stats_cells import CLOSED_CELL
from infinity.telemetry.trees import Tree, plain

_MOST_PAGES: Final = 1024
_NO_DAEMON: Final = "without infinityd: profile, worn and days left unknown (-)"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank on this node; None where something is not known (yet)."""

    rank: int
    pid: int
    status: str
    """``live``, ``ended``, or ``dead``: gone without having ended."""
    step: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    parts: Mapping[str, float]
    """Shares of a step's time by part, which add up to 1; empty before the first step."""
    stalled: float | None
    """Share of a step's time in which it waits for pages."""
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None
    host_cache_used: float | None
    host_cache_bytes: float | None
    errors: float | None
    """Transfers that failed for good."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its ranks on this node tell; None where something is not known (yet)."""

    id: str
    status: str
    """As of a rank: ``dead`` where one is; and ``idle``: live, but without a step for long."""
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
    """Unix time of the last checkpoint of all ranks."""
    checkpoint_seconds: float | None
    """Mean length of a checkpoint."""
    checkpoints: float | None
    prefetch_hit: float | None
    """Share of the pages asked for that were ready."""
    prefetch_late: float | None
    """Share that was still being read, or not begun."""
    errors: float | None
    retries: float | None
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A drive that runs use; None where something is not known (yet)."""

    name: str
    read_bytes_per_second: float | None
    """By everybody, as of the next two."""
    written_bytes_per_second: float | None
    busy: float | None
    """Share of the time in which it has something to do."""
    free_bytes: float | None
    capacity_bytes: float | None
    profile_bytes_per_second: float | None
    """What it can do with half reads and half writes, else with reads."""
    worn: float | None
    """Share of its rated life that is used."""
    endurance_days: float | None
    error: str
    """Why it cannot be looked at; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The node at one moment."""

    time: float
    """Unix time."""
    infinityd: str | None
    """Version of the daemon that tells it; None: straight from the stats pages."""
    runtime_dir: str
    runs: tuple[Run, ...]
    drives: tuple[Drive, ...]
    notes: tuple[str, ...]
    """What is to be said beside the figures."""


class Reader:
    """Looks at the node again and again: asks the daemon of a runtime folder, or else reads the pages in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node = NodeDaemon(folder)
        self._runs = Runs(lambda path: None)  # what was seen while no daemon answered
        self._drives = DriveLooks()  # as `_runs`

    def read(self) -> Snapshot:
        """Return the node as it is now."""
        tree = self._node.ask("state")
        if tree is not None and isinstance(tree.get("runs"), list):
            return self._snapshot(tree, _text(_at(tree, "node", "version")), self._daemon_notes(tree))
        found, notes = self._pages()
        now, unix = time.monotonic(), time.time()
        looked = self._drives.look((path for page in found if page.alive for path in page.header.paths), now)
        tree = {
            "time": unix,
            "runs": self._runs.look(found, {}, now, unix),
            "drives": [drive for _, drive in looked],
        }
        return self._snapshot(plain(tree), None, [_NO_DAEMON, *notes])

    def _pages(self) -> tuple[list[Page], list[str]]:
        """Return the pages of the folder but those that ended long ago, and what to say of files that are none."""
        found: list[Page] = []
        wrong: list[str] = []
        for path in stats_page_files(self._folder)[:_MOST_PAGES]:
            try:
                page = read_stats_page(path)
            except StatsPageError as error:
                wrong.append(_text(str(error).removeprefix(f"{self._folder}/")))
                continue
            if page.status != "ended" or time.time() - page.values[CLOSED_CELL] < KEEP_CLOSED_SECONDS:
                found.append(page)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return found, [f"passed over {wrong[0]}{more}"] if wrong else []

    def _daemon_notes(self, tree: Tree) -> list[str]:
        broken = _number(tree, "node", "broken_pages")
        if not broken:
            return []
        files = "a file that is no stats page" if broken == 1 else f"{broken:.0f} files that are no stats pages"
        return [f"passed over {files} of this version; infinityd's log names them"]

    def _snapshot(self, tree: Tree, version: str | None, notes: list[str]) -> Snapshot:
        return Snapshot(
            time=_number(tree, "time") or time.time(),
            infinityd=version,
            runtime_dir=_text(str(self._folder)),
            runs=tuple(map(_run, _list(tree, "runs"))),
            drives=tuple(map(_drive, _list(tree, "drives"))),
            notes=tuple(notes),
        )


# Of trees: what is missing, or is not what it should be, is not known #


def _run(tree: Tree) -> Run:
    host_cache, late = (
        _at(tree, "host_cache", "roles"),
        (_number(tree, "fetches", "late"), _number(tree, "fetches", "miss")),
    )
    return Run(
        id=_text(tree.get("id")),
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
    """Return a number; those that JSON has not are texts (`plain`)."""
    value = _at(tree, *names)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _list(tree: Tree, name: str) -> list[Tree]:
    found = tree.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _text(value: object) -> str:
    """Return a text that changes nothing of a terminal."""
    text = value if isinstance(value, str) else "?"
    return text if text.isprintable() else ascii(text)[1:-1]
