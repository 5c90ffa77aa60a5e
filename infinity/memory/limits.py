"""How much memory this process may still take: of the machine, and of the control groups that it is in.

[Note: control groups] In a container, in a job of Slurm or in a unit of systemd the kernel kills who goes beyond the
limit of the group, however much memory the machine has. Every group from the process's own up to the root has a limit
of its own, and all of them hold. What counts as used is what is charged to a group less `inactive_file`: files that
were read or written stay in memory, charged, until somebody needs it. A container sees the part of the tree that is
mounted in it; the tree's path in /proc/self/cgroup may begin above that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infinity.units import KIB


@dataclass(frozen=True)
class _Version:
    """The names of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")  # above `high` it is slowed to a crawl


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take. [Note: control groups]

    Args:
        root: where `proc` and everything that is mounted lie.

    Raises:
        OSError, ValueError: the kernel does not say what the machine has.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    available = meminfo["MemAvailable:"] * KIB
    for version, group in _groups(root):
        try:
            used = _number(group / version.usage)
            used -= min(used, _numbers((group / "memory.stat").read_text()).get(version.inactive, 0))
        except (OSError, ValueError):  # the root of version 2 has none of these
            continue
        for name in version.limits:
            try:
                limit = _number(group / name)
            except (OSError, ValueError):  # "max", or a kernel without it
                continue
            available = min(available, max(0, limit - used))
    return available


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Yield the folders of the groups that this process is in, as far as they are mounted."""
    try:
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in own:
        version = _V2 if number == "0" and not controllers else _V1
        if version is _V1 and "memory" not in controllers.split(","):
            continue
        for line in mounts:
            about, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            if kind != ("cgroup" if version is _V1 else "cgroup2"):
                continue
            if version is _V1 and "memory" not in options.split(","):
                continue
            _, _, _, mounted, point, *_ = map(_unescaped, about.split(" "))
            try:
                inner = PurePosixPath(path).relative_to(mounted)
            except ValueError:
                inner = PurePosixPath("..")
            if ".." in inner.parts:  # it is not below what is mounted, or that has another name here
                inner = PurePosixPath()
            for folder in (inner, *inner.parents):
                yield version, root / point.lstrip("/") / folder


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _number(file: Path) -> int:
    return int(file.read_text())


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines that are a name and a number."""
    fields = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in fields if len(words) > 1}
