"""Tests of the checks of `infinity doctor` on simulated machines: status, value and fix."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

import infinity
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import UnsupportedError
from infinity.io.block_devices import Drive, Place, Space
from infinity.io.engine import DataFile
from infinity.io.ring import RingRefusedError
from infinity.memory.cgroups import cores_of_groups
from infinity.memory.device import CudaDevice, opened
from infinity.store.folder import FolderLock
from infinity.store.marker import new_run_id
from infinity_tools.doctor import accelerator, daemon_check, memory, software, storage
from infinity_tools.doctor import world as worlds
from infinity_tools.doctor.finding import Check, Finding
from infinity_tools.doctor.world import World

GIB = 1 << 30
UNLIMITED = resource.RLIM_INFINITY
PROBE = "infinity probe"


def meminfo_text(available: int = 60 * GIB, swap: int = 0, free: int = 0) -> str:
    """Return the text of /proc/meminfo of a machine with 64 GiB of memory."""
    sizes = {"MemTotal": 64 * GIB, "MemAvailable": available, "SwapTotal": swap, "SwapFree": free}
    return "".join(f"{name}: {size >> 10} kB\n" for name, size in sizes.items())


class Machine:
    """The /proc and /sys files of a machine, and a folder on its drive. By default, all checks succeed."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "drive"
        self.folder.mkdir(parents=True)
        self.write("proc/meminfo", meminfo_text())
        self.write("proc/self/cgroup", "0::/\n")
        mounts = "23 1 254:0 / / rw - ext4 /dev/root rw\n41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        self.write("proc/self/mountinfo", mounts)
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

    def look(self, check: Check[Any], path: Path | None = None, answer: dict[str, Any] | None = None) -> Finding:
        """Return the finding of a check of this machine or, by default, of its folder.

        The daemon gives `answer` to every request.
        """
        world = World.of([str(path or self.folder)], self.root / "runtime", self.root)
        if check not in FOLDER_CHECKS:
            return check.look(world)
        (at,) = world.folders
        at.daemon.__dict__["state"] = answer
        at.daemon._node = SimpleNamespace(ask=lambda op, **values: answer)  # type: ignore[assignment]
        return check.look(at)


FOLDER_CHECKS = (
    storage.folder, storage.in_use, storage.file_system, storage.direct, storage.allocation, storage.free_space,
    storage.drive, storage.bandwidth,
)  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which every check passes."""
    return Machine(tmp_path / "root")


def matches(found: Finding, status: str, says: str = "", fix: str = "") -> bool:
    """Assert the status of a finding and parts of its value and fix. Only findings that are not ok have a fix."""
    assert found.status == status, found
    assert says in found.value, found
    assert fix in found.fix, found
    assert bool(found.fix) == (status != "ok"), found
    return True


Change = Callable[[Machine, pytest.MonkeyPatch], object]


class Row(NamedTuple):
    """A check, the finding that it must return, and the change of the machine that causes this finding."""

    check: Check[Any]
    status: str
    says: str = ""
    fix: str = ""
    change: Change = lambda machine, patch: None
    answer: dict[str, Any] | None = None
    """Answer of the daemon to every request."""


def files(changed: dict[str, str]) -> Change:
    """Write files."""
    return lambda machine, _: [machine.write(name, text) for name, text in changed.items()]


def patched(owner: Any, **attributes: Any) -> Change:
    """Replace attributes of a module."""
    return lambda _, patch: [patch.setattr(owner, name, value) for name, value in attributes.items()]


def installed(version: str | None) -> Change:
    """Install a version of every package."""
    return patched(software, installed=lambda package: version)


def limit(name: str, value: int) -> Change:
    """Set a resource limit of this process."""
    number, before = getattr(resource, f"RLIMIT_{name}"), resource.getrlimit
    return patched(resource, getrlimit=lambda asked: (value, value) if asked == number else before(asked))


def raises(error: Exception) -> mock.Mock:
    """Return a function that raises an error."""
    return mock.Mock(side_effect=error)


def fails(code: int) -> mock.Mock:
    """Return a function that raises an `OSError`."""
    return raises(OSError(code, os.strerror(code)))


def both(*changes: Change) -> Change:
    """Make several changes."""
    return lambda machine, patch: [change(machine, patch) for change in changes]


SOFTWARE = [
    Row(software.python, "ok", platform.python_version()),
    Row(software.python, "problem", "3.10.4, older than 3.11", "3.11",
        patched(platform, python_version=lambda: "3.10.4")),
    *(Row(software.torch, status, says, fix, installed(version)) for version, status, says, fix in [
        ("2.11.0", "ok", "2.11.0", ""),
        ("2.15.3+cu128", "ok", "2.15.3+cu128", ""),
        ("2.10.1", "problem", "older than 2.11", "torch>=2.11"),
        ("2.9.0", "problem", "older than 2.11", "torch>=2.11"),
        ("2.16.0a0+git1234", "warning", "newer than 2.15", "torch<2.16"),
        ("3.0", "warning", "newer than 2.15", "torch<2.16"),
        (None, "problem", "not installed", "pip install"),
        ("unknown", "warning", "ValueError: 'unknown'", "doctor --json"),
    ]),
    Row(software.transformers, "ok", change=installed("5.14.0")),
    Row(software.transformers, "ok", change=installed("6.0")),
    Row(software.transformers, "warning", change=installed("4.57.1")),
    Row(software.transformers, "note", change=installed(None)),
    Row(software.numba, "ok", change=installed("0.68.1")),
    Row(software.numba, "note", change=installed(None)),
    Row(software.bf16, "ok", change=files({"proc/cpuinfo": "flags : avx2 amx_bf16"})),
    Row(software.bf16, "ok", change=files({"proc/cpuinfo": "Features : asimd bf16"})),
    Row(software.bf16, "note", "emulated", "", files({"proc/cpuinfo": "flags : avx512bw avx512dq avx512vl"})),
    Row(software.bf16, "warning", "plain loops", "", files({"proc/cpuinfo": "flags : avx2"})),
    Row(software.bf16, "warning", "plain loops", "", files({"proc/cpuinfo": "Features : asimd"})),
    Row(software.bf16, "note", "emulated", "", files({"proc/cpuinfo": ""})),  # unknown
    Row(software.numa, "ok", "one node"),
    Row(software.numa, "note", "2 nodes", "--numa-binding", files({"sys/devices/system/node/node1/cpulist": "1"})),
]  # fmt: skip


def cores(affinity: int, quota: str, threads: str) -> Change:
    """Restrict a machine with 16 cores, and set the number of torch threads."""
    return both(
        patched(os, sched_getaffinity=lambda process: set(range(affinity)), cpu_count=lambda: 16),
        lambda machine, patch: patch.setenv("OMP_NUM_THREADS", threads),
        files({"sys/fs/cgroup/cpu.max": quota}),
    )


def refused(code: int, disabled: str, seccomp: str, kernel: str) -> Change:
    """Refuse io_uring."""
    return both(
        patched(software, Ring=raises(RingRefusedError(code))),
        patched(platform, release=lambda: kernel),
        files({"proc/self/status": f"Seccomp:\t{seccomp}\nSeccomp_filters:\t1\n",
               "proc/sys/kernel/io_uring_disabled": disabled}),
    )  # fmt: skip


PROCESSOR = [
    *(Row(software.cores, status, says, fix, cores(affinity, quota, threads))
      for affinity, quota, threads, status, says, fix in [
        (8, "max 100000", "", "ok", "8 of 16", ""),
        (16, "max 100000", "", "ok", "16", ""),
        (8, "200000 100000", "", "warning", "for 2 (", "OMP_NUM_THREADS=2"),
        (8, "50000 100000", "", "warning", "would start 8 threads", "OMP_NUM_THREADS=1"),
        (8, "200000 100000", "2", "note", "for 2", "unset OMP_NUM_THREADS"),
        (8, "max 100000", "32", "warning", "would start 32 threads", "OMP_NUM_THREADS=8"),
        (8, "max 100000", "2,1", "note", "to 2 threads", "unset OMP_NUM_THREADS"),
        (1, "max 100000", "", "note", "1", "more cores"),
    ]),
    *(Row(software.io_uring, "warning", f"{errno.errorcode[code]} (", fix, refused(code, disabled, seccomp, kernel))
      for code, disabled, seccomp, kernel, fix in [
        (errno.EPERM, "2", "0", "6.8.0", "sysctl kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", "2", "6.8.0", "seccomp"),
        (errno.EPERM, "", "2", "5.15.0", "seccomp"),
        (errno.ENOSYS, "", "0", "5.4.0-100-generic", "Linux 6.1 or newer"),
        (errno.ENOSYS, "", "0", "6.8.0", "CONFIG_IO_URING"),
        (errno.ENOSYS, "", "2", "6.8.0", "seccomp"),
        (errno.EINVAL, "", "2", "5.15.0", "Linux 6.1 or newer"),
        (errno.ENOMEM, "", "0", "5.10.0", "ulimit -l"),
    ]),
]  # fmt: skip
MEMORY_MAX = {"memory.max": str(4 * GIB), "memory.current": str(GIB), "memory.stat": "inactive_file 0\n"}


def huge_pages(text: str, own: str, variable: str) -> Change:
    """Set huge pages for the kernel, the process and torch."""

    def change(machine: Machine, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("THP_MEM_ALLOC_ENABLE", variable)
        machine.write("proc/self/status", f"THP_enabled:\t{own}\n")
        file = "sys/kernel/mm/transparent_hugepage/enabled"
        machine.write(file, text)
        if not text:
            (machine.root / file).unlink()

    return change


def locked_memory(size: int, capabilities: int, uids: str) -> Change:
    """Limit locked memory."""
    status = f"CapEff:\t{capabilities:016x}\n"
    return both(limit("MEMLOCK", size), files({"proc/self/status": status, "proc/self/uid_map": f"   {uids}\n"}))


def statvfs(**values: int) -> Change:
    """Change the size of every file system."""
    return patched(os, statvfs=lambda path: SimpleNamespace(**values))


MEMORY = [
    Row(memory.memory, "ok", "60 GiB available of 64 GiB"),
    Row(memory.memory, "note", "3 GiB within the limit of a control group, of 60 GiB", "--memory",
        files({f"sys/fs/cgroup/{name}": text for name, text in MEMORY_MAX.items()})),
    Row(memory.host_cache, "ok", "15 GiB"),  # a quarter of the available memory
    Row(memory.host_cache, "warning", "128 MiB", "", files({"proc/meminfo": meminfo_text(available=GIB // 2)})),
    Row(memory.host_cache, "problem", "0 B", "", files({"proc/meminfo": meminfo_text(available=0)})),
    Row(memory.swap, "ok", "none"),
    Row(memory.swap, "ok", "0 B used of 4 GiB", "", files({"proc/meminfo": meminfo_text(swap=4 * GIB, free=4 * GIB)})),
    Row(memory.swap, "warning", "2 GiB used of 4 GiB", "",
        files({"proc/meminfo": meminfo_text(swap=4 * GIB, free=2 * GIB)})),
    Row(memory.overcommit, "ok"),
    Row(memory.overcommit, "warning", "vm.overcommit_memory is 2", "sysctl vm.overcommit_memory=0",
        files({"proc/sys/vm/overcommit_memory": "2\n"})),
    *(Row(memory.huge_pages, status, says, "", huge_pages(text, own, variable))
      for text, own, variable, status, says in [
        ("always [madvise] never", "1", "1", "ok", "on (madvise)"),
        ("[always] madvise never", "", "1", "ok", "on (always)"),
        ("always madvise [never]", "1", "1", "warning", "off (never)"),
        ("always [madvise] never", "0", "1", "warning", "off for this process"),
        ("always [madvise] never", "1", "0", "warning", "not for torch tensors"),
        ("", "1", "1", "note", "not available"),
    ]),
    # CAP_IPC_LOCK lifts the limit only in the initial user namespace.
    *(Row(memory.locked_memory, status, says, "", locked_memory(size, capabilities, uids))
      for size, capabilities, uids, status, says in [
        (UNLIMITED, 0, "0 0 4294967295", "ok", "no limit"),
        (32 * GIB, 0, "0 0 4294967295", "ok", "32 GiB"),
        (8 << 20, 0, "0 0 4294967295", "note", "8 MiB, less than 2 times the host cache (30 GiB)"),
        (8 << 20, 1 << 14, "0 0 4294967295", "ok", "CAP_IPC_LOCK"),
        (8 << 20, 1 << 14, "0 1000 1", "note", "8 MiB"),
    ]),
    *(Row(check, status, "", fix, limit(name, value)) for check, name, value, status, fix in [
        (memory.open_files, "NOFILE", 1024, "ok", ""),
        (memory.open_files, "NOFILE", UNLIMITED, "ok", ""),
        (memory.open_files, "NOFILE", 256, "warning", "LimitNOFILE="),
        (memory.open_files, "NOFILE", 16, "problem", "nofile=65536"),
        (memory.file_size, "FSIZE", UNLIMITED, "ok", ""),
        (memory.file_size, "FSIZE", GIB, "warning", "ulimit -f"),
        (memory.address_space, "AS", UNLIMITED, "ok", ""),
        (memory.address_space, "AS", GIB, "warning", "ulimit -v"),
    ]),
    # The fix is `ulimit` up to the hard limit, and limits.conf above it.
    *(Row(check, status, says, fix, patched(resource, getrlimit=lambda asked, hard=hard: (64, hard)))
      for hard, open_files, locked in [
        (4096, "ulimit -n 4096", "limits.conf"),
        (1 << 20, "ulimit -n 65536", "limits.conf"),
        (UNLIMITED, "65536", "ulimit -l"),
    ] for check, status, says, fix in [
        (memory.open_files, "warning", "64", open_files), (memory.locked_memory, "note", "64 B", locked)]),
    Row(memory.shared_memory, "note", "No such file", "/dev/shm"),
    Row(memory.shared_memory, "note", change=statvfs(f_frsize=1, f_blocks=64 << 20)),
    Row(memory.shared_memory, "ok", change=statvfs(f_frsize=1, f_blocks=8 * GIB)),
]  # fmt: skip


class FakeTorch:
    """Attributes of torch that the checks read."""

    def __init__(self, gpus: int = 0, cuda: str | None = None, other: str = "", nccl: bool = True) -> None:
        properties = SimpleNamespace(name="H100", total_memory=80 * GIB)
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda, hip=None)
        self.cuda = SimpleNamespace(
            is_available=lambda: gpus > 0, device_count=lambda: gpus, get_device_properties=lambda index: properties
        )
        self.accelerator = SimpleNamespace(
            is_available=lambda: bool(other), current_accelerator=lambda: SimpleNamespace(type=other)
        )
        self.distributed = SimpleNamespace(
            is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: nccl
        )


def with_torch(torch: FakeTorch | None, device: str = "") -> Change:
    """Install this torch and a file in /dev."""
    return both(patched(accelerator, _torch=lambda: torch), files({f"dev/{device}": ""} if device else {}))


def broken_torch(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch", None)
    patch.delitem(sys.modules, "torch.distributed")


ACCELERATORS = [
    *(Row(accelerator.accelerator, status, says, fix, with_torch(torch, device))
      for torch, device, status, says, fix in [
        (FakeTorch(), "", "ok", "on the CPU", ""),
        (FakeTorch(gpus=8, cuda="12.8"), "nvidiactl", "ok", "8 x H100 with 80 GiB", ""),
        (FakeTorch(), "nvidiactl", "warning", "built without CUDA", "pytorch.org"),
        (FakeTorch(), "kfd", "warning", "built without ROCm", "pytorch.org"),
        (FakeTorch(cuda="12.8"), "nvidiactl", "warning", "a GPU is present", "nvidia-smi"),
        (FakeTorch(other="xpu"), "", "note", "xpu", "CUDA"),
        (None, "", "note", "not installed", "`torch`"),
    ]),
    Row(accelerator.collectives, "ok", "gloo", "", with_torch(FakeTorch(nccl=False))),
    Row(accelerator.collectives, "ok", "gloo and NCCL", "", with_torch(FakeTorch(gpus=1))),
    Row(accelerator.collectives, "problem", "NCCL", "", with_torch(FakeTorch(gpus=1, nccl=False))),
    Row(accelerator.collectives, "note", "skipped", "", with_torch(None)),
    Row(accelerator.collectives, "note", "skipped", "", broken_torch),
    Row(accelerator.fsdp2, "ok"),
    Row(accelerator.fsdp2, "problem", "torch 9 is not supported", "torch>=2.11,<=2.15",
        patched(accelerator, import_module=raises(UnsupportedError("torch 9 is not supported")))),
    Row(accelerator.fsdp2, "note", "not installed", "", patched(accelerator, installed=lambda package: None)),
    Row(accelerator.fsdp2, "problem", "torch cannot be imported", "--force-reinstall", broken_torch),
]  # fmt: skip
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def addresses(*found: str) -> Change:
    """Resolve the host name to these addresses."""

    def resolve(*_: object, **__: object) -> list[Any]:
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    return patched(socket, getaddrinfo=resolve)


def variables(*values: str | None) -> Change:
    """Set the variables of torchrun."""

    def change(_: Machine, patch: pytest.MonkeyPatch) -> None:
        for name, value in zip(RANK_VARIABLES, values, strict=True):
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)

    return change


NETWORK = [
    # gloo listens on the address that the host name resolves to.
    Row(daemon_check.host_name, "ok", "of this host", "", addresses("127.0.0.1")),
    Row(daemon_check.host_name, "ok", "of this host", "", addresses("192.0.2.1", "127.0.0.1")),
    Row(daemon_check.host_name, "warning", "other hosts", "", addresses("192.0.2.1")),
    Row(daemon_check.host_name, "warning", "does not resolve", "", addresses()),
    Row(daemon_check.loopback, "ok"),
    Row(daemon_check.loopback, "problem", "Cannot assign", "ip link set lo up",
        patched(socket, create_server=fails(errno.EADDRNOTAVAIL))),
    Row(daemon_check.ranks, "ok", change=variables(*[None] * 6)),
    Row(daemon_check.ranks, "problem", "RANK is not set", "unset RANK", variables(None, "2", None, None, None, None)),
    Row(daemon_check.ranks, "note", "rank 1 of 2", "unset RANK", variables("1", "2", "1", "2", "127.0.0.1", "29500")),
]  # fmt: skip


def unwritable(code: int, user: int) -> Change:
    """Fail to create files as a user."""
    return both(patched(worlds.tempfile, mkstemp=fails(code)), patched(os, geteuid=lambda: user, getegid=lambda: user))


def mounted(kind: str) -> Change:
    """Mount a file system of this type at the folder; the topmost mount determines the type."""
    root = "1 0 8:1 / / rw - none a rw\n"
    return lambda machine, _: machine.write(
        "proc/self/mountinfo", f"{root}2 1 0:9 / {machine.folder} rw - {kind} a:/b rw\n"
    )


def opened_as(functions: dict[str, Any] | None = None, **file: Any) -> Change:
    """Open files with these attributes, and replace functions of `os`."""

    def opened(path: str, flags: int) -> DataFile:
        return DataFile(**{"path": path, "fd": os.open(path, flags), "direct": True, "alignment": 512, **file})

    return both(patched(worlds, open_aligned=opened), patched(os, **(functions or {})))


def fallocate(code: int) -> Change:
    """Let fallocate() fail. It is called directly, because posix_fallocate() writes data if it is not supported."""

    def called(*_: object) -> int:
        ctypes.set_errno(code)
        return -1 if code else 0

    return patched(storage, _libc=SimpleNamespace(fallocate=called))


def on_drive(name: str, *, in_memory: bool = False, free: int = 0) -> Change:
    """Place the folder on a drive of 1 TiB."""
    place = Place(path="", drive=Drive(name=name, identity="x"), file_system=1, in_memory=in_memory)
    return patched(
        storage, locate=lambda path, sysfs: place, space=lambda path: Space(capacity=1 << 40, free=free * GIB)
    )


def drive(name: str, rotational: int, model: str) -> Change:
    """Place the folder on a drive of this type."""
    files_of_drive = {
        f"sys/class/block/{name}/queue/rotational": f"{rotational}\n",
        f"sys/class/block/{name}/device/model": f"{model}\n",
    }
    return both(files(files_of_drive), on_drive(name))


RESERVED = {
    "reservations": [{"device": "nvme0n1", "bytes": 3 * GIB}, {"device": "nvme1n1", "bytes": 50 * GIB}]
}  # the second one is on another drive
FOLDERS = [
    *(Row(storage.folder, "problem", os.strerror(code), fix, unwritable(code, user)) for code, user, fix in [
        (errno.EACCES, 1000, "install -d -o 1000 -g 1000 "),
        (errno.EACCES, 0, "another folder"),
        (errno.ENOSPC, 1000, "infinity store rm"),
        (errno.EIO, 1000, "another folder"),
    ]),
    *(Row(storage.file_system, status, says, "", mounted(kind)) for kind, status, says in [
        ("ext4", "ok", "ext4"),
        ("xfs", "ok", "xfs"),
        ("tmpfs", "warning", "in memory"),
        ("nfs4", "warning", "not local"),
        ("fuse.sshfs", "warning", "not local"),
        ("overlay", "warning", "container"),
        ("btrfs", "note", "copy-on-write"),
    ]),
    Row(storage.file_system, "problem", "without a size", "NVMe", statvfs(f_blocks=0)),  # cannot reserve space
    # A file system may accept O_DIRECT in open() and still fail in pwrite().
    *(Row(storage.direct, status, says, fix, opened_as(functions, **file))
      for file, functions, status, says, fix in [
        ({}, {}, "ok", "aligned to 512 bytes", ""),
        ({"alignment": 16384}, {}, "problem", "16384", "ext4"),
        ({"direct": False, "alignment": 1}, {}, "warning", "no O_DIRECT", "ext4 or XFS"),
        ({}, {"pwritev": fails(errno.EINVAL)}, "problem", "Invalid argument", "dmesg"),
        ({}, {"pwritev": fails(errno.ENOSPC)}, "note", "no space", "infinity store rm"),
        ({}, {"preadv": lambda *_: 4096}, "problem", "differs", "dmesg"),
    ]),
    Row(storage.allocation, "ok", "blocks", "", fallocate(0)),
    Row(storage.allocation, "warning", "no fallocate", "ext4 or XFS", fallocate(errno.EOPNOTSUPP)),
    Row(storage.allocation, "problem", "No space left", "infinity store rm", fallocate(errno.ENOSPC)),
    Row(storage.allocation, "problem", "File too large", "ulimit -f", fallocate(errno.EFBIG)),
    *(Row(storage.free_space, status, says, "", on_drive("nvme0n1", free=free), RESERVED) for free, status, says in [
        (100, "ok", "97 GiB free of 1 TiB, besides 3 GiB reserved"),
        (5, "warning", "2 GiB free"),
        (3, "problem", "0 B free"),
    ]),
    *(Row(storage.drive, status, says, fix, drive(name, rotational, model))
      for name, rotational, model, status, says, fix in [
        ("nvme0n1", 0, "Samsung  SSD 990", "ok", "nvme0n1 (Samsung SSD 990)", ""),
        ("nvme1n1", 0, "Amazon Elastic Block Store", "note", "network drive", PROBE),
        ("nvme2n1", 0, "Amazon EC2 NVMe Instance Storage", "ok", "Instance Storage", ""),
        ("dm-0", 0, "", "ok", "dm-0", ""),
        ("sdb", 0, "Samsung 870", "note", "sdb (Samsung 870)", PROBE),
        ("sda", 1, "ST4000", "warning", "rotating", "NVMe"),
        ("vda", 1, "", "note", "virtual disk", PROBE),
        ("loop3", 0, "", "note", "a mounted file", "NVMe"),
        ("zram0", 0, "", "warning", "compressed", "NVMe"),
        ("nbd0", 0, "", "note", "network drive", PROBE),
    ]),
    Row(storage.drive, "note", "in memory", "", on_drive("nfs-5", in_memory=True)),
    Row(storage.drive, "note", "(nfs-5)", "", on_drive("nfs-5")),
    Row(storage.bandwidth, "note", "infinityd is not running", "infinityd &, then infinity probe"),
]  # fmt: skip


@pytest.mark.parametrize(
    "rows", [SOFTWARE, PROCESSOR, MEMORY, ACCELERATORS, NETWORK, FOLDERS],
    ids=["software", "processor", "memory", "accelerators", "network", "folders"],
)  # fmt: skip
def test_findings(rows: Iterable[Row], subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, row in enumerate(rows):
        machine = Machine(tmp_path / str(number))
        with subtests.test(row.check.name, number=number), pytest.MonkeyPatch.context() as patch:
            row.change(machine, patch)
            found = machine.look(row.check, answer=row.answer)
            patch.undo()
            assert matches(found, row.status, row.says, row.fix)
            assert list(machine.folder.iterdir()) == []


def test_cgroup_v1_quota_is_smallest_of_hierarchy(machine: Machine) -> None:
    """A quota of -1 means no limit."""
    machine.write("proc/self/cgroup", "1:cpu,cpuacct:/job/step\n")
    machine.write("proc/self/mountinfo", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
    assert cores_of_groups(machine.root) == math.inf
    for group, time in (("", -1), ("job", 150000), ("job/step", 400000)):
        machine.write(f"sys/fs/cgroup/cpu/{group}/cpu.cfs_quota_us", f"{time}\n")
        machine.write(f"sys/fs/cgroup/cpu/{group}/cpu.cfs_period_us", "100000\n")
    assert cores_of_groups(machine.root) == 1.5


def test_available_io_uring_is_ok(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring created by the check is closed."""
    closed = []
    monkeypatch.setattr(software, "Ring", lambda entries: SimpleNamespace(close=lambda: closed.append(entries)))
    assert matches(machine.look(software.io_uring), "ok", "allowed")
    assert closed == [33]


def daemon_finding(runtime: Path, answer: dict[str, Any] | None) -> Finding:
    """Return the finding for a daemon that gives this information about itself, or for no daemon."""
    here = World.of([], runtime)
    here.daemon.__dict__["state"] = answer and {"node": answer}
    return daemon_check.daemon.look(here)


def test_daemon_status(tmp_path: Path) -> None:
    runtime, version = tmp_path / "run time", infinity.__version__
    assert matches(daemon_finding(runtime, {"version": version, "pid": 7}), "ok", f"infinityd {version}")
    assert matches(daemon_finding(runtime, {"version": "0.0.9", "pid": 7}), "warning", "0.0.9", "kill 7")
    assert matches(daemon_finding(runtime, None), "note", "not running", f"infinityd --runtime-dir '{runtime}' &")
    runtime.mkdir(mode=0o700)
    (runtime / SOCKET_NAME).touch()
    assert matches(daemon_finding(runtime, None), "note", "answers in")
    inside = daemon_finding(runtime / SOCKET_NAME / "x", None)
    assert matches(inside, "warning", "Not a directory", "telemetry.runtime_dir")
    runtime.chmod(0o777)
    assert matches(daemon_finding(runtime, None), "warning", "mode 0777", "telemetry.runtime_dir")


def test_host_registration_is_tried_and_undone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, no memory has to be registered."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert matches(machine.look(accelerator.host_registration), "ok", "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda name: nullcontext())
    monkeypatch.setattr(CudaDevice, "numa_node", lambda self: -1)
    monkeypatch.setattr(CudaDevice, "_clear", lambda self: None)
    opened.cache_clear()
    unregistered: list[object] = []
    for status, verdict in ((0, "ok"), (2, "warning")):
        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags, status=status: status, cudaHostUnregister=unregistered.append
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda cudart=cudart: cudart)
        assert matches(machine.look(accelerator.host_registration), verdict, "register")
    assert len(unregistered) == 1, "the registered memory is unregistered"
    opened.cache_clear()


def test_folder_exists_or_can_be_created(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is created. The fix for a read-only mount names the mount point, even of a bind mount."""
    (machine.folder / "file").touch()
    (machine.folder / "loop").symlink_to("loop")
    before = sorted(machine.folder.iterdir())
    parent = machine.folder / "a b"
    for path, *expected in [
        (machine.folder, "ok", "writable"),
        (machine.folder / "new", "ok", "will be created"),
        (machine.folder / "file", "problem", "is not a folder", "another folder"),
        (machine.folder / "loop", "problem", "is not a folder", "another folder"),
        (parent / "c", "problem", f"{parent} is not a folder", f"mkdir -p '{parent}'"),
    ]:
        assert matches(machine.look(storage.folder, path), *expected)
    assert sorted(machine.folder.iterdir()) == before
    mounts = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:1 /x {machine.folder} ro - ext4 /dev/a rw\n"
    machine.write("proc/self/mountinfo", mounts)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    found = machine.look(storage.folder, machine.folder / "run")
    assert matches(found, "problem", "mounted read-only", f"mount -o remount,rw {machine.folder}")


def test_locked_folder_reports_its_process(machine: Machine) -> None:
    """After the lock is released, the folder is reported as unused."""
    lock = FolderLock.acquire([machine.folder], new_run_id(), 0)
    try:
        assert matches(machine.look(storage.in_use), "note", f"process {os.getpid()}", "another folder")
    finally:
        lock.release()
    assert matches(machine.look(storage.in_use), "ok", "by no run")
    assert matches(machine.look(storage.in_use, machine.folder / "new"), "ok", "by no run")


def test_bandwidth_comes_from_daemon(machine: Machine) -> None:
    known = {"read": 3.2e9, "write": 1.5e9, "mixed": None, "device": "nvme0n1"}
    for profile, *expected in [
        (None, "note", "not measured", PROBE),
        (known, "ok", "read 3.20 GB/s, write 1.50 GB/s"),
    ]:
        found = machine.look(storage.bandwidth, answer={"bandwidth": {str(machine.folder): profile}})
        assert matches(found, *expected)
        assert "mixed" not in found.value


def test_drives_and_largest_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unusable folders are ignored, and the space of each file system counts once."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    numbers = {"a": 1, "b": 2, "c": 1}

    def place(path: str, sysfs: Path) -> Place:
        number = numbers[Path(path).name]
        return Place(path=path, drive=Drive(name=f"nvme{number}", identity=f"{number}"), file_system=number)

    monkeypatch.setattr(storage, "locate", place)
    monkeypatch.setattr(storage, "space", lambda path: Space(capacity=1 << 40, free=28 * 10**9))

    def found(check: Check[World], *names: str) -> Finding:
        return check.look(World.of([str(tmp_path / name) for name in names], tmp_path))

    assert matches(found(storage.drives, "a"), "ok", "one")
    assert matches(found(storage.drives, "a", "b", "no/thing"), "ok", "2")
    shared = found(storage.drives, "a", "b", "c")
    assert matches(shared, "warning", f"{tmp_path / 'a'} and {tmp_path / 'c'} (nvme1)", "one folder per drive")
    assert matches(found(storage.largest_model, "a"), "ok", "about 1 billion")
    assert matches(found(storage.largest_model, "a", "b", "c"), "ok", "about 2 billion")
    for check in (storage.drives, storage.largest_model):
        assert matches(found(check, "no/thing"), "note", "no folder", "`folder`")
