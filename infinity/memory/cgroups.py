"""The control groups that this process is in, as far as it sees them.

Every group from the process's own up to the root has limits of its own, and all of them hold. A container sees the part
of the tree that is mounted in it; the tree's path in /proc/self/cgroup may begin above that.
"""

from __future__ import annotations

import math
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
        own = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
        mounts = _lines(root / "proc/self/mountinfo")
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


def cores_of_groups(root: Path = Path("/")) -> float:
    """Return how many cores' time the control groups of this process leave it; infinity where they set no limit.

    Args:
        root: where `proc` and everything that is mounted lie.
    """
    least = math.inf
    for version, folder in groups("cpu", root):
        try:
            if version == 2:
                time, period = (folder / "cpu.max").read_text().split()
            else:
                time = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(time) > 0:
                least = min(least, int(time) / int(period))
        except (OSError, ValueError):  # no limit ("max"), or the root
            continue
    return least


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="surrogateescape").splitlines()  # names of any bytes, as `os` has them


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
