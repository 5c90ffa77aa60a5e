"""Reading of the stats files in a runtime folder, and removal of old ones."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infinity.telemetry import Snapshot, StatsFileError, find_stats_files, read_stats_file
from infinity.telemetry.stats_file import StatsHeader, Status, remove_stats_file, run_exists
from infinity_daemon.log import event

_MAX_FILES: Final = 1024
_DRAFT = re.compile(r"\..+\.stats\.\d+")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Snapshots of the readable stats files in the runtime folder, and the number of unreadable ones."""

    snapshots: tuple[Snapshot, ...]
    broken: int
    expired: frozenset[tuple[str, int]] = frozenset()
    """Run ids and ranks of the snapshots of ranks that died too long ago for their metrics to be exported."""

    @property
    def exported(self) -> tuple[Snapshot, ...]:
        """Snapshots whose metrics are exported."""
        return tuple(one for one in self.snapshots if (one.header.run_id, one.header.rank) not in self.expired)


class StatsFiles:
    """Stats files in a runtime folder. Each `scan` reads them and removes old ones. Thread-safe.

    The file of a dead rank is kept until its run is resumed, which replaces the file, or until the run's folders have
    been removed, so that a failure is reported until then.
    """

    def __init__(self, folder: Path, keep_dead_seconds: float, keep_ended_seconds: float) -> None:
        """Initialize without reading the folder.

        Args:
            folder: Runtime folder.
            keep_dead_seconds: Time for which the metrics of a rank are exported after it has died.
            keep_ended_seconds: Time for which the file of a rank is kept after it has ended; at least two scrapes.
        """
        self._folder = folder
        self.keep = {"dead": keep_dead_seconds, "ended": keep_ended_seconds}
        """Time for which metrics are exported in seconds, by status. Replaced when the settings are reloaded."""
        self._gone_since: dict[tuple[int, int, Status], float] = {}
        """Monotonic time at which a scan first found a file with its final status, by device, inode and status.
        Protected by `_lock`."""
        self._complained: dict[Path, str] = {}
        """Last logged error of each file, so that it is logged only once. Protected by `_lock`."""
        self._expired: dict[Path, tuple[os.stat_result, StatsHeader]] = {}
        """Files of ranks that died too long ago, as found by the last scan. Protected by `_lock`."""
        self._lock = threading.Lock()  # several threads call `scan`; held during each call

    def scan(self) -> Found:
        """Remove the files of ranks that ended too long ago, and return the others."""
        with self._lock:
            return self._scan()

    def remove_expired(self) -> None:
        """Remove the files of dead ranks that have expired and whose run has been removed.

        Unlike `scan`, this accesses the drives, which may block if a drive does not respond.
        """
        with self._lock:
            expired = dict(self._expired)
        for path, (about, header) in expired.items():
            if not run_exists(header):
                _remove(path, about)

    def _scan(self) -> Found:
        snapshots: list[Snapshot] = []
        expired: dict[Path, tuple[os.stat_result, StatsHeader]] = {}
        gone: dict[tuple[int, int, Status], float] = {}
        complained: dict[Path, str] = {}
        for path in find_stats_files(self._folder)[:_MAX_FILES]:
            try:
                about = path.stat(follow_symlinks=False)
                snapshot = read_stats_file(path)
            except (OSError, StatsFileError) as error:
                complained[path] = str(error)
                if self._complained.get(path) != str(error):
                    event(logging.WARNING, "stats_file.broken", reason=str(error))
                continue
            if not snapshot.alive:
                key = (about.st_dev, about.st_ino, snapshot.status)
                gone[key] = self._gone_since.get(key, time.monotonic())
                if time.monotonic() - gone[key] >= self.keep[snapshot.status]:
                    if snapshot.status == "ended":
                        _remove(path, about)
                        continue
                    expired[path] = about, snapshot.header
            snapshots.append(snapshot)
        self._gone_since, self._complained, self._expired = gone, complained, expired
        self._remove_drafts()
        names = ((header.run_id, header.rank) for _, header in expired.values())
        return Found(snapshots=tuple(snapshots), broken=len(complained), expired=frozenset(names))

    def _remove_drafts(self) -> None:
        """Remove temporary files of ranks that were killed before they could rename them."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    about = path.stat(follow_symlinks=False)
                    if time.time() - about.st_mtime >= self.keep["dead"]:
                        _remove(path, about)


def _remove(path: Path, about: os.stat_result) -> None:
    if remove_stats_file(path, about):
        event(logging.INFO, "stats_file.removed", file=path.name)
