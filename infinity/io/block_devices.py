"""Which drive and which file system a folder is on, and what the kernel tells about them.

Everything comes from ``stat``, ``statvfs``, ``/proc/self/mountinfo`` and sysfs; no root is needed.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
_SECTOR_BYTES: Final = 512  # the FSDP module of /sys/class/block/*/stat, whatever the drive's own sector is
_PER_SECOND: Final = 1000  # milliseconds, in which that file counts time
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A whole block device. `name` is the kernel's; `identity` survives renumbering where there is one."""

    name: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a folder is: its drive, and the number of its file system (`st_dev`), which may be in memory."""

    path: str
    drive: Drive
    file_system: int
    in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system, as the kernel lists it."""

    point: str
    """Where it is mounted."""
    kind: str
    """Its type, such as ``ext4``; ``none`` where nothing is known."""
    source: str
    """The device, or what its type takes for one."""
    options: str
    """Of the mount and of the file system, separated by commas."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Bytes of a file system: in all, and free to users."""

    capacity: int
    free: int


@dataclass(frozen=True, kw_only=True)
class DriveCounters:
    """What went over a drive since boot."""

    read: int
    """Bytes."""
    written: int
    """Bytes."""
    reads: int
    """Requests that completed, as the kernel passed them on: it merges neighbours, and splits large ones."""
    writes: int
    """The same of writes."""
    read_seconds: float
    """Sum of what each read took, from when it was queued until it completed."""
    write_seconds: float
    """Sum of what each write took."""
    busy_seconds: float
    """In which at least one request was under way."""


def locate(path: str, sysfs: Path = SYSFS) -> Place:
    """Return where a folder is.

    A partition counts as its drive; a file system without a block device (tmpfs, overlay, NFS) gets the
    name of its type and number.

    Raises:
        OSError: the folder is missing or may not be looked at.
    """
    number = os.stat(path).st_dev
    name, kind = _block_name(number, sysfs), ""
    if name is None:
        mount = mount_of(path)
        kind = mount.kind
        name = _block_name(_block_number(mount.source), sysfs) or f"{kind}-{os.minor(number)}"
    return Place(
        path=path,
        drive=Drive(name=name, identity=_identity(name, sysfs)),
        file_system=number,
        in_memory=kind in _IN_MEMORY,
    )


def mount_of(path: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount:
    """Return the file system that a folder is in. Raises OSError."""
    target = Path(path).resolve()
    best, answer = -1, Mount(point="/", kind="none", source="", options="")
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():  # names of any bytes, as os has them
        before, _, after = line.partition(" - ")
        _, _, _, _, mounted, options, *_ = before.split()
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), mounted))
        # >= : of two mounts on one point the later one is on top
        if target.is_relative_to(point) and len(point.parts) >= best:
            kind, source, *more = after.split(" ", 2)
            best = len(point.parts)
            answer = Mount(point=str(point), kind=kind, source=source, options=",".join([options, *more]))
    return answer


def space(path: str) -> Space:
    """Return the bytes of the file system of a folder. Raises OSError."""
    found = os.statvfs(path)
    return Space(capacity=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail)


def counters(drive: Drive, sysfs: Path = SYSFS) -> DriveCounters | None:
    """Return what went over a drive, or None if the kernel does not count it."""
    try:
        fields = (sysfs / "class/block" / drive.name / "stat").read_text().split()
        reads, _, read, reading, writes, _, written, writing, _, busy = map(int, fields[:10])
    except (OSError, ValueError):
        return None
    return DriveCounters(
        read=read * _SECTOR_BYTES,
        written=written * _SECTOR_BYTES,
        reads=reads,
        writes=writes,
        read_seconds=reading / _PER_SECOND,
        write_seconds=writing / _PER_SECOND,
        busy_seconds=busy / _PER_SECOND,
    )


def wear_ratio(drive: Drive, sysfs: Path = SYSFS) -> float | None:
    """Return the share of its rated life that a drive has used, or None if sysfs does not tell.

    Today's kernels tell it only for eMMC (``life_time``: two numbers in steps of a tenth, 1 = up to a
    tenth); the health log of an NVMe drive needs root.
    """
    try:
        steps = [
            int(field, 16) for field in (sysfs / "class/block" / drive.name / "device/life_time").read_text().split()
        ]
    except (OSError, ValueError):
        return None
    known = [step for step in steps if 1 <= step <= 11]
    return max(known) / 10 if known else None


def _block_name(number: int, sysfs: Path) -> str | None:
    """Return the drive of a device number; None for an anonymous one (tmpfs, overlay, btrfs: major 0)."""
    try:
        folder = (sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    return folder.parent.name if (folder / "partition").exists() else folder.name


def _block_number(source: str) -> int:
    try:
        found = os.stat(source)
    except (OSError, ValueError):
        return 0
    return found.st_rdev if stat.S_ISBLK(found.st_mode) else 0


def _identity(name: str, sysfs: Path) -> str:
    for attribute in ("wwid", "device/wwid", "device/serial"):
        try:
            text = (sysfs / "class/block" / name / attribute).read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return name
