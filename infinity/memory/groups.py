"""The control groups that this process is in, as far as it sees them.

Every group from the process's own up to the root has limits of its own, and all of them hold. A container sees the part
of the tree that is mounted in it; the tree's path in /proc/self/cgroup may begin above that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Group(NamedTuple):
    """One group."""

    version: int
    """1 or 2: the files in it have other names."""
    folder: Path
    """Where it is mounted."""


def groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """Yield the groups whose limits on a resource hold for this process, its own first.

    Args:
        controller: the resource, as version 1 calls it: ``memory``, ``cpu``.
        root: where `proc` and everything that is mounted lie.
    """
    try:
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in own:
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for line in mounts:
            about, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            if kind != ("cgroup" if version == 1 else "cgroup2"):
                continue
            if version == 1 and controller not in options.split(","):
                continue
            _, _, _, mounted, point, *_ = map(_unescaped, about.split(" "))
            try:
                inner = PurePosixPath(path).relative_to(mounted)
            except ValueError:
                inner = PurePosixPath("..")
            if ".." in inner.parts:  # it is not below what is mounted, or that has another name here
                inner = PurePosixPath()
            for folder in (inner, *inner.parents):
                yield Group(version, root / point.lstrip("/") / folder)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
