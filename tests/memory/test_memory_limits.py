"""How much memory a process may take: what control groups of either version leave of what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.io.block_devices import mount_of
from infinity.memory.limits import available_memory

GIB = 1 << 30
MACHINE = 64 * GIB
UNLIMITED = 9223372036854771712
"""What version 1 says where there is no limit."""
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


class Tree:
    """The files of a machine, in a folder."""

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
        """Plant a group below the mount point of version 1; of itself it has no inactive files, of all in it some."""
        place = f"sys/fs/cgroup/memory/{group}"
        self._write(f"{place}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{place}/memory.usage_in_bytes", f"{usage}\n")
        self._write(f"{place}/memory.stat", f"cache 5\ninactive_file 0\ntotal_inactive_file {inactive}\n")

    def v2(self, group: str, limit: int | str, usage: int = 0, inactive: int = 0, high: int | str = "max") -> None:
        """Plant a group below the mount point of version 2."""
        place = f"sys/fs/cgroup/{group}"
        self._write(f"{place}/memory.max", f"{limit}\n")
        self._write(f"{place}/memory.high", f"{high}\n")
        self._write(f"{place}/memory.current", f"{usage}\n")
        self._write(f"{place}/memory.stat", f"anon 5\ninactive_file {inactive}\n")

    @property
    def available(self) -> int:
        """What is found in it."""
        return available_memory(self.folder)


def v2_tree(folder: Path, group: str, mounted: str = "/") -> Tree:
    """Return a machine with version 2 only."""
    return Tree(folder, f"0::{group}\n", V2_MOUNT.format(root=mounted))


def v1_tree(folder: Path, group: str, mounted: str = "/") -> Tree:
    """Return a machine whose memory is of version 1, with an empty tree of version 2 beside it."""
    cgroup = f"9:name=systemd:/\n4:cpu,memory:{group}\n3:cpuset:/\n0::/\n"
    unified = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    return Tree(folder, cgroup, V1_MOUNT.format(root=mounted), unified)


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    """Nothing is mounted, or there is no such thing as a group."""
    assert Tree(tmp_path, "").available == MACHINE
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(tmp_path) == MACHINE


def test_v2_limit_less_what_is_used(tmp_path: Path) -> None:
    """As in a container, where the own group is the root of what is seen."""
    tree = v2_tree(tmp_path, "/")
    tree.v2("", 4 * GIB, usage=GIB)
    assert tree.available == 3 * GIB


def test_a_mount_whose_name_is_no_text(tmp_path: Path) -> None:
    """Names have any bytes; the groups are found nevertheless, and so is the drive of a folder."""
    tree = v2_tree(tmp_path, "/")
    tree.v2("", 4 * GIB, usage=GIB)
    file = tmp_path / "proc/self/mountinfo"
    file.write_bytes(file.read_bytes() + b"99 1 254:9 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n")
    assert tree.available == 3 * GIB
    assert mount_of("/mnt/elsewhere", file).kind == "ext4"


def test_v1_limit_less_what_is_used(tmp_path: Path) -> None:
    """Found by the controller's name among several, in its own mount."""
    tree = v1_tree(tmp_path, "/job")
    tree.v1("", UNLIMITED, usage=20 * GIB)
    tree.v1("job", 4 * GIB, usage=GIB)
    assert tree.available == 3 * GIB


def test_files_in_memory_are_no_use(tmp_path: Path) -> None:
    """A container that has read a large file has all its limit used, and nearly all of that free."""
    tree = v2_tree(tmp_path / "2", "/")
    tree.v2("", 4 * GIB, usage=4 * GIB, inactive=3 * GIB)
    assert tree.available == 3 * GIB
    tree = v1_tree(tmp_path / "1", "/")
    tree.v1("", 4 * GIB, usage=4 * GIB, inactive=3 * GIB)
    assert tree.available == 3 * GIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED])
def test_no_limit_is_no_limit(tmp_path: Path, limit: int | str) -> None:
    """In the words of either version."""
    tree = v2_tree(tmp_path / "2", "/a")
    tree.v2("a", limit, usage=GIB)
    assert tree.available == MACHINE
    tree = v1_tree(tmp_path / "1", "/a")
    tree.v1("a", UNLIMITED, usage=GIB)
    assert tree.available == MACHINE


@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_limits_of_all_ancestors_hold(tmp_path: Path, tightest: int) -> None:
    """The least that one of them leaves."""
    groups = ["slice", "slice/job", "slice/job/step"]
    limits: list[int | str] = [8 * GIB, "max", 9 * GIB]
    limits[tightest] = 2 * GIB
    tree = v2_tree(tmp_path / "2", "/slice/job/step")
    for group, limit in zip(groups, limits, strict=True):
        tree.v2(group, limit, usage=GIB)
    assert tree.available == GIB
    tree = v1_tree(tmp_path / "1", "/slice/job/step")
    for group, limit in zip(groups, limits, strict=True):
        tree.v1(group, limit if isinstance(limit, int) else UNLIMITED, usage=GIB)
    assert tree.available == GIB


def test_what_siblings_use_counts(tmp_path: Path) -> None:
    """A group that is nearly empty in one that is nearly full."""
    tree = v2_tree(tmp_path, "/job/step")
    tree.v2("job", 10 * GIB, usage=9 * GIB)
    tree.v2("job/step", 10 * GIB, usage=GIB)
    assert tree.available == GIB


def test_limit_at_which_it_is_slowed_counts(tmp_path: Path) -> None:
    """`memory.high` does not kill, but nothing goes on there."""
    tree = v2_tree(tmp_path, "/a")
    tree.v2("a", "max", usage=GIB, high=3 * GIB)
    assert tree.available == 2 * GIB


def test_beyond_the_limit_is_nothing(tmp_path: Path) -> None:
    """A limit may be lowered below what is used."""
    tree = v2_tree(tmp_path, "/a")
    tree.v2("a", GIB, usage=2 * GIB)
    assert tree.available == 0


@pytest.mark.parametrize("group", ["/docker/abc", "/docker/abc/inner"])
def test_container_that_sees_a_part_of_the_tree(tmp_path: Path, group: str) -> None:
    """Its path begins at the root of the host, of which only its own group is mounted."""
    tree = v1_tree(tmp_path, group, mounted="/docker/abc")
    tree.v1("", 2 * GIB)
    tree.v1("inner", 3 * GIB)
    assert tree.available == 2 * GIB


@pytest.mark.parametrize(
    ("group", "mounted"), [("/", "/.."), ("/../other", "/"), ("/gone (deleted)", "/"), ("/a", "/b")]
)
def test_names_that_lead_nowhere(tmp_path: Path, group: str, mounted: str) -> None:
    """What is mounted is the best that is known."""
    tree = v2_tree(tmp_path, group, mounted)
    tree.v2("", 2 * GIB)
    assert tree.available == 2 * GIB


def test_names_with_colons_and_blanks(tmp_path: Path) -> None:
    """A colon is part of the path, and a blank is written as \\040 where it is mounted."""
    tree = Tree(tmp_path, "0::/a:b c\n", V2_MOUNT.format(root="/a:b\\040c"))
    tree.v2("", 2 * GIB)
    assert tree.available == 2 * GIB


def test_nonsense_is_passed_over(tmp_path: Path) -> None:
    """A limit that is no number is none."""
    tree = v2_tree(tmp_path, "/a")
    tree.v2("", 2 * GIB)
    tree.v2("a", "soon")
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text("")
    assert tree.available == 2 * GIB
