"""Limits with control groups (version 1, as root): the smallest memory in which a system trains, and slower drives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.io.block_devices import locate

MEMORY = Path("/sys/fs/cgroup/memory")
BLKIO = Path("/sys/fs/cgroup/blkio")
MIB = 1 << 20


def why_not() -> str:
    """Return the reason why memory cannot be limited on this machine, or an empty string if it can."""
    if not (MEMORY / "memory.limit_in_bytes").exists():
        return "the memory controller of cgroup v1 is not available"
    return "" if os.access(MEMORY, os.W_OK) else "control groups can only be created by root"


@contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """Create a memory control group without swap; yield the command prefix that starts a process in it."""
    group = MEMORY / f"infinity-peers-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "memory.swappiness").write_text("0")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def smallest(trains: Callable[[list[str]], bool], most: int, step: int = 64 * MIB) -> int | None:
    """Return the smallest memory limit under which `trains` succeeds.

    Args:
        trains: Function that trains with a command prefix and returns whether it succeeded.
        most: Largest limit, in bytes.
        step: Resolution, in bytes.

    Returns:
        A multiple of `step`, in bytes; None if training does not succeed with the largest limit.
    """
    low, high = 0, -(-most // step)
    with limited(high * step) as within:
        if not trains(within):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        with limited(middle * step) as within:
            low, high = (low, middle) if trains(within) else (middle, high)
    return high * step


@contextmanager
def slow_drive(folder: Path, rate: int) -> Iterator[None]:
    """Limit the bandwidth of the drive of a folder, for this process and its children.

    Args:
        folder: A folder on the drive.
        rate: Limit in bytes per second, for reads and for writes.

    Raises:
        OSError: if the block controller of version 1 is not available, or the process may not create groups.
    """
    drive = Path(f"/sys/class/block/{locate(str(folder)).drive.name}/dev").read_text().strip()
    group = BLKIO / f"infinity-peers-{os.getpid()}"
    group.mkdir()
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{drive} {rate}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
