"""The folders that trials page in: temporary ones below those of the user, gone at the end, or at the next start.

Whoever uses one holds a lock on a file in it. So a folder that nobody holds was left by a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity.store.marker import is_run_id
from infinity.telemetry.stats_file import stats_page_files

PREFIX = ".infinity-tune-"
_LOCK = "lock"
_OLD_SECONDS = 60.0
"""A folder without a lock file for so long was left in the moment between making the two."""


@contextmanager
def trial_folders(paths: Sequence[str], telemetry: TelemetryConfig) -> Iterator[list[str]]:
    """Make a folder for trials below each path, and the path if need be; what killed ones have left goes first.

    Raises:
        ConfigError: one cannot be made.
    """
    with ExitStack() as stack:
        made = []
        for path in map(Path, paths):
            try:
                if not path.is_dir():
                    path.mkdir()
                    stack.callback(_remove_if_empty, path)
                remove_left_over(path, telemetry)
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
                stack.callback(remove, folder, telemetry)
                held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / "runs").mkdir()
            except OSError as error:
                raise ConfigError(
                    f"storage.paths: no folder can be made in {str(path)!r}: {error.strerror}; name another one with "
                    "--nvme"
                ) from error
            made.append(str(folder / "runs"))
        yield made


def remove_left_over(path: Path, telemetry: TelemetryConfig) -> None:
    """Remove the folders below `path` that nobody holds any more. Raises `OSError`: it cannot be read."""
    for folder in path.iterdir():
        if folder.name.startswith(PREFIX) and not folder.is_symlink() and _is_left(folder):
            remove(folder, telemetry)


def _is_left(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with suppress(OSError):
            return time.time() - folder.lstat().st_mtime >= _OLD_SECONDS
        return False
    except OSError:  # of another user
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def remove(folder: Path, telemetry: TelemetryConfig) -> None:
    """Remove a folder of trials, whatever is in it."""
    empty(folder / "runs", telemetry)
    shutil.rmtree(folder, ignore_errors=True)


def empty(folder: Path, telemetry: TelemetryConfig, runs: Iterable[str] = ()) -> None:
    """Remove what trials have left in a folder, and the stats pages of their runs: nobody is to look at a trial.

    Args:
        runs: ids of those that have ended in order, and so have left no folder.
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
        for file in stats_page_files(runtime_dir(telemetry)) if runs else ():
            if file.name.partition(".")[0] in runs:
                file.unlink()


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()
