"""Access of several users to one daemon, which must run as root.

[Note: several users] The runtime folder belongs to root, and no other user can create entries in it. When a user first
connects to the socket, the daemon creates a folder for this user's stats files. Its name is the user id, and only the
user and root have access to it. A user therefore cannot occupy the place of another user's folder. Links cannot
redirect the daemon either, because it only opens and removes entries of these folders, whose own paths are controlled
by root, and never follows a link in the last component of a path.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.untrusted_files import trusted, user_name

ALL: Final = "*"
"""Value of `server.group` that admits all users."""
_MAX_PATH: Final = 512
"""Maximum length of a path that another user may name, so that a user cannot make responses arbitrarily long."""
_MAX_LINKS: Final = 40
"""Maximum number of links in such a path, as in the kernel."""
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # neither follows links nor opens pipes and devices


class Users:
    """Users that may use the daemon: its own user and root, and the members of a group if `group` is not empty.

    The kernel enforces the membership, because it checks the mode of the socket when a client connects.
    """

    def __init__(self, folder: Path, group: str = "") -> None:
        """Initialize.

        Args:
            folder: Runtime folder of the daemon.
            group: Value of `server.group`.

        Raises:
            ConfigError: if the group does not exist, or if the daemon does not run as root.
        """
        self._folder = folder
        self._group = -1
        """Id of the group; -1 for no group or for all users."""
        self.several = bool(group)
        """``True`` if users other than the daemon's user and root may use the daemon."""
        if not group:
            return
        if os.geteuid():
            raise ConfigError(f"server.group = {group!r} requires that infinityd runs as root")
        if group != ALL:
            try:
                self._group = grp.getgrnam(group).gr_gid
            except KeyError:
                raise ConfigError(
                    f'server.group = {group!r} does not exist; create it, or use "{ALL}" for all users'
                ) from None

    def open_folder(self) -> None:
        """Let the users enter the runtime folder.

        Raises:
            ConfigError: if users can write to it, or if its mode cannot be changed.
        """
        if not self.several:
            return
        try:
            about = self._folder.lstat()
            if about.st_mode & 0o022 or about.st_uid:
                raise ConfigError(
                    f"runtime folder {str(self._folder)!r} must be writable only by root if server.group is set; "
                    "remove write access for other users (chmod 755)"
                )
            self._folder.chmod(0o755)
        except OSError as error:
            raise ConfigError(f"runtime folder {str(self._folder)!r} cannot be used: {error.strerror}") from error

    def open_socket(self, path: Path) -> None:
        """Let the users connect to a new socket. Raises `OSError`."""
        if self._group != -1:
            os.chown(path, -1, self._group, follow_symlinks=False)
        os.chmod(path, (0o666 if self._group == -1 else 0o660) if self.several else 0o600)

    def admit(self, uid: int) -> bool:
        """Return whether a connected user may use the daemon. If several users may, create the user's folder.

        Raises:
            OSError: if the folder cannot be created.
        """
        if not self.several:
            return trusted(uid)
        folder = self._folder / str(uid)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with suppress(FileExistsError):  # it exists already, or the user runs a separate daemon
            os.symlink(f"../{SOCKET_NAME}", folder / SOCKET_NAME)  # clients find the socket in their own folder
        if folder.lstat().st_uid != uid:  # new, or the daemon was killed before it completed the folder
            os.chown(folder, uid, -1, follow_symlinks=False)
        return True

    def folders(self) -> Iterator[tuple[Path, int]]:
        """Yield the users' folders and the ids of their users. [Note: several users]"""
        if not self.several:
            return
        try:
            device, names = self._folder.lstat().st_dev, sorted(os.listdir(self._folder))
        except OSError:
            return
        for name in names:
            if name.isascii() and name.isdigit():
                folder = self._folder / name
                try:
                    about = folder.lstat()
                except OSError:  # for example a FUSE file system, which root cannot access
                    continue
                # A different device means that the user has mounted a file system there, which could block.
                if stat.S_ISDIR(about.st_mode) and about.st_uid == int(name) and about.st_dev == device:
                    yield folder, about.st_uid


@contextmanager
def opened(path: str, uid: int, *, own: bool = False) -> Iterator[str]:
    """Open a folder about which a user may ask the daemon, and yield a path that always refers to this folder.

    Root's daemon can access all folders, so without these checks, users could learn from its responses which files
    exist in folders that they cannot read. The folder must belong to the user, or to root and be in folders that all
    users can enter. The user cannot replace it with a link after the checks, because it remains open.

    Args:
        path: Absolute path of the folder.
        uid: Id of the user. Trusted users may name any path, which is yielded as it is.
        own: Reject a folder of root, too.

    Raises:
        ConfigError: if the folder does not exist or does not meet these conditions.
    """
    if trusted(uid):
        yield path
        return
    try:
        descriptor, owner = _open_as(path, uid)
    except (OSError, ValueError):
        raise ConfigError(
            f"{path!r} is not a folder that belongs to user {user_name(uid)} or to root, or not all users can enter it"
        ) from None
    try:
        if own and owner != uid:
            raise ConfigError(f"{path!r} does not belong to user {user_name(uid)}")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def may_name(path: str, uid: int) -> bool:
    """Return whether a user may ask the daemon about a folder (see `opened`)."""
    try:
        with opened(path, uid):
            return True
    except ConfigError:
        return False


def _open_as(path: str, uid: int) -> tuple[int, int]:
    """Return the descriptor and the owner of a folder of a user or of root. Raises `OSError` or `ValueError`.

    In a folder that not all users can enter, only folders of the user are accepted and links are not followed. Such a
    folder may belong to a group of the user, or the user has no access to it.
    """
    if len(path) > _MAX_PATH or not path.startswith("/"):
        raise ValueError(path)
    names, links, hidden = path.split("/")[::-1], 0, False
    descriptor = os.open("/", _LOOK)
    try:
        while names:
            name = names.pop()
            if name in ("", "."):
                continue
            about = os.fstat(descriptor)
            hidden = hidden or not (about.st_uid == uid or about.st_mode & stat.S_IXOTH)
            found = os.open(name, _LOOK, dir_fd=descriptor)
            if stat.S_ISLNK(os.fstat(found).st_mode):
                target = os.readlink("", dir_fd=found)
                os.close(found)
                links += 1
                if hidden or links > _MAX_LINKS:
                    raise PermissionError(path)
                names += target.split("/")[::-1]
                if not target.startswith("/"):
                    continue  # relative to the folder that contains the link
                found = os.open("/", _LOOK)
            os.close(descriptor)
            descriptor = found
            if hidden and name == "..":
                raise PermissionError(path)
        about = os.fstat(descriptor)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid not in ((uid,) if hidden else (0, uid)):
            raise PermissionError(path)
        return descriptor, about.st_uid
    except BaseException:
        os.close(descriptor)
        raise
