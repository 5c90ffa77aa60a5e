"""Safe access to files and folders that other users may have tampered with.

The functions never follow a malicious link, block on a pipe or overwrite the file of another user. All of them raise
`OSError`. If a file violates these expectations, they raise a `PermissionError` whose `strerror` contains the reason.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_TRIES = 100
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK, because opening a pipe would wait for a peer


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, regardless of its owner, and return its descriptor.

    Raises:
        OSError: if the file cannot be opened.
        PermissionError: if it is a link, a pipe, a folder or another special file.
    """
    try:
        descriptor = os.open(path, flags | _CAREFUL)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "it is a link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path, "it is not a regular file")
    return descriptor


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file that belongs to this user or to root, and return its descriptor.

    With ``O_CREAT``, a missing file is created with mode 0600.

    Raises:
        OSError: if the file cannot be opened.
        PermissionError: if it is not a regular file, has a second hard link, or belongs to another user.
    """
    for _ in range(_TRIES):
        if flags & os.O_CREAT:
            try:
                return os.open(path, flags | os.O_EXCL | _CAREFUL, 0o600)
            except FileExistsError:
                pass
        try:
            descriptor = open_regular(path, flags & ~os.O_CREAT)
        except FileNotFoundError:
            if flags & os.O_CREAT:  # removed since the first attempt
                continue
            raise
        about = os.fstat(descriptor)
        reason = _foreign(about.st_uid) or ("it has a second hard link" if about.st_nlink > 1 else "")
        if reason:
            os.close(descriptor)
            raise _refused(path, reason)
        return descriptor
    raise OSError(errno.EBUSY, "it is repeatedly created and removed", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file, regardless of its owner.

    Raises:
        OSError: if `open_regular` fails, or if the file is longer than `limit` bytes.
    """
    return _content(open_regular(path, os.O_RDONLY), path, limit)


def read_own(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a file that belongs to this user or to root.

    Raises:
        OSError: if `open_own` fails, or if the file is longer than `limit` bytes.
    """
    return _content(open_own(path, os.O_RDONLY), path, limit)


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces `path` at the end of the block. It is not flushed to the drive.

    Args:
        path: destination. If it is a link, the link itself is replaced.
        mode: mode of the new file before the umask is applied.

    Raises:
        OSError: if the file cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.rename(draft, target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_own(path: str | os.PathLike[str], data: bytes, *, durable: bool = False) -> None:
    """Atomically replace a file with one of mode 0600. With `durable`, the new content survives a power loss.

    Raises:
        OSError: if the file cannot be written.
    """
    with replacing(path, 0o600) as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_folder(Path(path).parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the creation, renaming and removal of entries in a folder durable.

    A link to a folder is followed, because the user may have configured such a path.

    Raises:
        OSError: if the folder cannot be opened or synchronized.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_folder(path: str | os.PathLike[str], *, parents: bool) -> None:
    """Create a folder with mode 0700 if it is missing, and check that only this user and root can change its entries.

    A folder with the sticky bit is accepted: all users may create files there, but cannot remove or rename the
    files of other users.

    Args:
        path: the folder.
        parents: create missing parents as well.

    Raises:
        OSError: if the folder cannot be created.
        PermissionError: if it is a link, belongs to another user, or is writable by other users.
    """
    Path(path).mkdir(mode=0o700, parents=parents, exist_ok=True)
    if reason := whose_folder(path):
        raise _refused(path, reason)


def whose_folder(path: str | os.PathLike[str]) -> str:
    """Return the reason why an existing folder is not controlled by this user alone, or an empty string.

    Raises:
        OSError: if the folder cannot be inspected.
    """
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode):
        return "it is a link" if stat.S_ISLNK(about.st_mode) else "it is not a folder"
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        return f"other users can write to it (mode {stat.S_IMODE(about.st_mode):04o})"
    return _foreign(about.st_uid)


def trusted(uid: int) -> bool:
    """Return whether files owned by a user are trusted: files of this user, and of root, who has full access anyway."""
    return uid in (0, os.geteuid())


def _foreign(uid: int) -> str:
    return "" if trusted(uid) else f"it belongs to user {uid}"


def _refused(path: str | os.PathLike[str], reason: str) -> OSError:
    return OSError(errno.EPERM, reason, os.fspath(path))


def _content(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(size + 1) if size <= limit else b""  # reading `limit` bytes would allocate all of them
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit} bytes", os.fspath(path))
    return data


def why_not_written(file: Path) -> str:
    """Return the reason why a file cannot be created or replaced, or an empty string if none is known in advance."""
    folder = file.parent
    if file.is_dir():
        return "it is a folder"
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        return "it is a link" if file.is_symlink() else "it is a device or pipe"  # a new file would replace it
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{str(folder)!r} is not writable by this user"


def user_name(uid: int) -> str:
    """Return the name of a user, or the user id if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
