"""Limits by control groups (version 1, as root): the least memory in which a system trains, and slower drives."""

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
    """Return why memory cannot be limited here; empty where it can."""
    if not (MEMORY / "memory.limit_in_bytes").exists():
        return "no memory controller of cgroup v1"
    return "" if os.access(MEMORY, os.W_OK) else "control groups may not be made (root only)"


@contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """Make a group with a limit; yield the words that start a command in it. Swap is not used."""
    group = MEMORY / f"infinity-peers-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "memory.swappiness").write_text("0")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def smallest(trains: Callable[[list[str]], bool], most: int, step: int = 64 * MIB) -> int | None:
    """Return the least limit, a multiple of `step`, under which `trains` is true; None if it is not under `most`."""
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
    """Let this process and what it starts read, and write, at most so many bytes per second on the drive of a folder.

    Raises:
        OSError: there is no block controller of version 1, or groups may not be made.
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
