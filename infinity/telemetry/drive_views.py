"""Throughput, latency and free space of drives, from operating system counters, for `infinityd` and commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from infinity.io.block_devices import SYSFS, Drive, DriveCounters, Place, counters, locate, space
from infinity.telemetry.trees import Tree, known

_RATE_SECONDS: Final = 5.0
"""Interval over which throughput is averaged. It is longer if consecutive readings are further apart."""


def _drive_trees(paths: Iterable[str], sysfs: Path) -> list[tuple[Drive | None, Tree]]:
    by_drive: dict[str, list[Place]] = {}
    missing: list[tuple[None, Tree]] = []
    for path in dict.fromkeys(paths):
        try:
            place = locate(path, sysfs)
        except (OSError, ValueError) as error:
            missing.append((None, {"name": path, "paths": [path], "error": _reason(error)}))
        else:
            by_drive.setdefault(place.drive.name, []).append(place)
    return [*((here[0].drive, _tree(here, sysfs)) for _, here in sorted(by_drive.items())), *missing]


def _tree(here: list[Place], sysfs: Path) -> Tree:
    drive = here[0].drive
    tree: Tree = {"name": drive.name, "paths": [place.path for place in here]}
    try:
        spaces = [space(place.path) for place in {place.file_system: place for place in here}.values()]
        tree |= {"capacity": sum(one.capacity for one in spaces), "free": sum(one.free for one in spaces)}
    except OSError as error:
        tree["error"] = _reason(error)
    found = counters(drive, sysfs)
    return tree if found is None else {**tree, "counters": asdict(found)}


def without_counters(drive: Tree) -> Tree:
    """Return the figures of a drive without its counters since boot, which only the metrics need."""
    return {name: value for name, value in drive.items() if name != "counters"}


class DriveLooks:
    """Compute throughput from successive readings of drive counters.

    Not thread-safe. A call may block if a drive does not respond.
    """

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self._counts: dict[str, deque[tuple[float, DriveCounters]]] = {}
        """Readings of the last `_RATE_SECONDS` by drive: monotonic time in seconds, and the counters since boot."""

    def look(self, paths: Iterable[str], now: float) -> list[tuple[Drive | None, Tree]]:
        """Return each drive with its paths, space, counters and rates, followed by the paths that cannot be examined.

        The space of a file system with several paths is counted once.

        Args:
            paths: Paths on the drives.
            now: Current monotonic time in seconds.
        """
        looked = _drive_trees(paths, self._sysfs)
        self._counts = {drive.name: self._counts.get(drive.name, deque()) for drive, _ in looked if drive is not None}
        return [(drive, tree if drive is None else tree | self._rates(drive, tree, now)) for drive, tree in looked]

    def _rates(self, drive: Drive, tree: Tree, now: float) -> Tree:
        """Return the drive's throughput, busy fraction and latency, for the requests of all processes.

        Empty if the operating system does not report counters, or if they have been reset.
        """
        counts = self._counts[drive.name]
        found = DriveCounters(**tree["counters"]) if "counters" in tree else None
        if found is None or (counts and found.read + found.written < counts[-1][1].read + counts[-1][1].written):
            counts.clear()
        if found is None:
            return {}
        counts.append((now, found))
        while len(counts) > 2 and now - counts[0][0] > _RATE_SECONDS + 0.5:
            counts.popleft()
        begin, first = counts[0]
        if now <= begin:
            return {}
        passed = now - begin
        reads, writes = found.reads - first.reads, found.writes - first.writes
        return known(
            read=(found.read - first.read) / passed,
            write=(found.written - first.written) / passed,
            busy=(found.busy_seconds - first.busy_seconds) / passed,
            read_latency=(found.read_seconds - first.read_seconds) / reads if reads else None,
            write_latency=(found.write_seconds - first.write_seconds) / writes if writes else None,
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
