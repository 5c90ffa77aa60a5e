"""What checks look at: a machine, and folders on it."""

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
from infinity.io.alignment import AlignedFile, open_aligned


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that may be in `storage.paths`."""

    path: str
    """As it was given."""
    root: Path = Path("/")
    """Where `proc` and `sys` lie."""
    daemon: Daemon
    """The node's."""

    @property
    def exists(self) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(self.path)

    @property
    def place(self) -> str:
        """The folder; where it is still to be made, the one that it lies in."""
        return self.path if self.exists else os.path.dirname(os.path.abspath(self.path))

    @contextmanager
    def trial(self) -> Iterator[AlignedFile]:
        """Yield a new file in it, opened as engines do, which has no name any more. Raises OSError."""
        descriptor, name = tempfile.mkstemp(prefix=".infinity-doctor-", dir=self.place)
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
    """What the node's daemon answers; each question is asked once."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        """Its folder."""
        self._node = NodeDaemon(runtime)

    @cached_property
    def status(self) -> dict[str, Any] | None:
        """What it knows of the node; None: none of this user or root answers."""
        with _unheard("infinity"):  # that it is another user's is a finding
            return self._node.ask("status")

    def bandwidth(self, path: str) -> dict[str, Any] | None:
        """Return the profile of the drive of a folder; None: it was not measured, or nobody knows."""
        if self.status is None:
            return None
        name = str(Path(path).resolve())
        found = (self._node.ask("bandwidth", paths=[name]) or {}).get("bandwidth")
        profile = found.get(name) if isinstance(found, dict) else None
        return profile if isinstance(profile, dict) else None


@dataclass(frozen=True, kw_only=True)
class World:
    """A machine, as this process sees it."""

    folders: tuple[Folder, ...]
    """Those that the state may lie in."""
    daemon: Daemon
    """The node's."""
    root: Path = Path("/")
    """Where `proc`, `sys` and `dev` lie."""

    @classmethod
    def of(cls, paths: list[str], runtime: Path, root: Path = Path("/")) -> World:
        """Return what there is to look at, for folders and the daemon of a runtime folder."""
        daemon = Daemon(runtime)
        return cls(
            folders=tuple(Folder(path=path, root=root, daemon=daemon) for path in paths), daemon=daemon, root=root
        )

    def read(self, name: str) -> str | None:
        """Return the text of a file of the kernel, stripped; None where there is none."""
        try:
            return (self.root / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def own(self, name: str) -> str:
        """Return what /proc/self/status says under a name; nothing where it does not."""
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
