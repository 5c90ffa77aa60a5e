"""How much memory this process may still take: of the machine, and of the control groups that it is in.

[Note: control groups] In a container, in a job of Slurm or in an FSDP module of systemd the kernel kills who goes
beyond the
limit of the group, however much memory the machine has; of the groups around it, too (`groups.py`). What counts as used
is what is charged to a group less `inactive_file`: files that were read or written stay in memory, charged, until
somebody needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.memory.cgroups import groups
from infinity.units import GIB, KIB

_MARGIN_BYTES, _MARGIN_PARTS = GIB, 10
"""What stays free of a device's memory: so much, or one of so many parts of all."""


@dataclass(frozen=True)
class _Version:
    """The names of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")  # above `high` it is slowed to a crawl


def device_margin(total: int) -> int:
    """Return how much of a device's memory stays free of what only saves time, in bytes: longer steps may need it.

    Args:
        total: bytes that it has.
    """
    return max(_MARGIN_BYTES, total // _MARGIN_PARTS)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take. [Note: control groups]

    Args:
        root: where `proc` and everything that is mounted lie.

    Raises:
        OSError, ValueError: the kernel does not say what the machine has.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    available = meminfo["MemAvailable:"] * KIB
    for number, group in groups("memory", root):
        version = _V1 if number == 1 else _V2
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


def default_host_cache(local_ranks: int, root: Path = Path("/")) -> int:
    """Return the bytes of the host cache of each rank of this node where `memory.host_bytes` is not set.

    Raises:
        OSError, ValueError: as `available_memory`.
    """
    return available_memory(root) // 4 // local_ranks


def _number(file: Path) -> int:
    return int(file.read_text())


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines that are a name and a number."""
    fields = [line.split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in fields if len(words) > 1}
