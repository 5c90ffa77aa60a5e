"""Tests of the available memory: the machine's memory limited by control groups of version 1 or 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.io.block_devices import mount_of
from infinity.memory.limits import available_memory

GIB = 1 << 30
MACHINE = 64 * GIB
UNLIMITED = 9223372036854771712
"""Value of a version 1 limit that is not set."""
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


class Machine:
    """Files of a machine in a folder, whose memory controller is of version 1 or 2."""

    def __init__(self, folder: Path, version: int, group: str, mounted: str = "/") -> None:
        self.folder, self._version = folder, version
        self._write(
            "proc/meminfo", f"MemTotal: {2 * MACHINE >> 10} kB\nMemAvailable: {MACHINE >> 10} kB\nHugePages: 0\n"
        )
        unified = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
        mounts = (V1_MOUNT.format(root=mounted), unified) if version == 1 else (V2_MOUNT.format(root=mounted),)
        cgroup = f"9:name=systemd:/\n4:cpu,memory:{group}\n3:cpuset:/\n0::/\n" if version == 1 else f"0::{group}\n"
        self._write("proc/self/cgroup", cgroup)
        self._write("proc/self/mountinfo", "\n".join(("23 1 254:0 / / rw - ext4 /dev/root rw", *mounts)) + "\n")

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add(self, group: str, limit: int, usage: int = 0, inactive: int = 0, high: int = 0) -> None:
        """Create a group with sizes in GiB, 0 for no limit; in version 1, only hierarchical statistics are valid."""
        if self._version == 1:
            values = {
                "limit_in_bytes": limit * GIB or UNLIMITED,
                "usage_in_bytes": usage * GIB,
                "stat": f"cache 5\ninactive_file 0\ntotal_inactive_file {inactive * GIB}",
            }
        else:
            values = {
                "max": limit * GIB or "max",
                "high": high * GIB or "max",
                "current": usage * GIB,
                "stat": f"anon 5\ninactive_file {inactive * GIB}",
            }
        place = f"sys/fs/cgroup/{'memory/' if self._version == 1 else ''}{group}"
        for name, value in values.items():
            self._write(f"{place}/memory.{name}", f"{value}\n")

    @property
    def available(self) -> int:
        """Available memory that is found."""
        return available_memory(self.folder)


Groups = dict[str, tuple[int, ...]]
STEP = "/slice/job/step"
CASES: dict[str, tuple[int, str, str, Groups, int]] = {
    "limit minus usage, as in a container whose group is the root": (2, "/", "/", {"": (4, 1)}, 3),
    "group of the controller among several": (1, "/job", "/", {"": (0, 20), "job": (4, 1)}, 3),
    "inactive page cache, which can be reclaimed": (2, "/", "/", {"": (4, 4, 3)}, 3),
    "inactive page cache in version 1": (1, "/", "/", {"": (4, 4, 3)}, 3),
    "no limit": (2, "/a", "/", {"a": (0, 1)}, 64),
    "no limit in version 1": (1, "/a", "/", {"a": (0, 1)}, 64),
    "tightest group": (2, STEP, "/", {"slice": (8, 1), "slice/job": (0, 1), "slice/job/step": (2, 1)}, 1),
    "tightest ancestor": (2, STEP, "/", {"slice": (2, 1), "slice/job": (0, 1), "slice/job/step": (9, 1)}, 1),
    "tightest ancestor in version 1": (
        1,
        STEP,
        "/",
        {"slice": (8, 1), "slice/job": (2, 1), "slice/job/step": (9, 1)},
        1,
    ),
    "usage of sibling groups": (2, "/job/step", "/", {"job": (10, 9), "job/step": (10, 1)}, 1),
    "memory.high, beyond which processes are slowed down": (2, "/a", "/", {"a": (0, 1, 0, 3)}, 2),
    "limit that was lowered below the usage": (2, "/a", "/", {"a": (1, 2)}, 0),
    "mounted part of the hierarchy": (1, "/docker/abc", "/docker/abc", {"": (2,), "inner": (3,)}, 2),
    "group in the mounted part": (1, "/docker/abc/inner", "/docker/abc", {"": (2,), "inner": (3,)}, 2),
    "mount outside the visible hierarchy": (2, "/", "/..", {"": (2,)}, 2),
    "group outside the visible hierarchy": (2, "/../other", "/", {"": (2,)}, 2),
    "removed group": (2, "/gone (deleted)", "/", {"": (2,)}, 2),
    "mount with another name": (2, "/a", "/b", {"": (2,)}, 2),
    "colon in the path, and an encoded space": (2, "/a:b c", "/a:b\\040c", {"": (2,)}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_available_memory_is_limited_by_groups(case: str, tmp_path: Path) -> None:
    version, group, mounted, groups, available = CASES[case]
    machine = Machine(tmp_path, version, group, mounted)
    for name, sizes in groups.items():
        machine.add(name, *sizes)
    assert machine.available == available * GIB


def test_machine_memory_is_available_without_groups(tmp_path: Path) -> None:
    """The process has no control group, or the kernel does not support control groups."""
    machine = Machine(tmp_path, 2, "/")
    (tmp_path / "proc/self/cgroup").write_text("")
    assert machine.available == MACHINE
    (tmp_path / "proc/self/cgroup").unlink()
    assert machine.available == MACHINE


def test_mount_name_that_is_not_utf8_is_ignored(tmp_path: Path) -> None:
    """The control groups and the drive of a folder are still found."""
    machine = Machine(tmp_path, 2, "/")
    machine.add("", 4, 1)
    file = tmp_path / "proc/self/mountinfo"
    file.write_bytes(file.read_bytes() + b"99 1 254:9 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n")
    assert machine.available == 3 * GIB
    assert mount_of("/mnt/elsewhere", file).kind == "ext4"


def test_invalid_limits_are_ignored(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, "/a")
    machine.add("", 2)
    machine.add("a", 1)
    for name, text in (("max", "soon"), ("current", "")):
        (tmp_path / f"sys/fs/cgroup/a/memory.{name}").write_text(text)
    assert machine.available == 2 * GIB
