"""Files and folders where others may have put something: never followed, waited for or overwritten, but refused.

Everything raises `OSError`; what is not as it has to be is a `PermissionError` whose `strerror` says in words why.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_TRIES = 100
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a pipe would wait for its other end


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a regular file, whoever owns it.

    Raises:
        OSError: it cannot be opened. PermissionError: it is a link, a pipe, a folder or another thing.
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
    """Return a descriptor of a regular file of this user; with ``O_CREAT``, of a new one (mode 0600) if there is none.

    Raises:
        OSError: it cannot be opened. PermissionError: it is not a regular file, has a second name, or belongs to
            another user.
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
            if flags & os.O_CREAT:  # removed just now
                continue
            raise
        about = os.fstat(descriptor)
        reason = _foreign(about.st_uid) or ("it has a second name elsewhere" if about.st_nlink > 1 else "")
        if reason:
            os.close(descriptor)
            raise _refused(path, reason)
        return descriptor
    raise OSError(errno.EBUSY, "it is made and removed all the time", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file, whoever owns it; raises as `open_regular`, and if it is above `limit`."""
    return _content(open_regular(path, os.O_RDONLY), path, limit)


def read_own(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a file of this user; raises as `open_own`, and if it is longer than `limit` bytes."""
    return _content(open_own(path, os.O_RDONLY), path, limit)


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name at the end: it is there completely, or as before. Not flushed.

    Args:
        path: whatever has that name is replaced and not followed.
        mode: of the new file, less the umask.

    Raises:
        OSError: it cannot be written.
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
    """Replace a file by one of mode 0600: it is there completely, or as before; after a loss of power too if `durable`.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path, 0o600) as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_folder(Path(path).parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make what was created, renamed and removed in a folder durable. Raises `OSError`.

    A link to one is followed: it may be a path that the user has named.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_folder(path: str | os.PathLike[str], *, parents: bool) -> None:
    """Make a folder (mode 0700) if there is none, and check that only this user and root change what is in it.

    With `parents`, those that it lies in are made too.

    In a folder with the sticky bit all may make files, but nobody removes or renames those of others; it is accepted.

    Raises:
        OSError: it cannot be made. PermissionError: it is a link, belongs to another user, or is others' to write.
    """
    Path(path).mkdir(mode=0o700, parents=parents, exist_ok=True)
    if reason := whose_folder(path):
        raise _refused(path, reason)


def whose_folder(path: str | os.PathLike[str]) -> str:
    """Return why a folder that exists is not this user's alone; empty if it is. Raises `OSError`."""
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode):
        return "it is a link" if stat.S_ISLNK(about.st_mode) else "it is not a folder"
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        return f"others may write to it (mode {stat.S_IMODE(about.st_mode):04o})"
    return _foreign(about.st_uid)


def trusted(uid: int) -> bool:
    """Whether what a user offers is taken: this user, and root, who can do everything anyway."""
    return uid in (0, os.geteuid())


def _foreign(uid: int) -> str:
    return "" if trusted(uid) else f"it belongs to user {uid}"


def _refused(path: str | os.PathLike[str], reason: str) -> OSError:
    return OSError(errno.EPERM, reason, os.fspath(path))


def _content(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(size + 1) if size <= limit else b""  # not `limit`: so many bytes are allocated
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit} bytes", os.fspath(path))
    return data


def why_not_written(file: Path) -> str:
    """Return why a file cannot be made or replaced, as far as that can be known before; empty if it can."""
    folder = file.parent
    if file.is_dir():
        return "it is a folder"
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        return "it is a link" if file.is_symlink() else "it is a device or pipe"  # which a new file would replace
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{str(folder)!r} is not writable for this user"
