"""Files and folders that are there completely or not at all, whenever the power goes.

A file is written under a temporary name, flushed, read back and renamed; a folder as a whole beside its place, under
`.NAME.partial-…`. What is left of one that was cut off never looks like what it was to become.
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
    """Write a file under a temporary name, flush it, read it back, rename it, flush the folder.

    Args:
        target: replaced if it is there.
        data: its whole content.
        check: given what was read back; what it raises leaves the target as it was.
        mode: who may read and write it, less what the process masks.

    Raises:
        OSError: the file system refused, or what is read back is not what was written.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")  # nobody can have put something there
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            found = file.read()
        if found != data:
            raise OSError(errno.EIO, "what is read back is not what was written", str(temporary))
        if check is not None:
            check(found)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # what failed first is what is said
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_file(file: Path) -> None:
    """Make a file's content durable, and have what is read of it next come from the drive. Raises `OSError`."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class NewFolder:
    """A folder in the making: written at `partial`, and at its place when the `with` block has ended well.

    Whoever writes files into `partial` syncs what they must not lose early; at the end everything in it is synced, the
    folder is renamed, and its parent synced. If the block fails, `partial` is removed.
    """

    def __init__(self, folder: Path, nbytes: int = 0) -> None:
        """Look whether the folder can be made.

        Args:
            folder: does not exist, or is empty and then replaced.
            nbytes: what will be written into it, at least.

        Raises:
            ConfigError: it is not empty, cannot be made, or there is no room for so many bytes.
        """
        self.folder = Path(os.path.realpath(folder))
        """Its place in the end."""
        self.partial = self.folder.with_name(f".{self.folder.name}{_PARTIAL}{secrets.token_hex(4)}")
        """Where it is written."""
        self._nbytes = nbytes  # what will be written, at least
        self._descriptor = -1  # of `partial`, locked: nobody takes it for what was left by another
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(f"{folder} is no folder; name a new one")
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ConfigError(f"{folder} is not empty; name a new folder")
        except OSError as error:
            raise _cannot_be_made(self.folder, error) from error
        if os.path.ismount(self.folder):
            raise ConfigError(f"{folder} is where a drive is mounted; name a new folder on it")

    def __enter__(self) -> Path:
        """Make `partial` and return it. Raises `ConfigError`."""
        try:
            _make_durably(self.folder.parent)
            for left in self._left_behind():
                _log.warning("%s was left behind by an export that was cut off; remove it", left)
            whole, _, free = shutil.disk_usage(self.folder.parent)
            if self._nbytes > free and whole:  # a file system without a size, such as ramfs, says 0 of everything
                raise ConfigError(
                    f"{self.folder.parent} has {format_size(free)} free, {self.folder.name} needs "
                    f"{format_size(self._nbytes)}; free space or name a folder elsewhere"
                )
            self.partial.mkdir()
            self._descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            self._discard()
            raise _cannot_be_made(self.folder, error) from error
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Put the folder in its place, or remove it. Raises `ConfigError`."""
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
        for place, _, files in os.walk(self.partial, topdown=False):
            for name in files:
                sync_file(Path(place, name))
            sync_folder(Path(place))
        if self.folder.is_dir():
            shutil.copymode(self.folder, self.partial)
        os.rename(self.partial, self.folder)  # refuses to replace a folder that is not empty
        sync_folder(self.folder.parent)

    def _discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _left_behind(self) -> Iterator[Path]:
        """Yield folders of earlier attempts at this one that nobody works on any more."""
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
    return ConfigError(f"{folder} cannot be made: {error.strerror}")


def _make_durably(folder: Path) -> None:
    """Make a folder and those above it that are not there, so that their names last."""
    if not folder.is_dir():
        _make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
