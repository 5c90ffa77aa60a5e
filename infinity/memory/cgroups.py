"""Control groups (cgroups) of this process, as far as the process can see them.

Each group from the process's own group up to the root has limits, and all of them apply. A container sees only the part
of the hierarchy that is mounted in it, and the path in /proc/self/cgroup may start above this part.

The argument `root` of functions is the folder that contains `proc` and all mount points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Group(NamedTuple):
    """Control group that is visible to this process."""

    version: int
    """Version of the cgroup interface, 1 or 2. File names differ between versions."""
    folder: Path
    """Folder that contains the files of the group."""


def groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """Yield the control groups whose limits on a resource apply to this process, starting with its own group.

    Args:
        controller: Name of the resource controller in version 1, for example ``memory`` or ``cpu``.
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
            if ".." in inner.parts:  # outside the mounted part, or the mount uses a different name
                inner = PurePosixPath()
            for folder in (inner, *inner.parents):
                yield Group(version, root / point.lstrip("/") / folder)


def cores_of_groups(root: Path = Path("/")) -> float:
    """Return the number of CPU cores that the control groups allow this process, or infinity if there is no limit."""
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
        except (OSError, ValueError):  # no limit ("max"), or the root group, which has no such file
            continue
    return least


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="surrogateescape").splitlines()  # names may contain any bytes, as in `os`


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
