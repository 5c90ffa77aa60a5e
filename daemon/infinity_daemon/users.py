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
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.untrusted_files import trusted

ALL: Final = "*"
"""Value of `server.group` that admits all users."""
_MAX_PATH: Final = 512
"""Maximum length of a path that another user may name, so that a user cannot make responses arbitrarily long."""


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
                    "set a different --runtime-dir"
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
        if folder.lstat().st_uid != uid or not uid:  # new, or the daemon was killed before it completed the folder
            with suppress(FileExistsError):
                os.symlink(f"../{SOCKET_NAME}", folder / SOCKET_NAME)  # clients find the socket in their own folder
            os.chown(folder, uid, -1, follow_symlinks=False)
        return True

    def folders(self) -> Iterator[tuple[Path, int]]:
        """Yield the users' folders and the ids of their users. [Note: several users]"""
        if not self.several:
            return
        with suppress(OSError):
            device = self._folder.lstat().st_dev
            for name in sorted(os.listdir(self._folder)):
                if name.isascii() and name.isdigit():
                    folder = self._folder / name
                    about = folder.lstat()
                    # A different device means that the user has mounted a file system there, which could block.
                    if stat.S_ISDIR(about.st_mode) and about.st_uid == int(name) and about.st_dev == device:
                        yield folder, about.st_uid


def may_name(path: str, uid: int) -> bool:
    """Return whether a user may ask the daemon about a path: a folder that belongs to the user or to root.

    Otherwise, users could learn from the responses of root's daemon which files exist in folders that they cannot read.
    """
    return trusted(uid) or owner_of(path) in (0, uid)


def owner_of(path: str) -> int | None:
    """Return the owner of a folder, or None if it does not exist, is not a folder or has a very long name."""
    with suppress(OSError, ValueError):
        about = os.stat(path) if len(path) <= _MAX_PATH else None
        return about.st_uid if about is not None and stat.S_ISDIR(about.st_mode) else None
    return None


@lru_cache(maxsize=4096)
def may_store(path: str, uid: int) -> bool:
    """Return the cached result of `may_name`, so that a path is not accessed again and again."""
    return may_name(path, uid)
