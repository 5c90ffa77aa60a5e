"""The stats pages of a runtime folder: who is live, who is dead, and removing what is old."""

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

from infinity.telemetry import Snapshot, StatsPageError, read_stats_page, stats_page_files
from infinity.telemetry.stats_file import Status, remove_stats_page
from infinity_daemon.log import event

_MAX_PAGES: Final = 1024
_DRAFT = re.compile(r"\..+\.stats\.\d+")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is in the folder: readable pages, and the number of files that are none."""

    pages: tuple[Snapshot, ...]
    broken: int


class StatsPages:
    """Reads the folder anew at every `scan`; remembers since when a rank is gone. Threads may share it."""

    def __init__(self, folder: Path, keep_dead_seconds: float, keep_ended_seconds: float) -> None:
        """Nothing is read yet.

        Args:
            folder: the runtime folder.
            keep_dead_seconds: how long the page of a rank that died is served.
            keep_ended_seconds: how long that of a rank that ended in order is; two scrapes should fit.
        """
        self._folder = folder
        self.keep = {"dead": keep_dead_seconds, "ended": keep_ended_seconds}
        """Seconds by status; replaced when settings are read again."""
        self._gone_since: dict[tuple[int, int, Status], float] = {}
        """Monotonic seconds at which a scan first found a page with a status that it cannot leave, by device and
        inode; under `_lock`."""
        self._complained: dict[Path, str] = {}
        """What was logged about files that are none, so that it is said once; under `_lock`."""
        self._lock = threading.Lock()  # one scan at a time: of the loop's threads and the exporter's

    def scan(self) -> Found:
        """Return every page but those of ranks that have been gone for too long, which are removed."""
        with self._lock:
            return self._scan()

    def _scan(self) -> Found:
        pages: list[Snapshot] = []
        gone: dict[tuple[int, int, Status], float] = {}
        complained: dict[Path, str] = {}
        for path in stats_page_files(self._folder)[:_MAX_PAGES]:
            try:
                about = path.stat(follow_symlinks=False)
                page = read_stats_page(path)
            except (OSError, StatsPageError) as error:
                complained[path] = str(error)
                if self._complained.get(path) != str(error):
                    event(logging.WARNING, "page.broken", reason=str(error))
                continue
            if not page.alive:
                key = (about.st_dev, about.st_ino, page.status)
                gone[key] = self._gone_since.get(key, time.monotonic())
                if time.monotonic() - gone[key] >= self.keep[page.status]:
                    _remove(path, about)
                    continue
            pages.append(page)
        self._gone_since, self._complained = gone, complained
        self._remove_drafts()
        return Found(pages=tuple(pages), broken=len(complained))

    def _remove_drafts(self) -> None:
        """Remove pages that a killed rank left before they had their name."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    about = path.stat(follow_symlinks=False)
                    if time.time() - about.st_mtime >= self.keep["dead"]:
                        _remove(path, about)


def _remove(path: Path, about: os.stat_result) -> None:
    if remove_stats_page(path, about):
        event(logging.INFO, "page.removed", file=path.name)
