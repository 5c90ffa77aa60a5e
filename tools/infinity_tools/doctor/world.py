"""Inputs to the checks: the machine, its daemon, and folders."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infinity.daemon_client import NodeDaemon
from infinity.io.alignment import open_aligned
from infinity.io.engine import DataFile
from infinity.io.probe.targets import PREFIX


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Folder to be used in `storage.paths`."""

    path: str
    """Path as passed by the user."""
    root: Path = Path("/")
    """Folder that contains `proc` and `sys`."""
    daemon: Daemon
    """Daemon of the node."""

    @property
    def exists(self) -> bool:
        return os.path.isdir(self.path)

    @property
    def place(self) -> str:
        """The folder or, if it does not exist yet, its parent."""
        return self.path if self.exists else os.path.dirname(os.path.abspath(self.path))

    @contextmanager
    def trial(self) -> Iterator[DataFile]:
        """Yield a new file without a name in the folder, opened as in the I/O engines. Raises `OSError` if that
        fails."""
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=self.place)
        os.close(descriptor)
        try:
            opened = open_aligned(name, os.O_RDWR)
        finally:
            os.unlink(name)
        try:
            yield opened
        finally:
            os.close(opened.fd)


class Daemon:
    """Client of the node's daemon. It requests the state of the node only once."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        """Runtime folder of the daemon."""
        self._node = NodeDaemon(runtime)

    @cached_property
    def state(self) -> dict[str, Any] | None:
        """State of the node, or None if no daemon of this user or root answers."""
        with _unheard("infinity"):  # a different user's daemon is reported as a finding
            return self._node.ask("state")

    def bandwidth(self, path: str) -> dict[str, Any] | None:
        """Return the bandwidth profile of a folder's drive, or None if it is not known."""
        if self.state is None:
            return None
        name = str(Path(path).resolve())
        found = (self._node.ask("bandwidth", paths=[name]) or {}).get("bandwidth")
        profile = found.get(name) if isinstance(found, dict) else None
        return profile if isinstance(profile, dict) else None


@dataclass(frozen=True, kw_only=True)
class World:
    """Machine to check, as seen by this process."""

    folders: tuple[Folder, ...]
    """Folders to check."""
    daemon: Daemon
    """Daemon of the node."""
    root: Path = Path("/")
    """Folder that contains `proc`, `sys` and `dev`."""

    @classmethod
    def of(cls, paths: list[str], runtime: Path, root: Path = Path("/")) -> World:
        """Return a machine with the given folders and runtime folder."""
        daemon = Daemon(runtime)
        return cls(
            folders=tuple(Folder(path=path, root=root, daemon=daemon) for path in paths), daemon=daemon, root=root
        )

    def read(self, name: str) -> str | None:
        """Return the stripped text of a file below `root`, or None if it cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def own(self, name: str) -> str:
        """Return the value of a field in /proc/self/status, or an empty string."""
        found = re.search(rf"^{name}:\s*(.*)$", self.read("proc/self/status") or "", re.MULTILINE)
        return found[1] if found else ""


@contextmanager
def _unheard(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
