"""Temporary folders for the paged state of trials, removed at the end, at the next start, or by `infinity store gc`.

The process that uses a folder holds a lock on a file in it, so a folder without a lock was left by a killed process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity.store.marker import is_run_id
from infinity.telemetry.stats_file import find_stats_files

PREFIX = ".infinity-trial-"
_LOCK = "lock"
_OLD_SECONDS = 60.0
"""Age from which a folder without a lock file counts as left over: its process was killed between creating the two."""


@contextmanager
def trial_folders(paths: Sequence[str], telemetry: TelemetryConfig) -> Iterator[list[str]]:
    """Create a folder for trials under each path. Folders left by killed processes are removed first.

    Raises:
        ConfigError: if a folder cannot be created.
    """
    with ExitStack() as stack:
        made = []
        for path in map(Path, paths):
            try:
                if not path.is_dir():
                    path.mkdir()
                    stack.callback(_remove_if_empty, path)
                for left in left_over(path):
                    remove(left, telemetry)
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
                stack.callback(remove, folder, telemetry)
                held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / "runs").mkdir()
            except OSError as error:
                raise ConfigError(
                    f"storage.paths: cannot create a folder in {str(path)!r}: {error.strerror}; choose another one "
                    "with --nvme"
                ) from error
            made.append(str(folder / "runs"))
        yield made


def left_over(path: Path) -> list[Path]:
    """Return this user's trial folders under `path` that no process has locked.

    Raises `OSError` if `path` cannot be read.
    """
    # A folder of another user may contain links in place of folders.
    found = (folder for folder in path.iterdir() if folder.name.startswith(PREFIX) and _is_own(folder))
    return sorted(filter(_is_left, found))


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:  # already removed
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_left(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with suppress(OSError):
            return time.time() - folder.lstat().st_mtime >= _OLD_SECONDS
        return False
    except OSError:  # owned by another user
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def remove(folder: Path, telemetry: TelemetryConfig) -> None:
    """Remove a folder of trials with its contents."""
    empty(folder / "runs", telemetry)
    shutil.rmtree(folder, ignore_errors=True)


def empty(folder: Path, telemetry: TelemetryConfig, runs: Iterable[str] = ()) -> None:
    """Remove the data of trials from a folder, and the stats files of their runs, so that they do not appear in
    metrics.

    Args:
        folder: Folder of the trials.
        telemetry: Telemetry settings, which contain the runtime folder.
        runs: Ids of runs that ended cleanly and therefore left no folder.
    """
    with suppress(OSError):
        left = list(folder.iterdir())
        _remove_pages({*runs, *(one.name for one in left if is_run_id(one.name))}, telemetry)
        for one in left:
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            else:
                one.unlink()


def _remove_pages(runs: set[str], telemetry: TelemetryConfig) -> None:
    with suppress(OSError):
        for file in find_stats_files(runtime_dir(telemetry)) if runs else ():
            if file.name.partition(".")[0] in runs:
                file.unlink()


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()
