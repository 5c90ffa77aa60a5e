"""A faked machine for `infinity doctor` to look at."""

from __future__ import annotations

from pathlib import Path

from infinity_tools.doctor.finding import Check, Finding
from infinity_tools.doctor.world import World

GIB = 1 << 30
MEMINFO = "MemTotal: {total} kB\nMemAvailable: {available} kB\nSwapTotal: {swap} kB\nSwapFree: {free} kB\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


class Machine:
    """The files of a kernel, in a folder; by default of a good machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory()
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/self/mountinfo", f"23 1 254:0 / / rw - ext4 /dev/root rw\n{V2_MOUNT}")
        self.write("proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\nTHP_enabled:\t1\n")
        self.write("proc/self/uid_map", "0 0 4294967295\n")
        self.write("proc/cpuinfo", "flags : fpu avx512_bf16\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        (root / "sys/devices/system/node/node0").mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        """Plant a file."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def memory(self, total: int = 64 * GIB, available: int = 60 * GIB, swap: int = 0, free: int = 0) -> None:
        """Plant what memory there is."""
        kib = {"total": total >> 10, "available": available >> 10, "swap": swap >> 10, "free": free >> 10}
        self.write("proc/meminfo", MEMINFO.format(**kib))

    def group(self, **values: str) -> None:
        """Plant the limits of the only control group, with `_` for the dot in names."""
        for name, text in values.items():
            self.write(f"sys/fs/cgroup/{name.replace('_', '.')}", text)

    def drive(self, name: str, rotational: int = 0, model: str = "") -> None:
        """Plant a drive."""
        self.write(f"sys/class/block/{name}/queue/rotational", f"{rotational}\n")
        self.write(f"sys/class/block/{name}/device/model", f"{model}\n")

    def look(self, check: Check[World]) -> Finding:
        """Return what a check finds in it."""
        return check.look(World.of([], self.root / "runtime", self.root))


def is_(found: Finding, status: str, says: str = "", fix: str = "") -> bool:
    """Whether a finding is such, with a fix where it is not ok; else it is shown."""
    assert found.status == status, found
    assert says in found.value, found
    assert fix in found.fix, found
    assert bool(found.fix) == (status != "ok"), found
    return True
