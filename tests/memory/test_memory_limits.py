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
    """Files of a machine in a folder."""

    def __init__(self, folder: Path, cgroup: str, *mounts: str) -> None:
        self.folder = folder
        self._write(
            "proc/meminfo", f"MemTotal: {2 * MACHINE >> 10} kB\nMemAvailable: {MACHINE >> 10} kB\nHugePages: 0\n"
        )
        self._write("proc/self/cgroup", cgroup)
        self._write("proc/self/mountinfo", "\n".join(("23 1 254:0 / / rw - ext4 /dev/root rw", *mounts)) + "\n")

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v1(self, group: str, limit: int, usage: int = 0, inactive: int = 0) -> None:
        """Create a version 1 group; only its hierarchical statistics contain inactive files."""
        place = f"sys/fs/cgroup/memory/{group}"
        self._write(f"{place}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{place}/memory.usage_in_bytes", f"{usage}\n")
        self._write(f"{place}/memory.stat", f"cache 5\ninactive_file 0\ntotal_inactive_file {inactive}\n")

    def v2(self, group: str, limit: int | str, usage: int = 0, inactive: int = 0, high: int | str = "max") -> None:
        """Create a version 2 group."""
        place = f"sys/fs/cgroup/{group}"
        self._write(f"{place}/memory.max", f"{limit}\n")
        self._write(f"{place}/memory.high", f"{high}\n")
        self._write(f"{place}/memory.current", f"{usage}\n")
        self._write(f"{place}/memory.stat", f"anon 5\ninactive_file {inactive}\n")

    @property
    def available(self) -> int:
        """Available memory that is found."""
        return available_memory(self.folder)


def v2_machine(folder: Path, group: str, mounted: str = "/") -> Machine:
    """Return a machine with version 2 only."""
    return Machine(folder, f"0::{group}\n", V2_MOUNT.format(root=mounted))


def v1_machine(folder: Path, group: str, mounted: str = "/") -> Machine:
    """Return a machine whose memory controller is version 1, with an empty version 2 hierarchy."""
    cgroup = f"9:name=systemd:/\n4:cpu,memory:{group}\n3:cpuset:/\n0::/\n"
    unified = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    return Machine(folder, cgroup, V1_MOUNT.format(root=mounted), unified)


def test_machine_memory_is_available_without_groups(tmp_path: Path) -> None:
    """No control group file system is mounted, or the kernel does not support control groups."""
    assert Machine(tmp_path, "").available == MACHINE
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(tmp_path) == MACHINE


def test_v2_limit_minus_usage_is_available(tmp_path: Path) -> None:
    """As in a container, the process's group is the root of the visible hierarchy."""
    machine = v2_machine(tmp_path, "/")
    machine.v2("", 4 * GIB, usage=GIB)
    assert machine.available == 3 * GIB


def test_mount_name_that_is_not_utf8_is_ignored(tmp_path: Path) -> None:
    """The control groups and the drive of a folder are still found."""
    machine = v2_machine(tmp_path, "/")
    machine.v2("", 4 * GIB, usage=GIB)
    file = tmp_path / "proc/self/mountinfo"
    file.write_bytes(file.read_bytes() + b"99 1 254:9 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n")
    assert machine.available == 3 * GIB
    assert mount_of("/mnt/elsewhere", file).kind == "ext4"


def test_v1_limit_minus_usage_is_available(tmp_path: Path) -> None:
    """The group is found by the name of its controller among several, in the mount of that controller."""
    machine = v1_machine(tmp_path, "/job")
    machine.v1("", UNLIMITED, usage=20 * GIB)
    machine.v1("job", 4 * GIB, usage=GIB)
    assert machine.available == 3 * GIB


def test_inactive_page_cache_counts_as_available(tmp_path: Path) -> None:
    """A container that has read a large file has used its entire limit, but most of it can be reclaimed."""
    machine = v2_machine(tmp_path / "2", "/")
    machine.v2("", 4 * GIB, usage=4 * GIB, inactive=3 * GIB)
    assert machine.available == 3 * GIB
    machine = v1_machine(tmp_path / "1", "/")
    machine.v1("", 4 * GIB, usage=4 * GIB, inactive=3 * GIB)
    assert machine.available == 3 * GIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED])
def test_machine_memory_is_available_in_unlimited_groups(tmp_path: Path, limit: int | str) -> None:
    machine = v2_machine(tmp_path / "2", "/a")
    machine.v2("a", limit, usage=GIB)
    assert machine.available == MACHINE
    machine = v1_machine(tmp_path / "1", "/a")
    machine.v1("a", UNLIMITED, usage=GIB)
    assert machine.available == MACHINE


@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_smallest_remainder_of_all_ancestors_is_available(tmp_path: Path, tightest: int) -> None:
    groups = ["slice", "slice/job", "slice/job/step"]
    limits: list[int | str] = [8 * GIB, "max", 9 * GIB]
    limits[tightest] = 2 * GIB
    machine = v2_machine(tmp_path / "2", "/slice/job/step")
    for group, limit in zip(groups, limits, strict=True):
        machine.v2(group, limit, usage=GIB)
    assert machine.available == GIB
    machine = v1_machine(tmp_path / "1", "/slice/job/step")
    for group, limit in zip(groups, limits, strict=True):
        machine.v1(group, limit if isinstance(limit, int) else UNLIMITED, usage=GIB)
    assert machine.available == GIB


def test_usage_of_sibling_groups_counts(tmp_path: Path) -> None:
    """An almost empty group can be part of an almost full one."""
    machine = v2_machine(tmp_path, "/job/step")
    machine.v2("job", 10 * GIB, usage=9 * GIB)
    machine.v2("job/step", 10 * GIB, usage=GIB)
    assert machine.available == GIB


def test_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    """`memory.high` does not kill processes, but slows them down until they make no progress."""
    machine = v2_machine(tmp_path, "/a")
    machine.v2("a", "max", usage=GIB, high=3 * GIB)
    assert machine.available == 2 * GIB


def test_no_memory_is_available_beyond_the_limit(tmp_path: Path) -> None:
    """A limit may be lowered below the current usage."""
    machine = v2_machine(tmp_path, "/a")
    machine.v2("a", GIB, usage=2 * GIB)
    assert machine.available == 0


@pytest.mark.parametrize("group", ["/docker/abc", "/docker/abc/inner"])
def test_container_sees_its_part_of_the_hierarchy(tmp_path: Path, group: str) -> None:
    """The path of its group starts at the root of the host, but only the group itself is mounted."""
    machine = v1_machine(tmp_path, group, mounted="/docker/abc")
    machine.v1("", 2 * GIB)
    machine.v1("inner", 3 * GIB)
    assert machine.available == 2 * GIB


@pytest.mark.parametrize(
    ("group", "mounted"), [("/", "/.."), ("/../other", "/"), ("/gone (deleted)", "/"), ("/a", "/b")]
)
def test_unresolvable_group_uses_the_mounted_root(tmp_path: Path, group: str, mounted: str) -> None:
    machine = v2_machine(tmp_path, group, mounted)
    machine.v2("", 2 * GIB)
    assert machine.available == 2 * GIB


def test_group_names_with_colons_and_spaces_are_found(tmp_path: Path) -> None:
    """A colon is part of the path, and mount points encode a space as \\040."""
    machine = Machine(tmp_path, "0::/a:b c\n", V2_MOUNT.format(root="/a:b\\040c"))
    machine.v2("", 2 * GIB)
    assert machine.available == 2 * GIB


def test_invalid_limits_are_ignored(tmp_path: Path) -> None:
    machine = v2_machine(tmp_path, "/a")
    machine.v2("", 2 * GIB)
    machine.v2("a", "soon")
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text("")
    assert machine.available == 2 * GIB
