"""Simulated machine for tests of `infinity doctor`."""

from __future__ import annotations

from pathlib import Path

from infinity_tools.doctor.finding import Check, Finding
from infinity_tools.doctor.world import World

GIB = 1 << 30
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def meminfo_text(available: int = 60 * GIB, swap: int = 0, free: int = 0) -> str:
    """Return the text of /proc/meminfo of a machine with 64 GiB of memory."""
    sizes = {"MemTotal": 64 * GIB, "MemAvailable": available, "SwapTotal": swap, "SwapFree": free}
    return "".join(f"{name}: {size >> 10} kB\n" for name, size in sizes.items())


class Machine:
    """The /proc and /sys files of a machine, in a folder. By default, all checks succeed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", meminfo_text())
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/self/mountinfo", f"23 1 254:0 / / rw - ext4 /dev/root rw\n{V2_MOUNT}")
        self.write("proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\nTHP_enabled:\t1\n")
        self.write("proc/self/uid_map", "0 0 4294967295\n")
        self.write("proc/cpuinfo", "flags : fpu avx512_bf16\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        (root / "sys/devices/system/node/node0").mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, **values: str) -> None:
        """Write limits of the only control group; `_` in a name stands for a dot."""
        for name, text in values.items():
            self.write(f"sys/fs/cgroup/{name.replace('_', '.')}", text)

    def drive(self, name: str, rotational: int = 0, model: str = "") -> None:
        """Write the files of a drive."""
        self.write(f"sys/class/block/{name}/queue/rotational", f"{rotational}\n")
        self.write(f"sys/class/block/{name}/device/model", f"{model}\n")

    def look(self, check: Check[World]) -> Finding:
        """Return the finding of a check on this machine."""
        return check.look(World.of([], self.root / "runtime", self.root))


def matches(found: Finding, status: str, says: str = "", fix: str = "") -> bool:
    """Assert the status of a finding and parts of its value and fix. Only findings that are not ok have a fix."""
    assert found.status == status, found
    assert says in found.value, found
    assert fix in found.fix, found
    assert bool(found.fix) == (status != "ok"), found
    return True
