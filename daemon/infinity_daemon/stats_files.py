"""Stats files in a runtime folder: detection of live and dead ranks, and removal of old files."""

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
from infinity.telemetry.stats_file import Status, remove_stats_file
from infinity_daemon.log import event

_MAX_FILES: Final = 1024
_DRAFT = re.compile(r"\..+\.stats\.\d+")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Contents of the folder: readable stats files, and the number of unreadable ones."""

    snapshots: tuple[Snapshot, ...]
    broken: int


class StatsFiles:
    """Read the folder at every `scan`, and remember since when each rank is gone. Threads may share an instance."""

    def __init__(self, folder: Path, keep_dead_seconds: float, keep_ended_seconds: float) -> None:
        """Start without reading the folder.

        Args:
            folder: The runtime folder.
            keep_dead_seconds: Time for which the file of a dead rank is served.
            keep_ended_seconds: Time for which the file of an ended rank is served. Allow for two scrapes.
        """
        self._folder = folder
        self.keep = {"dead": keep_dead_seconds, "ended": keep_ended_seconds}
        """Seconds by status; replaced when the settings are reloaded."""
        self._gone_since: dict[tuple[int, int, Status], float] = {}
        """Monotonic time at which a scan first found a file with a final status, by device and inode; protected by
        `_lock`."""
        self._complained: dict[Path, str] = {}
        """Logged errors by file, so that each is logged once; protected by `_lock`."""
        self._lock = threading.Lock()  # one scan at a time: threads of the event loop and of the exporter call `scan`

    def scan(self) -> Found:
        """Return all stats files, after removing the files of ranks that exited too long ago."""
        with self._lock:
            return self._scan()

    def _scan(self) -> Found:
        snapshots: list[Snapshot] = []
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
                    _remove(path, about)
                    continue
            snapshots.append(snapshot)
        self._gone_since, self._complained = gone, complained
        self._remove_drafts()
        return Found(snapshots=tuple(snapshots), broken=len(complained))

    def _remove_drafts(self) -> None:
        """Remove drafts that a killed rank left before it renamed them."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    about = path.stat(follow_symlinks=False)
                    if time.time() - about.st_mtime >= self.keep["dead"]:
                        _remove(path, about)


def _remove(path: Path, about: os.stat_result) -> None:
    if remove_stats_file(path, about):
        event(logging.INFO, "page.removed", file=path.name)
