"""Reading of the stats files in a runtime folder, and removal of old ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from infinity.telemetry import Snapshot, StatsFileError, find_stats_files, read_stats_file
from infinity.telemetry.stats_file import (
    StatsHeader,
    Status,
    is_stats_file,
    remove_stats_file,
    run_exists,
    without_replaced,
)
from infinity.untrusted_files import trusted
from infinity_daemon.log import event
from infinity_daemon.users import Users, may_name

_MAX_FILES: Final = 1024
_MAX_USER_FILES: Final = 128
"""Maximum number of stats files per user if several users have them."""
_MAX_FILE_PATHS: Final = 16
_MAX_USER_PATHS: Final = 64
"""Maximum number of different paths per user, because the daemon accesses each of them."""
_MAX_USER_HOSTS: Final = 64
_MAX_TEXT: Final = 128
"""Maximum length of a text that another user has written, such as the name of a run."""
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
    been removed, so that a failure is reported until then. If the rank has moved to another node, its file is ignored
    while a resumed rank of its run is live on this node.
    """

    def __init__(
        self, folder: Path, keep_dead_seconds: float, keep_ended_seconds: float, users: Users | None = None
    ) -> None:
        """Initialize without reading the folder.

        Args:
            folder: Runtime folder.
            keep_dead_seconds: Time for which the metrics of a rank are exported after it has died.
            keep_ended_seconds: Time for which the file of a rank is kept after it has ended; at least two scrapes.
            users: Users whose subfolders are read as well.
        """
        self._folder = folder
        self._users = Users(folder) if users is None else users
        self._owners: dict[str, int] = {}
        """User id by run id. A run of another user with the same id gets a different one. Only replaced as a whole,
        because the event loop reads it."""
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
            if not run_exists(header, about.st_uid):
                _remove(path, about)

    def shown_id(self, run_id: str, uid: int) -> str:
        """Return the id under which a user's run is reported.

        Another user may have a run with the same id, possibly to disturb this one. Each such run gets its own id.
        """
        return _shown_id(self._owners, run_id, uid)

    def _scan(self) -> Found:
        snapshots: list[Snapshot] = []
        owners: dict[str, int] = {}
        expired: dict[Path, tuple[os.stat_result, StatsHeader]] = {}
        gone: dict[tuple[int, int, Status], float] = {}
        complained: dict[Path, str] = {}
        for path, uid in self._files():
            try:
                about = path.stat(follow_symlinks=False)
                snapshot = read_stats_file(path)
                if uid is not None and snapshot.uid != uid:
                    raise StatsFileError(f"{path}: belongs to user {snapshot.uid} instead of {uid}")
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
            run_id = snapshot.header.run_id
            owners.setdefault(run_id, self._owners.get(run_id, snapshot.uid))
            snapshots.append(snapshot)
        snapshots = without_replaced(snapshots)
        # A run id belongs to the user who had it in the last scan, as long as it is in use by this user.
        used = {(snapshot.header.run_id, snapshot.uid) for snapshot in snapshots}
        for snapshot in snapshots:
            run_id = snapshot.header.run_id
            if (run_id, owners[run_id]) not in used:
                owners[run_id] = snapshot.uid
        self._owners = owners
        named: dict[int, dict[str, bool]] = {}
        snapshots = [_reported(snapshot, owners, named.setdefault(snapshot.uid, {})) for snapshot in snapshots]
        self._gone_since, self._complained, self._expired = gone, complained, expired
        self._remove_drafts()
        names = ((_shown_id(owners, header.run_id, about.st_uid), header.rank) for about, header in expired.values())
        return Found(snapshots=tuple(snapshots), broken=len(complained), expired=frozenset(names))

    def _remove_drafts(self) -> None:
        """Remove temporary files of ranks that were killed before they could rename them."""
        for folder, uid in ((self._folder, None), *self._users.folders()):
            with contextlib.suppress(OSError):
                for path in _entries(folder):
                    if _DRAFT.fullmatch(path.name):
                        about = path.stat(follow_symlinks=False)
                        own = trusted(about.st_uid) if uid is None else about.st_uid == uid
                        old = time.time() - about.st_mtime >= self.keep["dead"]
                        if own and old and stat.S_ISREG(about.st_mode):
                            _remove(path, about)

    def _files(self) -> Iterator[tuple[Path, int | None]]:
        """Yield the paths of stats files, and the user id that their owner must have (None: any trusted user)."""
        for path in find_stats_files(self._folder)[:_MAX_FILES]:
            yield path, None
        for folder, uid in self._users.folders():
            with contextlib.suppress(OSError):
                files = sorted(path for path in _entries(folder) if is_stats_file(path.name))
                for path in files[:_MAX_USER_FILES]:
                    yield path, uid


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the paths of the first entries of a folder, because a user may create any number of them."""
    with os.scandir(folder) as listing:
        for entry in itertools.islice(listing, _MAX_FILES):
            yield Path(entry.path)


def _shown_id(owners: Mapping[str, int], run_id: str, uid: int) -> str:
    return run_id if owners.get(run_id, uid) == uid else f"{run_id}@{uid}"


def _reported(snapshot: Snapshot, owners: Mapping[str, int], named: dict[str, bool]) -> Snapshot:
    """Return a snapshot with its reported run id and, if another user wrote it, with shorter texts and fewer paths.

    `named` contains the paths that this user's snapshots name, and whether the user may name them. It is filled.
    """
    header, uid = snapshot.header, snapshot.uid
    run_id = _shown_id(owners, header.run_id, uid)
    if trusted(uid):
        return snapshot if run_id == header.run_id else replace(snapshot, header=replace(header, run_id=run_id))
    paths = header.paths[:_MAX_FILE_PATHS]
    for path in paths:
        if path not in named and len(named) < _MAX_USER_PATHS:
            named[path] = may_name(path, uid)
    paths = tuple(path if named.get(path) else "" for path in paths)
    info = {name: value[:_MAX_TEXT] for name, value in header.info.items()}
    info |= {"paths": json.dumps(paths), "hosts": json.dumps(header.hosts[:_MAX_USER_HOSTS])}
    return replace(snapshot, header=replace(header, run_id=run_id, info=info))


def _remove(path: Path, about: os.stat_result) -> None:
    if remove_stats_file(path, about):
        event(logging.INFO, "stats_file.removed", file=path.name)
