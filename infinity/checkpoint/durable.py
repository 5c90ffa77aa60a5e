"""Atomic writes of files and folders: after a power loss, they are either complete or absent.

A file is written under a temporary name, flushed, read back and renamed. A folder is written next to its destination as
`.NAME.partial-…`, and renamed once it is complete. The remains of an interrupted write cannot be mistaken for the
finished file or folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from infinity.errors import ConfigError
from infinity.units import format_size
from infinity.untrusted_files import sync_folder

_log = logging.getLogger("infinity")
_PARTIAL = ".partial-"


def write_durably(
    target: Path, data: bytes, check: Callable[[bytes], object] | None = None, *, mode: int = 0o600
) -> None:
    """Write a file under a temporary name, flush it, read it back, rename it, and flush its folder.

    Args:
        target: File to create or replace.
        data: Contents of the file.
        check: Function that is called with the bytes that were read back. If it raises an error, the target is left
            unchanged.
        mode: Permissions of the file, subject to the umask.

    Raises:
        OSError: if the file system fails, or if the bytes that were read back differ from `data`.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")  # not predictable
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            file.write(data)
            file.flush()
            # The contents must be durable before the rename; otherwise a power loss could leave an incomplete file.
            os.fsync(file.fileno())
            file.seek(0)
            found = file.read()
        if found != data:
            raise OSError(errno.EIO, "the data read back differs from the data written", str(temporary))
        if check is not None:
            check(found)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # report the first failure
            temporary.unlink(missing_ok=True)
        raise
    # The name must be durable as well: until the folder is flushed, a power loss can undo the rename, although the
    # caller may already rely on the file, e.g. by freeing the pages of the previous checkpoint.
    sync_folder(target.parent)


def sync_file(file: Path) -> None:
    """Make a file's contents durable and drop them from the operating system's cache. Raises `OSError`."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class NewFolder:
    """A folder that is written at `partial` and moved to its destination when the ``with`` block succeeds.

    At the end of the block, everything in `partial` is synced, the folder is renamed, and its parent is synced. Code
    that needs its files to be durable before the end of the block must sync them itself. If the block fails, `partial`
    is removed.
    """

    def __init__(self, folder: Path, nbytes: int = 0) -> None:
        """Check that the folder can be created.

        Args:
            folder: Destination. It must not exist or must be empty; an empty folder is replaced.
            nbytes: Minimum number of bytes that will be written into the folder.

        Raises:
            ConfigError: if the destination is not empty, cannot be created, or has too little free space.
        """
        self.folder = Path(os.path.realpath(folder))
        """Destination."""
        self.partial = self.folder.with_name(f".{self.folder.name}{_PARTIAL}{secrets.token_hex(4)}")
        """Temporary location of the folder."""
        self._nbytes = nbytes  # minimum number of bytes that will be written
        self._descriptor = -1  # descriptor of `partial`, locked so that other exports do not report it as abandoned
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(f"{folder} exists but is not a folder. Choose a different path.")
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ConfigError(f"{folder} is not empty. Use a new folder.")
        except OSError as error:
            raise _cannot_be_made(self.folder, error) from error
        if os.path.ismount(self.folder):
            raise ConfigError(f"{folder} is a mount point. Use a new folder inside it.")

    def __enter__(self) -> Path:
        """Create `partial` and return its path. Raises `ConfigError`."""
        try:
            _make_durably(self.folder.parent)
            for left in self._left_behind():
                _log.warning("%s was left by an interrupted export; remove it", left)
            whole, _, free = shutil.disk_usage(self.folder.parent)
            if self._nbytes > free and whole:  # a file system without a size, such as ramfs, reports 0 for both
                raise ConfigError(
                    f"{self.folder.parent} has {format_size(free)} free, but {self.folder.name} needs "
                    f"{format_size(self._nbytes)}. Free space or use another folder."
                )
            self.partial.mkdir()
            self._descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # some file systems do not support locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            self._discard()
            raise _cannot_be_made(self.folder, error) from error
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Move the folder to its destination, or remove it after an error. Raises `ConfigError`."""
        if error is not None:
            self._discard()
            return
        try:
            self._publish()
        except BaseException as failure:
            self._discard()
            if isinstance(failure, OSError):
                raise ConfigError(f"{self.folder} cannot be written: {failure.strerror}") from failure
            raise
        os.close(self._descriptor)

    def _publish(self) -> None:
        # Files and folders are durable before the rename, so that the destination is never incomplete.
        for place, _, files in os.walk(self.partial, topdown=False):
            for name in files:
                sync_file(Path(place, name))
            sync_folder(Path(place))
        if self.folder.is_dir():
            shutil.copymode(self.folder, self.partial)
        os.rename(self.partial, self.folder)  # fails if the destination is a folder that is not empty
        sync_folder(self.folder.parent)

    def _discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _left_behind(self) -> Iterator[Path]:
        """Yield partial folders that earlier attempts left behind and no process is using."""
        prefix = f".{self.folder.name}{_PARTIAL}"
        for left in sorted(entry for entry in self.folder.parent.iterdir() if entry.name.startswith(prefix)):
            with contextlib.suppress(OSError):
                descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    yield left
                finally:
                    os.close(descriptor)


def _cannot_be_made(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be created: {error.strerror}")


def _make_durably(folder: Path) -> None:
    """Create a folder and its missing parents, and make their names durable."""
    if not folder.is_dir():
        _make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
