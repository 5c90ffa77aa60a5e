"""The stats pages of a runtime folder: who is live, who is dead, and removing what is old."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infinity.telemetry import Snapshot, StatsPageError, read_stats_page, stats_page_files
from infinity_daemon.log import event

_MAX_PAGES: Final = 1024
_DRAFT = re.compile(r"\..+\.stats\.\d+")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is in the folder: readable pages, and the number of files that are none."""

    pages: tuple[Snapshot, ...]
    broken: int

    @property
    def live(self) -> tuple[Snapshot, ...]:
        """Pages of ranks that run."""
        return tuple(page for page in self.pages if page.alive)


class StatsPages:
    """Reads the folder anew at every `scan`; remembers since when a page is dead. Threads may share it."""

    def __init__(self, folder: Path, keep_dead_seconds: float) -> None:
        self._folder, self._keep = folder, keep_dead_seconds
        self._dead_since: dict[tuple[int, int], float] = {}
        """Monotonic seconds at which a scan first found a page dead, by device and inode; under `_lock`."""
        self._complained: dict[Path, str] = {}
        """What was logged about files that are none, so that it is said once; under `_lock`."""
        self._lock = threading.Lock()  # one scan at a time: of the loop's threads and the exporter's

    def scan(self) -> Found:
        """Return every page but those of ranks that have been dead for too long, which are removed."""
        with self._lock:
            return self._scan()

    def _scan(self) -> Found:
        pages: list[Snapshot] = []
        dead: dict[tuple[int, int], float] = {}
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
                key = (about.st_dev, about.st_ino)
                dead[key] = self._dead_since.get(key, time.monotonic())
                if time.monotonic() - dead[key] >= self._keep:
                    _remove(path, about)
                    continue
            pages.append(page)
        self._dead_since, self._complained = dead, complained
        self._remove_drafts()
        return Found(pages=tuple(pages), broken=len(complained))

    def _remove_drafts(self) -> None:
        """Remove pages that a killed rank left before they had their name."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    about = path.stat(follow_symlinks=False)
                    if time.time() - about.st_mtime >= self._keep:
                        _remove(path, about)


def _remove(path: Path, about: os.stat_result) -> None:
    """Remove a file unless somebody holds it or a new one has taken its name."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), about):
                path.unlink()
                event(logging.INFO, "page.removed", file=path.name)
        finally:
            os.close(file)
