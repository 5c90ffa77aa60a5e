"""A run's place on the NVMe paths, and who owns it.

<path>/infinity.lock.<local rank>       held (flock) by the live run, says who
<path>/<run id>/infinity.run            says that this is a folder of a run, and which one of its paths
<path>/<run id>/rank00000.pages         data file of one rank
<path>/<run id>/commits/                manifests, on the first path only

[Note: who holds what]
A live run holds a lock file on each of its paths from its start to the end of its process. The folder <path> itself is
locked too, but for moments: shared by a run that is about to take its lock files, exclusively by who removes runs
(`no_starts`). So nothing starts between the listing of what is to be removed and its removal, and a run that is live
when the listing begins is seen in it.

Whoever only looks takes a shared lock on a lock file for a moment. So a start that does not get the lock tries a
shared one: if it gets that, nobody owns the path, and it tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.access import open_own, open_regular, own_folder, read_regular
from infinity.errors import BudgetError, ConfigError, FolderBusyError, StorageError
from infinity.store.marker import MARKER_NAME, Marker, look_for_runs, sync_path, write_marker
from infinity.units import format_size

LOCK_NAME = "infinity.lock"
_UNKNOWN = "unknown"
_MOST_BYTES = 1 << 16
_START_SECONDS = 20.0
"""How long a start waits for who removes runs, and for who only looks."""
_REMOVE_SECONDS = 2.0
"""How long who removes runs waits for a start to have its locks."""
_PAUSE = 0.01

_log = logging.getLogger("infinity")


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run, one per NVMe path."""

    run_id: str
    roots: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[str | Path], run_id: str) -> RunFolder:
        """Return the folders of `run_id` on the configured paths."""
        return cls(run_id, tuple(Path(path) / run_id for path in paths))

    def data_file(self, path: int, rank: int) -> Path:
        """Return the data file of a rank on the path with that index."""
        return self.roots[path] / f"rank{rank:05d}.pages"

    @property
    def commits(self) -> Path:
        """Folder of the manifests."""
        return self.roots[0] / "commits"

    def create(self) -> None:
        """Make the folders, or check those that are there, and mark them as those of a run.

        Raises:
            ConfigError: a path is not writable, or a folder is not this user's alone.
        """
        folder = self.roots[0]
        try:
            for number, folder in enumerate(self.roots):
                own_folder(folder, parents=False)
                write_marker(folder, Marker(run_id=self.run_id, path=number, paths=len(self.roots)))
            own_folder(self.commits, parents=False)
            sync_path(self.roots[0])
        except OSError as error:
            raise ConfigError(f"the run folder {folder} cannot be used: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the run from all paths: commits first, and what says that it is a run last.

        Raises:
            OSError: something cannot be removed; what is left is a run without that commit, or without any.
        """
        self._remove_commits()
        for root in self.roots:
            if root.is_dir():
                _clear(root, but=MARKER_NAME)
                self._remove_empty(root)

    def remove_rank(self, rank: int, *, commits: bool) -> None:
        """Remove what one rank has of the run; the last one of this node also removes the folders.

        Args:
            rank: whose.
            commits: remove the folder of the commits too: of all ranks of this node.

        Raises:
            OSError: something cannot be removed.
        """
        if commits:  # first, so that it is gone when no data file is left
            self._remove_commits()
        for number in range(len(self.roots)):
            self.data_file(number, rank).unlink(missing_ok=True)
        for root in self.roots:
            if root.is_dir() and not set(os.listdir(root)) - {MARKER_NAME}:
                self._remove_empty(root)

    def _remove_commits(self) -> None:
        if self.commits.is_dir():
            _clear(self.commits)
            self.commits.rmdir()

    def _remove_empty(self, root: Path) -> None:
        (root / MARKER_NAME).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another rank does the same
            root.rmdir()


def _clear(folder: Path, but: str = "") -> None:
    """Remove what is in a folder, with one descriptor at most: a process may have no more left. Raises `OSError`."""
    for entry in (folder / name for name in os.listdir(folder) if name != but):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def find_runs(paths: Sequence[str | Path]) -> list[str]:
    """Return the ids of the runs on some folders, oldest first; see `look_for_runs`. Raises `OSError`."""
    return [run.run_id for run in look_for_runs(paths)[0]]


class FolderLock:
    """Ownership of the NVMe paths by this process; lost when the process dies, never before."""

    def __init__(self, descriptors: list[int], files: list[Path]) -> None:
        self._descriptors, self._files = descriptors, files

    @classmethod
    def acquire(cls, paths: Sequence[str | Path], run_id: str, local_rank: int) -> FolderLock:
        """Take every path. [Note: who holds what]

        Raises:
            FolderBusyError: another live run holds one; the message says which process.
            ConfigError: a path is not writable, or cannot be locked.
        """
        lock = cls([], [])
        try:
            with ExitStack() as starting:
                for path in paths:
                    if not starting.enter_context(_folder_locked(Path(path), fcntl.LOCK_SH, _START_SECONDS)):
                        raise FolderBusyError(f"{path} is in use by `infinity store gc` or `rm`; wait for it to end")
                for path in paths:
                    lock._take(Path(path), local_rank)
                lock.name(run_id)
        except BaseException:
            lock.release()
            raise
        return lock

    def _take(self, path: Path, local_rank: int) -> None:
        file = path / f"{LOCK_NAME}.{local_rank}"
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                descriptor = open_own(file, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                stale = _owner_of(file) is not None
                hint = "; if nobody holds it, its owner or root removes it with `infinity store gc`" if stale else ""
                raise ConfigError(
                    f"storage.paths: {str(path)!r} is not writable: {file.name}: {error.strerror}{hint}"
                ) from error
            try:
                if _locked(descriptor, fcntl.LOCK_EX, file):
                    if _still_there(descriptor, file):
                        self._descriptors.append(descriptor)
                        self._files.append(file)
                        return
                elif not _locked(descriptor, fcntl.LOCK_SH, file) or time.monotonic() > end:
                    raise FolderBusyError(
                        f"{path} is in use by {describe_holder(file)}; wait for it to end or name another folder"
                    )
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_PAUSE)

    def name(self, run_id: str) -> None:
        """Write into the lock files which run of this process is the live one.

        Raises:
            ConfigError: a file system has no room for it.
        """
        owner = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        for descriptor, file in zip(self._descriptors, self._files, strict=True):
            try:
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            except OSError as error:
                raise ConfigError(f"storage.paths: {file} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Give the paths back; a lock file that cannot be removed is said and left. Idempotent, never raises."""
        while self._descriptors:
            descriptor, file = self._descriptors.pop(), self._files.pop()
            try:
                file.unlink(missing_ok=True)  # before the lock is dropped, so nobody's new file is removed
            except OSError as error:
                _log.warning("%s, which nobody holds any more, could not be removed: %s", file, error.strerror)
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a path, as it wrote itself into the lock file; `uid` is the file's own."""

    run_id: str
    pid: int
    host: str
    since: float
    uid: int

    @property
    def known(self) -> bool:
        """Whether the lock file could be read."""
        return self.run_id != _UNKNOWN

    def __str__(self) -> str:
        if not self.known:
            return f"a run of user {_user_name(self.uid)}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run_id} (process {self.pid} on {self.host}, since {since})"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextmanager
def _folder_locked(path: Path, operation: int, patience: float) -> Iterator[bool]:
    """Have the folder itself locked; yields whether that worked within `patience` seconds. Raises `ConfigError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be opened: {error.strerror}") from error
    try:
        end = time.monotonic() + patience
        while not (got := _locked(descriptor, operation, path)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        yield got
    finally:
        os.close(descriptor)


@contextmanager
def no_starts(paths: Sequence[str | Path]) -> Iterator[None]:
    """Let no run start on these paths as long as the body runs; those that are live go on. [Note: who holds what]

    Raises:
        FolderBusyError: a run is starting, or somebody else is removing runs.
        ConfigError: a path cannot be locked.
    """
    with ExitStack() as held:
        for path in {os.path.realpath(path): Path(path) for path in paths}.values():
            if not held.enter_context(_folder_locked(path, fcntl.LOCK_EX, _REMOVE_SECONDS)):
                raise FolderBusyError(f"a run is starting on {path}, or runs are being removed there; try again")
        yield


def _locked(descriptor: int, operation: int, file: Path) -> bool:
    """Take a lock, or return False if somebody holds it. Raises `ConfigError` for whatever else is wrong."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be locked: {errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror}); "
            "storage.paths must be on file systems with flock"
        ) from error


def _still_there(descriptor: int, file: Path) -> bool:
    """Whether the name still leads to the open file: the holder before may have removed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(file))
    except FileNotFoundError:
        return False


def describe_holder(file: Path) -> str:
    """Return who holds a lock file, from what the holder wrote into it."""
    return str(read_owner(file) or "another run")


def read_owner(file: Path) -> Owner | None:
    """Return who wrote a lock file; None if it cannot be read."""
    try:
        tree = json.loads(read_regular(file, _MOST_BYTES))
        owner = Owner(
            run_id=str(tree["run_id"]),
            pid=int(tree["pid"]),
            host=str(tree["host"]),
            since=float(tree["since"]),
            uid=file.lstat().st_uid,
        )
        str(owner)  # the time may be none
        return owner
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def live_run(path: str | Path) -> Owner | None:
    """Return who holds a path, or None when nobody does; a lock file of another user counts as held.

    Nothing is written, so the path may be mounted read-only.

    Raises:
        ConfigError: a lock file cannot be asked.
    """
    for file in _lock_files(Path(path)):
        try:
            descriptor = open_regular(file, os.O_RDONLY)
        except PermissionError:
            if (uid := _owner_of(file)) is not None:
                return Owner(run_id=_UNKNOWN, pid=0, host=_UNKNOWN, since=0.0, uid=uid)
            continue
        except OSError:  # given back just now, or no file: a start will say so
            continue
        try:
            if not _locked(descriptor, fcntl.LOCK_SH, file):
                uid = os.fstat(descriptor).st_uid
                return read_owner(file) or Owner(run_id=_UNKNOWN, pid=0, host=_UNKNOWN, since=0.0, uid=uid)
        finally:
            os.close(descriptor)
    return None


def _lock_files(path: Path) -> list[Path]:
    return sorted(path.glob(f"{LOCK_NAME}.*"))


def _owner_of(file: Path) -> int | None:
    """Return whose file it is; None if it is no regular one, or gone."""
    try:
        return file.lstat().st_uid if file.is_file() and not file.is_symlink() else None
    except OSError:
        return None


def stale_locks(path: Path) -> list[Path]:
    """Return the lock files that nobody holds. Raises `ConfigError` as `live_run`."""
    found = []
    for file in _lock_files(path):
        with contextlib.suppress(OSError):
            descriptor = open_regular(file, os.O_RDONLY)
            try:
                if _locked(descriptor, fcntl.LOCK_SH, file):
                    found.append(file)
            finally:
                os.close(descriptor)
    return found


def remove_stale_lock(file: Path) -> bool:
    """Remove a lock file unless somebody holds it; return whether it is gone.

    Raises:
        OSError: it cannot be removed. ConfigError: it cannot be locked.
    """
    try:
        descriptor = open_regular(file, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        if not _locked(descriptor, fcntl.LOCK_EX, file):
            return False
        if _still_there(descriptor, file):
            file.unlink(missing_ok=True)  # before the lock is dropped: who waits for it then sees that it is gone
        return True
    finally:
        os.close(descriptor)


def reserve(file: Path, size: int) -> None:
    """Make the file `size` bytes long with all its blocks allocated.

    Raises:
        BudgetError: the file system has no room; both sizes are named.
        StorageError: the file cannot be made.
    """
    existed = os.path.lexists(file)
    before = file.stat().st_size if existed and file.exists() else 0
    free = shutil.disk_usage(file.parent).free
    if size - before > free:  # asked first: a file system may fill itself up before it refuses
        raise _no_room(file, size, free, os.strerror(errno.ENOSPC))
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError("open", str(file), 0, size, error.errno) from error
    try:
        if before < size:
            os.posix_fallocate(descriptor, 0, size)
        os.fsync(descriptor)
    except OSError as error:
        if not existed:
            file.unlink(missing_ok=True)
        raise _no_room(file, size, free, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _no_room(file: Path, size: int, free: int, reason: str) -> BudgetError:
    return BudgetError(
        f"{file.parent} has {format_size(free)} free, but this run needs {format_size(size)} there "
        f"({reason}); free space, add a path to storage.paths, or "
        "remove earlier runs with `infinity store rm`"
    )
