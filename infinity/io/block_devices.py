"""Drives and file systems of folders, with their properties and the kernel's I/O statistics.

All information comes from ``stat``, ``statvfs``, ``/proc/self/mountinfo`` and sysfs, none of which requires root.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
_SECTOR_BYTES: Final = 512  # unit of /sys/class/block/*/stat, regardless of the sector size of the drive
_PER_SECOND: Final = 1000  # times in that file are in milliseconds
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Block device.

    `name` is assigned by the kernel and may change. `identity` does not change if the drive reports an identifier;
    otherwise it is the name.
    """

    name: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Location of a folder: its drive, and the number of its file system (`st_dev`), which may be in memory."""

    path: str
    drive: Drive
    file_system: int
    in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Mounted file system."""

    point: str
    """Mount point."""
    kind: str
    """File system type, for example ``ext4``; ``none`` if unknown."""
    source: str
    """Device, or its equivalent for this type of file system."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Capacity of a file system, and the space available to users, in bytes."""

    capacity: int
    free: int


@dataclass(frozen=True, kw_only=True)
class DriveCounters:
    """I/O statistics of a drive since boot."""

    read: int
    """Number of bytes read."""
    written: int
    """Number of bytes written."""
    reads: int
    """Number of completed reads as issued by the kernel, which merges adjacent requests and splits large ones."""
    writes: int
    """Number of completed writes."""
    read_seconds: float
    """Total duration of all reads in seconds, each measured from queueing to completion."""
    write_seconds: float
    """Total duration of all writes in seconds."""
    busy_seconds: float
    """Time, in seconds, during which at least one request was in flight."""


def locate(path: str, sysfs: Path = SYSFS) -> Place:
    """Return the location of a folder.

    A partition counts as its drive. A file system without a block device (tmpfs, overlay, NFS) is represented by a
    drive that is named after the type and number of the file system.

    Raises:
        OSError: if the folder does not exist or is not accessible.
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
    """Return the mounted file system that contains a folder. Raises `OSError`."""
    target = Path(path).resolve()
    best, answer = -1, Mount(point="/", kind="none", source="")
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():  # names may contain any bytes
        before, _, after = line.partition(" - ")
        mounted = before.split()[4]
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), mounted))
        # >= because only the later one of two mounts on the same mount point is visible.
        if target.is_relative_to(point) and len(point.parts) >= best:
            kind, source, *_ = after.split(" ", 2)
            best = len(point.parts)
            answer = Mount(point=str(point), kind=kind, source=source)
    return answer


def space(path: str) -> Space:
    """Return the capacity and free space of a folder's file system. Raises `OSError`."""
    found = os.statvfs(path)
    return Space(capacity=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail)


def counters(drive: Drive, sysfs: Path = SYSFS) -> DriveCounters | None:
    """Return the I/O statistics of a drive, or ``None`` if the kernel keeps none."""
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


def _block_name(number: int, sysfs: Path) -> str | None:
    """Return the drive for a device number, or ``None`` if there is none (tmpfs, overlay, btrfs: major 0)."""
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
