"""A run's place on the NVMe paths, and who holds it.

<path>/infinity.lock.<local rank>       held (flock) by the live run, says who
<path>/<run id>/infinity.run            says that this is a folder of a run, and which one of its paths
<path>/<run id>/rank00000.pages         data file of one rank
<path>/<run id>/checkpoints/                manifests, on the first path only

[Note: who holds what]
A live run holds a lock file on each of its paths from its start to the end of its process. The folder <path> itself is
locked too, but for moments: shared by a run that is about to take its lock files, exclusively by who removes runs
(`no_starts`). So nothing starts between the listing of what is to be removed and its removal, and a run that is live
when the listing begins is seen in it.

Whoever only looks takes a shared lock on a lock file for a moment. So a start that does not get the lock tries a
shared one: if it gets that, nobody owns the path, and it tries again.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import json
import logging
import os
import pwd
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import BudgetError, ConfigError, FolderBusyError, StorageError
from infinity.store.marker import MARKER_NAME, Marker, write_marker
from infinity.units import format_size
from infinity.untrusted_files import open_own, open_regular, own_folder, sync_folder, whose_folder

LOCK_NAME = "infinity.lock"
_LOCK_FILE = re.compile(rf"{re.escape(LOCK_NAME)}\.\d+", re.ASCII)
_UNKNOWN = "unknown"
_MOST_BYTES = 1 << 16
_MOST_SHOWN = 1 << 10  # characters of who holds a lock
_START_SECONDS = 20.0
"""How long a start waits for who removes runs, and for who only looks."""
_REMOVE_SECONDS = 2.0
"""How long who removes runs waits for a start to have its locks."""
_PAUSE = 0.01

_log = logging.getLogger("infinity")


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run, one per NVMe path. Only names: what they lead to may be there or not.

    The life of a run on disk: `create` makes folders, then markers, so that a folder without one is a start that was
    cut off; data files are reserved, checkpoints come and go. `remove` takes the checkpoints first and the marker last,
    so that
    what is left of a removal that was cut off is a run still, and is removed by the next.
    """

    run_id: str
    roots: tuple[Path, ...]
    """``<path>/<run id>`` for every path, in the run's own order; the first has the checkpoints."""

    @classmethod
    def of(cls, paths: Sequence[str | Path], run_id: str) -> RunFolder:
        """Return the folders of `run_id` on the configured paths."""
        return cls(run_id, tuple(Path(path) / run_id for path in paths))

    def data_file(self, path: int, rank: int) -> Path:
        """Return the data file of a rank on the path with that index."""
        return self.roots[path] / f"rank{rank:05d}.pages"

    @property
    def checkpoints(self) -> Path:
        """Folder of the manifests."""
        return self.roots[0] / "checkpoints"

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
            own_folder(self.checkpoints, parents=False)
            sync_folder(self.roots[0])
        except OSError as error:
            raise ConfigError(f"the run folder {folder} cannot be used: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the run from all paths: checkpoints first, and what says that it is a run last. No link is followed.

        Raises:
            OSError: something cannot be removed; what is left is a run without that checkpoint, or without any.
        """
        for number, root in enumerate(self.roots):
            with suppress(FileNotFoundError), opened_folder(root) as folder:
                if number == 0:
                    _remove_folder(folder, root / "checkpoints")
                _clear(folder, root, but=MARKER_NAME)
                _remove_empty(folder, root)

    def remove_file(self, file: Path) -> None:
        """Remove a file that lies in one of the folders, at any depth. No link is followed.

        Raises:
            OSError: it cannot be removed.
        """
        (root,) = (root for root in self.roots if root in file.parents)
        with suppress(FileNotFoundError), ExitStack() as opened:
            folder = opened.enter_context(opened_folder(root))
            for within in reversed(file.parents[: file.parents.index(root)]):
                folder = opened.enter_context(opened_folder(within, folder))
            with _naming(file):
                os.unlink(file.name, dir_fd=folder)

    def remove_rank(self, rank: int, *, checkpoints: bool) -> None:
        """Remove what one rank has of the run; the last one of this node also removes the folders.

        Args:
            rank: whose.
            checkpoints: remove the folder of the checkpoints too: of all ranks of this node.

        Raises:
            OSError: something cannot be removed.
        """
        # By name, with one descriptor at most, as a process may have no more left: in these nobody else puts links.
        own = {number: root for number, root in enumerate(self.roots) if _is_own(root)}
        if 0 in own and self.checkpoints.is_dir() and not self.checkpoints.is_symlink():
            with suppress(FileNotFoundError):  # the first rank of this node removes all of it
                self._remove_checkpoints("*" if checkpoints else f"step*.rank{rank:05d}[.-]*")
        for number in own:
            self.data_file(number, rank).unlink(missing_ok=True)
        for root in own.values():
            with suppress(FileNotFoundError):  # another rank does the same
                if not set(os.listdir(root)) - {MARKER_NAME}:
                    (root / MARKER_NAME).unlink(missing_ok=True)
                    root.rmdir()

    def _remove_checkpoints(self, pattern: str) -> None:
        """Remove what is named so, and the folder if that is all of it; for good, before a data file goes."""
        names = fnmatch.filter(os.listdir(self.checkpoints), pattern)
        for name in sorted(names, key=lambda name: not name.endswith(".json")):  # manifests first
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
    except FileNotFoundError:  # another rank has removed it
        return False


@contextmanager
def opened_folder(path: Path, parent: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder: what is named through it stays in this folder, whatever happens to its name.

    Args:
        path: its last part is not followed if it is a link.
        parent: descriptor of the folder that it lies in; else the whole path is looked up.

    Raises:
        FileNotFoundError: it is gone. NotADirectoryError: it is a link, or something else. OSError: as of `os.open`.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with _naming(path):
            descriptor = os.open(path if parent is None else path.name, flags, dir_fd=parent)
    except NotADirectoryError as error:
        raise NotADirectoryError(error.errno, "it is a link, or no folder", str(path)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_folder(parent: int, path: Path) -> None:
    """Remove a folder that lies in an open one, if it is there. Raises `OSError`."""
    with suppress(FileNotFoundError):
        with opened_folder(path, parent) as folder:
            _clear(folder, path)
        with _naming(path):
            os.rmdir(path.name, dir_fd=parent)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give errors the whole path, of which a call on a descriptor knows the last part only."""
    try:
        yield
    except OSError as error:
        if os.sep in str(error.filename):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _clear(folder: int, path: Path, but: str = "") -> None:
    """Remove what is in an open folder; `path` is its name, for errors. Raises `OSError`."""
    for name in os.listdir(folder):
        if name == but:
            continue
        with suppress(FileNotFoundError), _naming(path / name):  # another rank does the same
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                _remove_folder(folder, path / name)
            else:
                os.unlink(name, dir_fd=folder)


def _remove_empty(folder: int, root: Path) -> None:
    """Remove the folder of a run that has nothing but its marker."""
    with suppress(FileNotFoundError):  # another rank does the same
        os.unlink(MARKER_NAME, dir_fd=folder)
    with suppress(FileNotFoundError):
        root.rmdir()


def make_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Make those NVMe paths (mode 0700) that are missing; return them.

    Raises:
        ConfigError: one cannot be made; none is then.
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
            raise ConfigError(f"storage.paths: {str(path)!r} cannot be made: {error.strerror}") from error
    return made


def unmake_paths(made: Sequence[Path]) -> None:
    """Remove paths that `make_paths` has made and that hold nothing."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


class FolderLock:
    """The locks of this process on the NVMe paths: until `release`, or until all that have its descriptors have ended.

    `acquire` makes and locks one file per path; `name` says in them whose they are; `release` removes the files, then
    unlocks them. Used by the training thread alone, but for the fork that closes descriptors in a child.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        """Of the lock files, open and locked, in the order of the paths taken; empty before and after."""
        self._files: list[Path] = []
        """Names of what the descriptors are open on."""
        self._made: Sequence[Path] = ()
        """Paths that this start has made; `release` removes those with nothing in them."""
        self._process = os.getpid()
        """The process that holds them: a child that is forked has the descriptors too, but is not the holder."""

    @classmethod
    def acquire(
        cls, paths: Sequence[str | Path], run_id: str, local_rank: int, made: Sequence[Path] = ()
    ) -> FolderLock:
        """Take every path. [Note: who holds what]

        Args:
            made: those that this start has made: they go when they are given back with nothing in them.

        Raises:
            FolderBusyError: another live run holds one; the message says which process.
            ConfigError: a path is not writable, or cannot be locked.
        """
        lock = cls()
        lock._made = made
        _held.add(lock)
        try:
            with ExitStack() as starting:
                for path in paths:
                    if not starting.enter_context(_folder_locked(Path(path), fcntl.LOCK_SH, _START_SECONDS)):
                        raise FolderBusyError(
                            f"{path} has been locked for {_START_SECONDS:g} s: `infinity store gc` or `rm` runs there "
                            f"until its question is answered, or another process that may read the folder has locked "
                            f"it; {_who_has(path)}"
                        )
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
                elif not _locked(descriptor, fcntl.LOCK_SH, file):
                    raise FolderBusyError(
                        f"{path} is in use by {describe_holder(file)}; wait for it to end or name another folder"
                    )
                elif time.monotonic() > end:
                    raise FolderBusyError(
                        f"{file} has been locked for {_START_SECONDS:g} s by who only looks at it; {_who_has(file)}"
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
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        for descriptor, file in zip(self._descriptors, self._files, strict=True):
            try:
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            except OSError as error:
                raise ConfigError(f"storage.paths: {file} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Give the paths back; a lock file that cannot be removed is said and left. Idempotent, never raises.

        In a process that was forked from the holder nothing is given back.
        """
        if os.getpid() != self._process:
            return
        while self._descriptors:
            descriptor, file = self._descriptors.pop(), self._files.pop()
            try:
                file.unlink(missing_ok=True)  # before the lock is dropped, so nobody's new file is removed
            except OSError as error:
                _log.warning("%s, which nobody holds any more, could not be removed: %s", file, error.strerror)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that is just being started may have it open, too
            with suppress(OSError):
                os.close(descriptor)
        unmake_paths(self._made)
        _held.discard(self)

    def leave_to_parent(self) -> None:
        """Close the descriptors without unlocking: as long as a child has them, the parent's end frees nothing."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors, self._files = [], []


_held: set[FolderLock] = set()
"""What this process has locked; `acquire` adds, `release` and a fork remove."""


def _leave_to_parent() -> None:
    for lock in _held:
        lock.leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a path, as it wrote itself into the lock file; `uid` is the file's own."""

    run_id: str
    pid: int
    host: str
    since: float
    uid: int

    @classmethod
    def unknown(cls, uid: int) -> Holder:
        """Return a holder of whom nothing is known but whose lock file it is."""
        return cls(run_id=_UNKNOWN, pid=0, host=_UNKNOWN, since=0.0, uid=uid)

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
                raise FolderBusyError(
                    f"a run is starting on {path}, or runs are being removed there; try again. If it stays so, another "
                    f"process that may read the folder has locked it; {_who_has(path)}"
                )
        yield


def _who_has(path: str | Path) -> str:
    """Return how to find out who holds a lock of which nobody has written whose it is."""
    return f"as root, `fuser -v {path}` or `lsof {path}` names the process"


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
    unknown = f"another run, or a process that holds {file.name}"
    try:
        descriptor = open_regular(file, os.O_RDONLY)
    except OSError:
        return unknown
    try:
        return str(_read_holder(descriptor) or unknown)
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> Holder | None:
    """Return who wrote a lock file; None if what it says is nothing that a run writes."""
    try:
        tree = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        holder = Holder(
            run_id=str(tree["run_id"]),
            pid=int(tree["pid"]),
            host=str(tree["host"]),
            since=float(tree["since"]),
            uid=os.fstat(descriptor).st_uid,
        )
        shown = str(holder)  # the time may be none
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return holder if shown.isprintable() and len(shown) <= _MOST_SHOWN else None


def holders(path: str | Path) -> list[Holder]:
    """Return who holds a path, one for each lock file that is held; one that cannot be asked counts as held.

    What they say of themselves is only as good as the owner of the file (`Holder.uid`): see `holder_of`. Nothing is
    written, so the path may be mounted read-only.

    Raises:
        ConfigError: a lock file cannot be asked.
    """
    found = []
    for file in _lock_files(Path(path)):
        try:
            descriptor = open_regular(file, os.O_RDONLY)
        except FileNotFoundError:  # given back just now
            continue
        except OSError:
            if (uid := _owner_of(file)) is not None:  # else it is no file: a start will say so
                found.append(Holder.unknown(uid))
            continue
        try:
            if not _locked(descriptor, fcntl.LOCK_SH, file):
                found.append(_read_holder(descriptor) or Holder.unknown(os.fstat(descriptor).st_uid))
        finally:
            os.close(descriptor)
    return found


def believed(holder: Holder, root: Path) -> bool:
    """Whether a holder can have the run of this folder open: its lock is of the folder's owner, or of root and says so.

    Who does not say which run it has open may have any of its user's: a run is only opened in folders of one's own.

    Raises:
        OSError: the folder is gone.
    """
    mine = holder.uid == root.lstat().st_uid
    return mine if not holder.known else holder.run_id == root.name and (mine or holder.uid == 0)


def holder_of(folder: RunFolder) -> Holder | None:
    """Return who has a run open, None if nobody does.

    Whoever may make files in a shared folder can hold a lock there and write any run's id into it, so it depends on
    whose the lock is.

    Raises:
        ConfigError: a lock file cannot be asked. OSError: a folder of the run is gone.
    """
    for root in folder.roots:
        for holder in holders(root.parent):
            if believed(holder, root):
                return holder
    return None


def _lock_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob(f"{LOCK_NAME}.*") if _LOCK_FILE.fullmatch(file.name))


def _owner_of(file: Path) -> int | None:
    """Return whose file it is; None if it is no regular one, or gone."""
    try:
        return file.lstat().st_uid if file.is_file() and not file.is_symlink() else None
    except OSError:
        return None


def stale_locks(path: Path) -> list[Path]:
    """Return the lock files that nobody holds. Raises `ConfigError` as `holders`."""
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
    """Remove a lock file unless somebody holds it; return whether it is gone.

    Raises:
        OSError: it cannot be removed. ConfigError: it cannot be locked.
    """
    try:
        descriptor = open_regular(file, os.O_RDWR)  # NFS: exclusive locks are for what is open for writing
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


def allocated_bytes(file: Path) -> int:
    """Return the bytes that a file takes on its drive, which are less than its size if it has holes; 0 without one."""
    try:
        return os.lstat(file).st_blocks * 512
    except FileNotFoundError:
        return 0


def reserve(file: Path, size: int) -> None:
    """Make the file `size` bytes long with all its blocks allocated.

    Raises:
        BudgetError: the file system has no room; both sizes are named.
        StorageError: the file cannot be made, or the drive failed.
    """
    existed, there = os.path.lexists(file), allocated_bytes(file)
    whole, _, free = shutil.disk_usage(file.parent)
    if not whole:
        raise BudgetError(
            f"{file.parent} is on a file system without a size, such as ramfs, which is memory and no drive; name a "
            "folder on an NVMe drive in storage.paths"
        )
    if size - there > free:  # asked first: a file system may fill itself up before it refuses
        raise _no_room(file, size, free, os.strerror(errno.ENOSPC))
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError("open", str(file), 0, size, error.errno) from error
    try:
        long = os.fstat(descriptor).st_size
        first = long if there >= long else 0  # behind what is being written: some file systems have it emulated
        if size > first:
            os.posix_fallocate(descriptor, first, size - first)
        os.fsync(descriptor)
    except OSError as error:
        if not existed:
            file.unlink(missing_ok=True)
        raise _not_reserved(file, 0, size, free, error) from error
    finally:
        os.close(descriptor)


def extend(descriptor: int, file: Path, begin: int, end: int) -> None:
    """Allocate the blocks of an open file from byte `begin` to `end`, which it is long then.

    Args:
        file: what it is called, for errors.

    Raises:
        BudgetError: the file system has no room; both sizes are named. StorageError: the drive failed.
    """
    free = shutil.disk_usage(file.parent)[2]
    if end - begin > free:  # asked first: a file system may fill itself up before it refuses
        raise _no_room(file, end - begin, free, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        raise _not_reserved(file, begin, end - begin, free, error) from error


def _not_reserved(file: Path, begin: int, size: int, free: int, error: OSError) -> BudgetError | StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _no_room(file, size, free, error.strerror or str(error))
    return StorageError("reserve", str(file), begin, size, error.errno)


def _no_room(file: Path, size: int, free: int, reason: str) -> BudgetError:
    return BudgetError(
        f"{file.parent} has {format_size(free)} free, but this run needs {format_size(size)} there "
        f"({reason}); free space, add a path to storage.paths, or "
        "remove runs that nothing goes on from with `infinity store rm`"
    )
