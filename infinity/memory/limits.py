"""Limits on memory: how much this process can still allocate, given the machine and its control groups.

[Note: control groups] In a container, a Slurm job or a systemd unit, the kernel kills a process when its control group
or an enclosing group exceeds its limit, however much memory the machine has (`cgroups.py`). Usage is the memory charged
to a group less `inactive_file`. The latter consists of cached file data, which stay charged until the memory is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.memory.cgroups import groups
from infinity.units import GIB, KIB

_MARGIN_BYTES, _MARGIN_PARTS = GIB, 10
"""Device memory that stays free: the larger of a number of bytes and a fraction of the total (1/N)."""


@dataclass(frozen=True)
class _Version:
    """File names of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(
    ("memory.max", "memory.high"), "memory.current", "inactive_file"
)  # above `high`, processes are throttled


def device_margin(total: int) -> int:
    """Return the device memory that optional buffers must leave free in bytes, because longer steps may need it.

    Args:
        total: Total device memory in bytes.
    """
    return max(_MARGIN_BYTES, total // _MARGIN_PARTS)


def available_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process can still allocate. [Note: control groups]

    Args:
        root: Folder that contains `proc` and all mount points.

    Raises:
        OSError: if the kernel does not report the memory of the machine.
        ValueError: if its report is malformed.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    available = meminfo["MemAvailable:"] * KIB
    for number, group in groups("memory", root):
        version = _V1 if number == 1 else _V2
        try:
            used = _number(group / version.usage)
            used -= min(used, _numbers((group / "memory.stat").read_text()).get(version.inactive, 0))
        except (OSError, ValueError):  # the root group of version 2 has none of these files
            continue
        for name in version.limits:
            try:
                limit = _number(group / name)
            except (OSError, ValueError):  # "max", or a kernel without this file
                continue
            available = min(available, max(0, limit - used))
    return available


def default_host_cache(local_ranks: int, root: Path = Path("/")) -> int:
    """Return the default for `memory.host_bytes`: the size of the host cache of each rank of this node, in bytes.

    Args:
        local_ranks: Number of ranks on this node.
        root: Folder that contains `proc` and all mount points.

    Raises:
        OSError, ValueError: like `available_memory`.
    """
    return available_memory(root) // 4 // local_ranks


def _number(file: Path) -> int:
    return int(file.read_text())


def _numbers(text: str) -> dict[str, int]:
    """Parse lines that consist of a name and a number."""
    fields = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in fields if len(words) > 1}
