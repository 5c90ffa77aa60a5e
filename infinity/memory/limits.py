"""Memory limits: the amount of memory that this process can still allocate, given the machine and its control groups.

[Note: control groups] In a container, a Slurm job or a systemd unit, the operating system kills a process when its
control group or an enclosing group exceeds its memory limit, even if the machine has free memory (`cgroups.py`). The
usage of a group is the memory charged to the group minus `inactive_file`, which is cached file data that stays charged
only until the memory is needed.

The argument `root` of functions is the folder that contains `proc` and all mount points.
"""

from __future__ import annotations

from pathlib import Path

from infinity.memory.cgroups import groups
from infinity.units import GIB, KIB

_MARGIN_BYTES, _MARGIN_PARTS = GIB, 10
"""Device memory to leave free: either this number of bytes, or 1/N of the total, whichever is larger."""


_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),  # above `high`, processes are throttled
}
"""Names of the limits and of the usage, and the key in memory.stat, by version of the cgroup interface."""


def device_margin(total: int) -> int:
    """Return the number of bytes of device memory that optional buffers must leave free for longer steps.

    Args:
        total: Total device memory in bytes.
    """
    return max(_MARGIN_BYTES, total // _MARGIN_PARTS)


def available_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process can still allocate. [Note: control groups]

    Raises:
        OSError: if /proc/meminfo cannot be read.
        ValueError: if /proc/meminfo is malformed.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    available = meminfo["MemAvailable:"] * KIB
    for number, group in groups("memory", root):
        limits, usage, inactive = _FILES[number]
        try:
            used = _number(group / usage)
            used -= min(used, _numbers((group / "memory.stat").read_text()).get(inactive, 0))
        except (OSError, ValueError):  # the root group of version 2 does not have these files
            continue
        for name in limits:
            try:
                limit = _number(group / name)
            except (OSError, ValueError):  # the value is "max", or the file does not exist
                continue
            available = min(available, max(0, limit - used))
    return available


def default_host_cache(local_ranks: int, root: Path = Path("/")) -> int:
    """Return the default of `memory.host_bytes`: the size in bytes of the host cache of each rank on this node.

    Args:
        local_ranks: Number of ranks on this node.

    Raises:
        OSError, ValueError: in the same cases as `available_memory`.
    """
    return available_memory(root) // 4 // local_ranks


def _number(file: Path) -> int:
    return int(file.read_text())


def _numbers(text: str) -> dict[str, int]:
    fields = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in fields if len(words) > 1}
