"""A run's place on the NVMe paths, and who owns it.

<path>/infinity.lock.<local rank>       held (flock) by the live run, says who
<path>/<run id>/rank00000.pages         data file of one rank
<path>/<run id>/commits/                manifests, on the first path only
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import BudgetError, ConfigError, FolderBusyError, StorageError
from infinity.units import format_size

LOCK_NAME = "infinity.lock"


def new_run_id() -> str:
    """Return an id that sorts by time: ``20260131-142530-1a2b3c``.

    The first half of the last part is the time in 1/4096 s, the second half is random.
    """
    now = time.time()
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(now)) + f"{int(now % 1 * 4096):03x}{secrets.randbelow(4096):03x}"


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
        """Make the folders.

        Raises:
            ConfigError: a path is not writable.
        """
        for root in (*self.roots, self.commits):
            try:
                root.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make the run folder {root}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the run from all paths."""
        for root in self.roots:
            shutil.rmtree(root, ignore_errors=True)


def find_runs(paths: Sequence[str | Path]) -> list[str]:
    """Return the ids of the runs that have a folder on the first path, oldest first."""
    return sorted(entry.parent.name for entry in Path(paths[0]).glob("*/commits") if entry.is_dir())


class FolderLock:
    """Ownership of the NVMe paths by this process; lost when the process dies, never before."""

    def __init__(self, descriptors: list[int], files: list[Path]) -> None:
        self._descriptors, self._files = descriptors, files

    @classmethod
    def acquire(cls, paths: Sequence[str | Path], run_id: str, local_rank: int) -> FolderLock:
        """Take every path.

        Raises:
            FolderBusyError: another live run holds one; the message says which process.
            ConfigError: a path is not writable.
        """
        descriptors: list[int] = []
        files: list[Path] = []
        lock = cls(descriptors, files)
        for path in paths:
            file = Path(path) / f"{LOCK_NAME}.{local_rank}"
            try:
                descriptor = _lock_file(file)
            except OSError as error:
                lock.release()
                raise ConfigError(f"storage.paths: {str(path)!r} is not writable: {error.strerror}") from error
            if descriptor is None:
                held = describe_holder(file)
                lock.release()
                raise FolderBusyError(
                    f"{path} is in use by {held}; wait for it to end or name another folder"
                ) from None
            descriptors.append(descriptor)
            files.append(file)
        lock.name(run_id)
        return lock

    def name(self, run_id: str) -> None:
        """Write into the lock files which run of this process is the live one."""
        owner = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        for descriptor in self._descriptors:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Give the paths back. Idempotent."""
        for descriptor, file in zip(self._descriptors, self._files, strict=True):
            file.unlink(missing_ok=True)  # before the lock is dropped, so nobody's new file is removed
            os.close(descriptor)
        self._descriptors.clear()
        self._files.clear()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a path, as it wrote itself into the lock file."""

    run_id: str
    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run_id} (process {self.pid} on {self.host}, since {since})"


def _lock_file(file: Path) -> int | None:
    """Return a descriptor that holds the lock of `file`, or None when somebody else does.

    The holder before may have removed the file between open and flock: a lock on a file that is gone is worth
    nothing, so the name must still lead to the file that was locked.
    """
    for _ in range(100):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        os.close(descriptor)
    return None


def describe_holder(file: Path) -> str:
    """Return who holds a lock file, from what the holder wrote into it."""
    return str(read_owner(file) or "another run")


def read_owner(file: Path) -> Owner | None:
    """Return who wrote a lock file; None if it cannot be read."""
    try:
        tree = json.loads(file.read_text())
        return Owner(
            run_id=str(tree["run_id"]), pid=int(tree["pid"]), host=str(tree["host"]), since=float(tree["since"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_run(path: str | Path) -> Owner | None:
    """Return who holds a path, or None when nobody does."""
    for file in sorted(Path(path).glob(f"{LOCK_NAME}.*")):
        try:
            descriptor = os.open(file, os.O_RDWR)
        except FileNotFoundError:  # given back just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at once
        except BlockingIOError:
            return read_owner(file) or Owner(run_id="unknown", pid=0, host="unknown", since=0.0)
        finally:
            os.close(descriptor)
    return None


def remove_stale_lock(file: Path) -> bool:
    """Remove a lock file unless somebody holds it; return whether it is gone."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink(missing_ok=True)  # before the lock is dropped: who waits for it then sees that the file is gone
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def reserve(file: Path, size: int) -> None:
    """Make the file `size` bytes long with all its blocks allocated.

    Raises:
        BudgetError: the file system has no room; both sizes are named.
        StorageError: the file cannot be made.
    """
    before = file.stat().st_size if file.exists() else 0
    free = shutil.disk_usage(file.parent).free
    if size - before > free:  # asked first: a file system may fill itself up before it refuses
        raise _no_room(file, size, free, os.strerror(errno.ENOSPC))
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError("open", str(file), 0, size, error.errno) from error
    try:
        if before < size:
            os.posix_fallocate(descriptor, 0, size)
        os.fsync(descriptor)
    except OSError as error:
        if before == 0:
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
