"""Run folders on the NVMe paths, and the locks that give each path to one run at a time.

<path>/infinity.lock.<number>           locked (flock) by the live run; contains its run id, process and host
<path>/<run id>/infinity.run            marker: identifies a run folder and its index among the run's paths
<path>/<run id>/rank00000.pages         data file of one rank
<path>/<run id>/checkpoints/            manifests, on the first path only
<path>/<run id>/parity/                 copies of checkpoints of other nodes, see `infinity.checkpoint.parity`

[Note: ownership of a path]
A live run holds a lock file on each of its paths until its process ends. In addition, <path> itself is locked briefly:
with a shared lock by a run that is about to take its lock files, and with an exclusive lock by a process that removes
runs (`no_starts`). Therefore no run can start between listing the runs to remove and removing them, and the listing
includes every run that was already live.

A process that only inspects a lock file holds a shared lock on it briefly. If a starting run fails to get the exclusive
lock, it therefore tries a shared lock. If that succeeds, no run owns the path, and the starting run tries again.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import BudgetError, ConfigError, FolderBusyError, StorageError
from infinity.store.marker import MARKER_NAME, Marker, write_marker
from infinity.units import format_size
from infinity.untrusted_files import open_own, open_regular, own_folder, sync_folder, user_name, whose_folder

LOCK_NAME = "infinity.lock"
RESERVED_SUFFIX = ".reserved.tmp"
"""End of the name of `RunFolder.reserved_file`."""
_LOCK_FILE = re.compile(rf"{re.escape(LOCK_NAME)}\.\d+", re.ASCII)
UNKNOWN_RUN = "unknown"
"""Written to a lock file instead of a run id until the id is known. Its holder may have any run of its user open."""
_MOST_BYTES = 1 << 16
_MOST_SHOWN = 1 << 10  # maximum length of a holder's description
_START_SECONDS = 20.0
"""Time, in seconds, that a starting run waits for a process that removes runs or inspects lock files."""
_REMOVE_SECONDS = 2.0
"""Time, in seconds, that a process that removes runs waits until a starting run has its locks."""
_PAUSE = 0.01

_log = logging.getLogger("infinity")


@dataclass(frozen=True)
class RunFolder:
    """Folders of one run, one per NVMe path. The object holds only their names; the folders may not exist.

    `create` makes the folders and then writes the markers, so a folder without a marker is left by an interrupted
    start. `remove` deletes the checkpoints first and the marker last, so an interrupted removal leaves a folder that
    is still recognized as a run and that the next removal deletes.
    """

    run_id: str
    roots: tuple[Path, ...]
    """``<path>/<run id>`` for every path, in the order of the run. The first one contains the checkpoints."""

    @classmethod
    def of(cls, paths: Sequence[str | Path], run_id: str) -> RunFolder:
        """Return the folders of run `run_id` on the configured paths."""
        return cls(run_id, tuple(Path(path) / run_id for path in paths))

    def data_file(self, path: int, rank: int) -> Path:
        """Return the data file of a rank on the path with index `path`."""
        return self.roots[path] / f"rank{rank:05d}.pages"

    @property
    def checkpoints(self) -> Path:
        """Folder for the manifests."""
        return self.roots[0] / "checkpoints"

    def ranks(self) -> list[int]:
        """Return the ranks that have a data file on the first path, where every rank has one."""
        return sorted(int(file.stem.removeprefix("rank")) for file in self.roots[0].glob(f"rank{'[0-9]' * 5}.pages"))

    def reserved_file(self, rank: int) -> Path:
        """Return the file that reserves space for a rank's future checkpoints. It exists until the run is closed."""
        return self.checkpoints / f"rank{rank:05d}{RESERVED_SUFFIX}"

    def create(self) -> None:
        """Create the folders, or check existing ones, and write their markers.

        Raises:
            ConfigError: if a path is not writable, or if another user can modify a folder.
        """
        folder = self.roots[0]
        try:
            # The marker must be durable before the first checkpoint can exist, because no command finds a run without a
            # marker.
            for number, folder in enumerate(self.roots):
                own_folder(folder, parents=False)
                write_marker(folder, Marker(run_id=self.run_id, path=number, paths=len(self.roots)))
            own_folder(self.checkpoints, parents=False)
            sync_folder(self.roots[0])
        except OSError as error:
            raise ConfigError(f"run folder {folder} cannot be used: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the run from all paths: checkpoints first, markers last. Symbolic links are not followed.

        Raises:
            OSError: if an entry cannot be removed. The remaining files form a run with fewer checkpoints or none.
        """
        for number, root in enumerate(self.roots):
            with suppress(FileNotFoundError), opened_folder(root) as folder:
                if number == 0:
                    _remove_folder(folder, root / "checkpoints")
                _clear(folder, root, but=MARKER_NAME)
                _remove_empty(folder, root)

    def remove_file(self, file: Path) -> None:
        """Remove a file at any depth within one of the folders. Symbolic links are not followed.

        Raises:
            OSError: if the file cannot be removed.
        """
        (root,) = (root for root in self.roots if root in file.parents)
        with suppress(FileNotFoundError), ExitStack() as opened:
            folder = opened.enter_context(opened_folder(root))
            for within in reversed(file.parents[: file.parents.index(root)]):
                folder = opened.enter_context(opened_folder(within, folder))
            with _naming(file):
                os.unlink(file.name, dir_fd=folder)

    def remove_rank(self, rank: int, *, checkpoints: bool) -> None:
        """Remove the files of one rank. The last rank on this node also removes the folders.

        Args:
            rank: rank whose files are removed.
            checkpoints: whether to also remove the checkpoint folder, which belongs to all ranks on this node.

        Raises:
            OSError: if a file or folder cannot be removed.
        """
        # This uses paths instead of folder descriptors, because the process may have no descriptors left. It is safe
        # because only the current user can create links in these folders.
        own = {number: root for number, root in enumerate(self.roots) if _is_own(root)}
        if 0 in own and self.checkpoints.is_dir() and not self.checkpoints.is_symlink():
            with suppress(FileNotFoundError):  # the first rank on this node removes the whole folder
                self._remove_checkpoints("*" if checkpoints else f"step*.rank{rank:05d}[.-]*")
        for number in own:
            self.data_file(number, rank).unlink(missing_ok=True)
            self._remove_parities(own[number] / "parity", rank)
        for root in own.values():
            with suppress(FileNotFoundError):  # another rank is removing the same entries
                if not set(os.listdir(root)) - {MARKER_NAME}:
                    (root / MARKER_NAME).unlink(missing_ok=True)
                    root.rmdir()

    def _remove_parities(self, folder: Path, rank: int) -> None:
        """Remove the copies of other ranks' checkpoints that a rank stores."""
        for entry in folder.glob(f"rank{rank:05d}.*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        with suppress(OSError):  # missing, or not the last rank on this node
            folder.rmdir()

    def _remove_checkpoints(self, pattern: str) -> None:
        """Remove matching entries durably, before any data file is removed. Pattern ``*`` also removes the folder."""
        names = fnmatch.filter(os.listdir(self.checkpoints), pattern)
        # A manifest must not outlive the state file and the data file to which it refers.
        for name in sorted(names, key=lambda name: not name.endswith(".json")):
            entry = self.checkpoints / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        if names:
            sync_folder(self.checkpoints)
        if pattern == "*":
            self.checkpoints.rmdir()


def _is_own(root: Path) -> bool:
    try:
        return not whose_folder(root)
    except FileNotFoundError:  # removed by another rank
        return False


@contextmanager
def opened_folder(path: Path, parent: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder, so that later operations stay in this folder even if its name is replaced.

    Args:
        path: folder to open. Its last component must not be a symbolic link.
        parent: descriptor of the parent folder. By default the whole path is resolved.

    Raises:
        FileNotFoundError: if the folder does not exist.
        NotADirectoryError: if the path is a symbolic link or not a folder.
        OSError: if `os.open` fails for a different reason.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with _naming(path):
            descriptor = os.open(path if parent is None else path.name, flags, dir_fd=parent)
    except NotADirectoryError as error:
        raise NotADirectoryError(error.errno, "it is a link or not a folder", str(path)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_folder(parent: int, path: Path) -> None:
    with suppress(FileNotFoundError):
        with opened_folder(path, parent) as folder:
            _clear(folder, path)
        with _naming(path):
            os.rmdir(path.name, dir_fd=parent)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the whole path to errors, because a call relative to a descriptor reports only the last component."""
    try:
        yield
    except OSError as error:
        if os.sep in str(error.filename):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _clear(folder: int, path: Path, but: str = "") -> None:
    """Remove the contents of an open folder except the entry `but`. `path` is for error messages. Raises `OSError`."""
    for name in os.listdir(folder):
        if name == but:
            continue
        with suppress(FileNotFoundError), _naming(path / name):  # another rank may have removed it
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                _remove_folder(folder, path / name)
            else:
                os.unlink(name, dir_fd=folder)


def _remove_empty(folder: int, root: Path) -> None:
    with suppress(FileNotFoundError):  # another rank may have removed it
        os.unlink(MARKER_NAME, dir_fd=folder)
    with suppress(FileNotFoundError):
        root.rmdir()


def make_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Create missing NVMe paths with mode 0700, and return the paths that were created.

    Raises:
        ConfigError: if a path cannot be created. Paths that were already created are removed again.
    """
    made: list[Path] = []
    for path in map(Path, paths):
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                made.append(path)
                sync_folder(path.parent)
        except OSError as error:
            unmake_paths(made)
            raise ConfigError(f"storage.paths: {str(path)!r} cannot be created: {error.strerror}") from error
    return made


def unmake_paths(made: Sequence[Path]) -> None:
    """Remove the empty paths among those that `make_paths` created."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


class FolderLock:
    """Locks of this process on the NVMe paths, held until `release` or until no process has the descriptors.

    `acquire` creates and locks one file per path, `name` writes the run id into the files, and `release` removes and
    then unlocks them. Only the training thread uses this class, except for the fork handler that closes the
    descriptors in a child process.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        """Descriptors of the locked files, in the order of the paths. Empty before `acquire` and after `release`."""
        self._files: list[Path] = []
        """Names of the locked files, in the order of `_descriptors`."""
        self._made: Sequence[Path] = ()
        """NVMe paths created for this run. `release` removes those that are empty."""
        self._process = os.getpid()
        """Id of the process that holds the locks. A forked child process inherits the descriptors but does not own
        the locks.
        """

    @classmethod
    def acquire(cls, paths: Sequence[str | Path], run_id: str, number: int, made: Sequence[Path] = ()) -> FolderLock:
        """Lock every path. [Note: ownership of a path]

        Args:
            paths: NVMe paths to lock.
            run_id: run id to write into the lock files.
            number: number of lower ranks that use the same paths, which is part of the names of the lock files.
            made: paths created for this run. Those that are empty are removed when the locks are released.

        Raises:
            FolderBusyError: if another live run holds a path. The message identifies its process.
            ConfigError: if a path is not writable or does not support locks.
        """
        lock = cls()
        lock._made = made
        _held.add(lock)
        try:
            with ExitStack() as starting:
                # Lock order: first all folders (shared), then all lock files. While a removal holds the folders
                # exclusively, no starting run can create a lock file, so the removal's list of live runs stays valid.
                # All waits are bounded, so a starting run and a removal that lock paths in opposite orders do not
                # deadlock.
                for path in paths:
                    if not starting.enter_context(_folder_locked(Path(path), fcntl.LOCK_SH, _START_SECONDS)):
                        raise FolderBusyError(
                            f"{path} has been locked for {_START_SECONDS:g} s. Answer the prompt of a running "
                            f"`infinity store gc` or `rm`, or stop the process that locks the folder. "
                            f"To find it: {_who_has(path)}"
                        )
                for path in paths:
                    lock._take(Path(path), number)
                lock.name(run_id)
        except BaseException:
            lock.release()
            raise
        return lock

    def _take(self, path: Path, number: int) -> None:
        file = path / f"{LOCK_NAME}.{number}"
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                descriptor = open_own(file, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                stale = _owner_of(file) is not None
                hint = (
                    ". If no run holds the file, its owner or root can remove it with `infinity store gc`"
                    if stale
                    else ""
                )
                raise ConfigError(
                    f"storage.paths: {str(path)!r} is not writable: {file.name}: {error.strerror}{hint}"
                ) from error
            try:
                # It is useless to lock a file that its former holder has just removed: the next run would create and
                # lock a new file with the same name.
                if _locked(descriptor, fcntl.LOCK_EX, file):
                    if _still_there(descriptor, file):
                        self._descriptors.append(descriptor)
                        self._files.append(file)
                        return
                elif not _locked(descriptor, fcntl.LOCK_SH, file):
                    raise FolderBusyError(
                        f"{path} is in use by {describe_holder(file)}. Wait until it ends or use a different folder."
                    )
                elif time.monotonic() > end:
                    raise FolderBusyError(
                        f"{file} has been locked for {_START_SECONDS:g} s by a process that reads it. "
                        f"To find the process: {_who_has(file)}"
                    )
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_PAUSE)

    def name(self, run_id: str) -> None:
        """Write the run id and the id of the locking process into the lock files.

        Raises:
            ConfigError: if a lock file cannot be written, for example because the file system is full.
        """
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        for descriptor, file in zip(self._descriptors, self._files, strict=True):
            try:
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            except OSError as error:
                raise ConfigError(f"storage.paths: {file} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Remove and unlock the lock files. If a file cannot be removed, log a warning. Idempotent; never raises.

        In a forked child process, this method does nothing.
        """
        if os.getpid() != self._process:
            return
        while self._descriptors:
            descriptor, file = self._descriptors.pop(), self._files.pop()
            try:
                # The file is removed while it is locked, so that this never removes the lock file of another run.
                file.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("lock file %s, which is no longer in use, could not be removed: %s", file, error.strerror)
            with suppress(OSError):
                # Closing is not enough, because a child process that is just being started may share the open file.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            with suppress(OSError):
                os.close(descriptor)
        unmake_paths(self._made)
        _held.discard(self)

    def leave_to_parent(self) -> None:
        """Close the descriptors without unlocking the files, because the parent process still owns the locks."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors, self._files = [], []


_held: set[FolderLock] = set()
"""Locks held by this process. `acquire` adds to the set; `release` and a fork remove from it."""


def _leave_to_parent() -> None:
    for lock in _held:
        lock.leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Process that holds a path, as described in its lock file. `uid` is the owner of the file."""

    run_id: str
    pid: int
    host: str
    since: float
    uid: int

    @classmethod
    def unknown(cls, uid: int) -> Holder:
        """Return a holder of which only the owner of the lock file is known."""
        return cls(run_id=UNKNOWN_RUN, pid=0, host=UNKNOWN_RUN, since=0.0, uid=uid)

    @property
    def known(self) -> bool:
        """Return whether the lock file could be read."""
        return self.run_id != UNKNOWN_RUN

    def __str__(self) -> str:
        if not self.known:
            return f"a run of user {user_name(self.uid)}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run_id} (process {self.pid} on {self.host}, since {since})"


@contextmanager
def _folder_locked(path: Path, operation: int, patience: float) -> Iterator[bool]:
    """Lock the folder itself. Yield whether this succeeded within `patience` seconds. Raises `ConfigError`."""
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
    """Prevent runs from starting on these paths within the block. Live runs continue. [Note: ownership of a path]

    Raises:
        FolderBusyError: if a run is starting, or if another process is removing runs.
        ConfigError: if a path cannot be locked.
    """
    with ExitStack() as held:
        for path in {os.path.realpath(path): Path(path) for path in paths}.values():
            if not held.enter_context(_folder_locked(path, fcntl.LOCK_EX, _REMOVE_SECONDS)):
                raise FolderBusyError(
                    f"{path} is locked: a run is starting there, or runs are being removed. Try again later. "
                    f"If it stays locked, find the process that holds the lock: {_who_has(path)}"
                )
        yield


def _who_has(path: str | Path) -> str:
    return f"as root, run `fuser -v {path}` or `lsof {path}`"


def _locked(descriptor: int, operation: int, file: Path) -> bool:
    """Lock a file. Return ``False`` if another process has locked it; raise `ConfigError` for any other failure."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be locked: {errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror}). Set "
            "storage.paths to folders on file systems that support flock."
        ) from error


def _still_there(descriptor: int, file: Path) -> bool:
    """Return whether the path still refers to the open file. Its holder may have removed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(file))
    except FileNotFoundError:
        return False


def describe_holder(file: Path) -> str:
    """Return a description of the process that holds a lock file, from the contents of the file."""
    unknown = f"another run or process that holds {file.name}"
    try:
        descriptor = open_regular(file, os.O_RDONLY)
    except OSError:
        return unknown
    try:
        return str(_read_holder(descriptor) or unknown)
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> Holder | None:
    try:
        tree = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        holder = Holder(
            run_id=str(tree["run_id"]),
            pid=int(tree["pid"]),
            host=str(tree["host"]),
            since=float(tree["since"]),
            uid=os.fstat(descriptor).st_uid,
        )
        shown = str(holder)  # raises an exception if the time is out of range
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return holder if shown.isprintable() and len(shown) <= _MOST_SHOWN else None


def holders(path: str | Path) -> list[Holder]:
    """Return the holders of a path, one per locked file. A lock file that cannot be opened counts as locked.

    A description is only as trustworthy as the owner of its file (`Holder.uid`); see `holder_of`. The function writes
    no data, so the path may be mounted read-only.

    Raises:
        ConfigError: if the file system of a lock file does not support locks.
    """
    found = []
    for file in _lock_files(Path(path)):
        try:
            descriptor = open_regular(file, os.O_RDONLY)
        except FileNotFoundError:  # just released
            continue
        except OSError:
            if (uid := _owner_of(file)) is not None:  # otherwise it is not a file, which the next starting run reports
                found.append(Holder.unknown(uid))
            continue
        try:
            if not _locked(descriptor, fcntl.LOCK_SH, file):
                found.append(_read_holder(descriptor) or Holder.unknown(os.fstat(descriptor).st_uid))
        finally:
            os.close(descriptor)
    return found


def believed(holder: Holder, root: Path) -> bool:
    """Return whether the holder of a path may have the run in folder `root` open.

    This is the case if the owner of the folder also owns the lock file, or if root owns it and its description
    contains the run id. A holder without a description may have any run of its user open, because users can only open
    runs in their own folders.

    Raises:
        OSError: if the folder does not exist.
    """
    mine = holder.uid == root.lstat().st_uid
    return mine if not holder.known else holder.run_id == root.name and (mine or holder.uid == 0)


def holder_of(folder: RunFolder) -> Holder | None:
    """Return the process that has a run open, or ``None`` if the run is not open.

    Any user who can create files in a shared folder can lock a file there and write the id of any run into it.
    Therefore the decision depends on the owner of the lock file (see `believed`).

    Raises:
        ConfigError: if the file system of a lock file does not support locks.
        OSError: if a run folder does not exist.
    """
    for root in folder.roots:
        for holder in holders(root.parent):
            if believed(holder, root):
                return holder
    return None


def _lock_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob(f"{LOCK_NAME}.*") if _LOCK_FILE.fullmatch(file.name))


def _owner_of(file: Path) -> int | None:
    try:
        return file.lstat().st_uid if file.is_file() and not file.is_symlink() else None
    except OSError:
        return None


def stale_locks(path: Path) -> list[Path]:
    """Return the lock files that no process holds.

    Raises:
        ConfigError: if the file system of a lock file does not support locks.
    """
    found = []
    for file in _lock_files(path):
        with suppress(OSError):
            descriptor = open_regular(file, os.O_RDONLY)
            try:
                if _locked(descriptor, fcntl.LOCK_SH, file):
                    found.append(file)
            finally:
                os.close(descriptor)
    return found


def remove_stale_lock(file: Path) -> bool:
    """Remove a lock file unless a process holds it. Return whether the file no longer exists.

    Raises:
        OSError: if the file cannot be removed.
        ConfigError: if the file cannot be locked.
    """
    try:
        descriptor = open_regular(file, os.O_RDWR)  # NFS grants exclusive locks only for files opened for writing
    except FileNotFoundError:
        return True
    try:
        if not _locked(descriptor, fcntl.LOCK_EX, file):
            return False
        if _still_there(descriptor, file):
            file.unlink(missing_ok=True)  # while locked, so that a waiting process sees that the file is gone
        return True
    finally:
        os.close(descriptor)


def allocated_bytes(file: Path) -> int:
    """Return the number of bytes that a file occupies on its drive, or 0 if it does not exist."""
    try:
        return os.lstat(file).st_blocks * 512
    except FileNotFoundError:
        return 0


def reserve(file: Path, size: int, roots: Iterable[Path] = ()) -> None:
    """Make a file `size` bytes long and allocate all of its blocks.

    Args:
        file: file to create or extend.
        size: new size in bytes.
        roots: all folders of the run, whose files the error message takes into account.

    Raises:
        BudgetError: if the file system has too little free space. The message contains the free and the required
            size.
        StorageError: if the file cannot be created or the drive fails.
    """
    existed, there = os.path.lexists(file), allocated_bytes(file)
    whole, _, free = shutil.disk_usage(file.parent)
    if not whole:
        raise BudgetError(
            f"storage.paths: {file.parent} is on a file system that reports no size, such as ramfs, which is in "
            "memory. Use a folder on an NVMe drive."
        )
    if size - there > free:  # checked first because some file systems fill up completely before they report an error
        raise _no_room(file, size, there, roots, os.strerror(errno.ENOSPC))
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError("open", str(file), 0, size, error.errno) from error
    try:
        long = os.fstat(descriptor).st_size
        # Allocation starts after the existing data, because file systems that emulate fallocate write to every block.
        first = long if there >= long else 0
        if size > first:
            os.posix_fallocate(descriptor, first, size - first)
        os.fsync(descriptor)
    except OSError as error:
        if not existed:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)  # frees the blocks now, although the file is still open
            file.unlink(missing_ok=True)
        raise _not_reserved(file, 0, size, allocated_bytes(file), roots, error) from error
    finally:
        os.close(descriptor)


def extend(descriptor: int, file: Path, begin: int, end: int, roots: Iterable[Path] = ()) -> None:
    """Extend an open file to byte `end` by allocating the blocks from byte `begin`.

    Args:
        descriptor: descriptor of the file.
        file: path of the file, used in error messages and to find the file system.
        begin: offset of the first byte to allocate.
        end: new size of the file in bytes.
        roots: all folders of the run, whose files the error message takes into account.

    Raises:
        BudgetError: if the file system has too little free space. The message contains the free and the required
            size.
        StorageError: if the drive fails.
    """
    free = shutil.disk_usage(file.parent)[2]
    if end - begin > free:  # checked first because some file systems fill up completely before they report an error
        raise _no_room(file, end, begin, roots, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        raise _not_reserved(file, begin, end, os.fstat(descriptor).st_blocks * 512, roots, error) from error


def _not_reserved(
    file: Path, begin: int, end: int, there: int, roots: Iterable[Path], error: OSError
) -> BudgetError | StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _no_room(file, end, there, roots, error.strerror or str(error))
    return StorageError("reserve", str(file), begin, end - begin, error.errno)


def _no_room(file: Path, size: int, there: int, roots: Iterable[Path], reason: str) -> BudgetError:
    """Return the error for a file that needs `size` bytes, of which it already occupies `there`.

    The run may have reserved space in other files before this one. Both figures contain this space, because the user
    compares them with the free space before the start or after the files have been removed.
    """
    drive = file.parent.stat().st_dev
    folders = {file.parent, *(root for root in roots if root.is_dir() and root.stat().st_dev == drive)}
    entries = {Path(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names}
    occupied = sum(map(allocated_bytes, entries - {file}))
    free = shutil.disk_usage(file.parent)[2] + occupied + there
    included = f", including {format_size(occupied + there)} that this run occupies" if occupied + there else ""
    needed = format_size(occupied + size)
    return BudgetError(
        f"{file.parent} has {format_size(free)} free{included}, but this run needs {needed} there ({reason}). Free "
        "space, add a path to storage.paths, or remove runs that you will not resume: `infinity store rm`"
    )
