"""Detection and optional removal of stale runs.

A run is stale if no live process uses it and it was interrupted. A run that was closed after a checkpoint has finished,
and is not stale.

[Note: removal of stale runs] A run without a checkpoint cannot be resumed, so removing it loses nothing. A run with a
checkpoint may be all that is left of a training run, and only its user knows whether it is still needed. The two kinds
therefore have separate settings, and neither is removed by default. A run counts as checkpointed if there is any sign
of a checkpoint or its first folder is missing, because that folder may be on a different node. A run is only reported,
and never removed, if one of its folders is not among the daemon's paths or if it belongs to a different user.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infinity.errors import ConfigError, FolderBusyError
from infinity.io.block_devices import locate
from infinity.store.folder import RESERVED_SUFFIX, RunFolder, holder_of, no_starts
from infinity.store.marker import FoundRun, is_run_id, look_for_runs
from infinity_daemon.daemon_config import StaleConfig
from infinity_daemon.log import event

LOOK_SECONDS: Final = 60.0
"""Interval between two searches for stale runs."""
_SURE_SECONDS: Final = 600.0
"""Minimum time for which the daemon must have observed that a run is unused, because file times depend on the clock."""
_MOST_LEVELS: Final = 3
"""Number of levels of subfolders that are searched."""
_MOST_ENTRIES: Final = 20_000
"""Maximum number of files and folders to look at per path, so that a search of a folder with a data set is quick."""


@dataclass(frozen=True, kw_only=True)
class StaleRun:
    """Interrupted run that no process uses."""

    run_id: str
    roots: tuple[Path, ...]
    """Folders of the run that were found, in the order of the run's paths."""
    complete: bool
    """``True`` if all folders of the run were found."""
    checkpointed: bool
    """``True`` if the run may have a checkpoint. [Note: removal of stale runs]"""
    nbytes: int
    """Bytes used on the drives."""
    by_drive: Mapping[str, int]
    """Bytes used on each drive, by drive name. The drive of the first folder comes first."""
    changed: float
    """Unix time at which a file or folder of the run was last modified."""


class StaleRuns:
    """Stale runs in `paths` and their subfolders. One thread calls `look`; other threads may read `found` and `drives`.

    `settings` and `paths` are replaced when the settings are reloaded.
    """

    def __init__(self) -> None:
        self.settings = StaleConfig()
        self.paths: tuple[str, ...] = ()
        self.found: tuple[StaleRun, ...] = ()
        """Stale runs found by the last search, oldest first. Replaced as a whole, because other threads read it."""
        self.drives: frozenset[str] = frozenset()
        """Names of the searched drives. Only replaced as a whole, because other threads read it."""
        self._since: dict[str, float] = {}
        """Monotonic time at which each run was first observed to be unused. Only used in `look`."""

    def look(self) -> None:
        """Search for stale runs, and remove runs that the settings allow to be removed."""
        known = {os.fspath(Path(path)): _drive(path) for path in self.paths}
        drives = {path: drive for path, drive in known.items() if drive is not None}
        now = time.monotonic()
        found = list(_stale(drives))
        self._since = {run.run_id: self._since.get(run.run_id, now) for run in found}
        for run in [run for run in found if self._is_time(run, now)]:
            if self._remove(run, drives):
                found.remove(run)
        self.found, self.drives = tuple(found), frozenset(drives.values())

    def _is_time(self, run: StaleRun, now: float) -> bool:
        settings = self.settings
        grace = settings.remove_checkpointed_after_seconds if run.checkpointed else settings.remove_after_seconds
        if not grace or not run.complete or any(_owner(root) != os.geteuid() for root in run.roots):
            return False
        return time.time() - run.changed >= grace and now - self._since[run.run_id] >= min(grace, _SURE_SECONDS)

    def _remove(self, run: StaleRun, drives: Mapping[str, str]) -> bool:
        """Remove a run unless it has changed since it was found. Return ``True`` if it was removed."""
        said = {"run": run.run_id, "bytes": run.nbytes, "checkpointed": run.checkpointed}
        try:
            with no_starts([root.parent for root in run.roots]):
                if run not in _stale(drives):  # resumed or removed since the search
                    return False
                RunFolder(run.run_id, run.roots).remove()
        except FolderBusyError:  # a run is starting in a folder; the next search tries again
            return False
        except (ConfigError, OSError) as error:
            event(logging.WARNING, "stale.kept", **said, reason=str(error))
            return False
        event(logging.INFO, "stale.removed", **said)
        return True


def _stale(drives: Mapping[str, str]) -> Iterator[StaleRun]:
    """Yield the stale runs in some folders. `drives` maps each folder to the name of its drive."""
    folders = {folder: drive for path, drive in drives.items() for folder in _with_runs(path)}
    for run in look_for_runs(list(folders))[0]:
        with suppress(OSError, ConfigError):  # the run has been removed, or its locks cannot be read
            if not _is_finished(run) and holder_of(RunFolder(run.run_id, run.in_order)) is None:
                yield _described(run, folders)


def _with_runs(path: str) -> Iterator[str]:
    """Yield the folders that contain runs: `path` and its subfolders on the same file system, without links."""
    left = _MOST_ENTRIES
    places = deque([(path, 0)])  # breadth first, so that folders near `path` are found in any case
    while places and left > 0:
        place, level = places.popleft()
        with suppress(OSError), os.scandir(place) as listing:  # an error is raised for another user's folder
            entries = list(itertools.islice(listing, left))
            left -= len(entries)
            if os.access(place, os.R_OK | os.X_OK) and any(is_run_id(entry.name) for entry in entries):
                yield place
            if level < _MOST_LEVELS:
                device = os.stat(place).st_dev
                places += [
                    (entry.path, level + 1)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                    and not is_run_id(entry.name)
                    and entry.stat(follow_symlinks=False).st_dev == device
                ]


def _is_finished(run: FoundRun) -> bool:
    """Return ``True`` if a run was closed and has a checkpoint. Only an interrupted run has reserved space."""
    if 0 not in run.roots:
        return False
    checkpoints = run.roots[0] / "checkpoints"
    return _may_have_checkpoints(checkpoints) and not any(checkpoints.glob(f"*{RESERVED_SUFFIX}"))


def _described(run: FoundRun, drives: Mapping[str, str]) -> StaleRun:
    by_drive: dict[str, int] = {}
    changed = 0.0
    for root in run.in_order:
        files = list(_files(root))
        drive = drives[os.fspath(root.parent)]
        by_drive[drive] = by_drive.get(drive, 0) + sum(512 * about.st_blocks for about in files)
        changed = max(changed, *(about.st_mtime for about in files))
    return StaleRun(
        run_id=run.run_id,
        roots=run.in_order,
        complete=run.complete,
        checkpointed=0 not in run.roots or _may_have_checkpoints(run.roots[0] / "checkpoints"),
        nbytes=sum(by_drive.values()),
        by_drive=by_drive,
        changed=changed,
    )


def _may_have_checkpoints(checkpoints: Path) -> bool:
    try:
        return any(name.endswith(".json") for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _files(root: Path) -> Iterator[os.stat_result]:
    """Yield the status of a folder and of all files and folders in it, without following links. Raises `OSError`."""
    places = [root]
    while places:
        place = places.pop()
        about = place.lstat()
        yield about
        if stat.S_ISDIR(about.st_mode):
            places += place.iterdir()


def _drive(path: str) -> str | None:
    with suppress(OSError):
        return locate(path).drive.name
    return None


def _owner(root: Path) -> int | None:
    with suppress(OSError):
        return root.lstat().st_uid
    return None


def by_drive(drives: Iterable[str], runs: Sequence[StaleRun]) -> dict[str, tuple[int, int]]:
    """Return the number and total bytes of stale runs by drive name. A run counts for the drive of its first folder."""
    found = {drive: (0, 0) for drive in drives}
    for run in runs:
        for number, (drive, nbytes) in enumerate(run.by_drive.items()):
            count, total = found.get(drive, (0, 0))
            found[drive] = count + (number == 0), total + nbytes
    return found
