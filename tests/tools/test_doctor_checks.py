"""Tests of the `infinity doctor` checks of software, memory, limits, processor and io_uring."""

from __future__ import annotations

import errno
import math
import os
import platform
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.io.ring import RingRefusedError
from infinity.memory.cgroups import cores_of_groups
from infinity_tools.doctor import io_engine, memory, processor_check, software
from infinity_tools.doctor.finding import Check
from infinity_tools.doctor.world import World
from support.doctor import GIB, Machine, matches

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which every check passes."""
    return Machine(tmp_path / "root")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that fakes a resource limit of this process."""

    def give(name: str, value: int) -> None:
        number = getattr(resource, f"RLIMIT_{name}")
        before = resource.getrlimit
        monkeypatch.setattr(resource, "getrlimit", lambda asked: (value, value) if asked == number else before(asked))

    return give


def test_python_version(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(software.python), "ok", platform.python_version())
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    assert matches(machine.look(software.python), "problem", "3.10.4, older than 3.11", "3.11")


@pytest.mark.parametrize(
    ("version", "status", "says", "fix"),
    [
        ("2.11.0", "ok", "2.11.0", ""),
        ("2.15.3+cu128", "ok", "2.15.3+cu128", ""),
        ("2.10.1", "problem", "older than 2.11", "torch>=2.11"),
        ("2.9.0", "problem", "older than 2.11", "torch>=2.11"),
        ("2.16.0a0+git1234", "warning", "newer than 2.15", "torch<2.16"),
        ("3.0", "warning", "newer than 2.15", "torch<2.16"),
        (None, "problem", "not installed", "pip install"),
        ("unknown", "warning", "ValueError: 'unknown'", "--report"),
    ],
)
def test_torch_version(
    version: str | None, status: str, says: str, fix: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are compared numerically with the tested range; an invalid version is a warning."""
    monkeypatch.setattr(software, "installed", lambda package: version)
    assert matches(machine.look(software.torch), status, says, fix)


@pytest.mark.parametrize(
    ("version", "status"), [("5.14.0", "ok"), ("6.0", "ok"), ("4.57.1", "warning"), (None, "note")]
)
def test_transformers_is_optional(
    version: str | None, status: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "installed", lambda package: version)
    assert matches(machine.look(software.transformers), status)


@pytest.mark.parametrize(("version", "status"), [("0.68.1", "ok"), (None, "note")])
def test_numba_is_optional(version: str | None, status: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda package: version)
    assert matches(machine.look(software.numba), status)


def test_installed_returns_version_or_none() -> None:
    assert software.installed("torch") == metadata.version("torch")
    assert software.installed("no-such-package") is None


def test_memory_respects_control_group_limit(machine: Machine) -> None:
    assert matches(machine.look(memory.memory), "ok", "60 GiB available of 64 GiB")
    machine.group(memory_max=str(4 * GIB), memory_current=str(GIB), memory_stat="inactive_file 0\n")
    assert matches(
        machine.look(memory.memory), "note", "3 GiB within the limit of a control group, of 60 GiB", "--memory"
    )


@pytest.mark.parametrize(
    ("available", "status", "says"),
    [(60 * GIB, "ok", "15 GiB"), (GIB // 2, "warning", "128 MiB"), (0, "problem", "0 B")],
)
def test_host_cache_is_quarter_of_available_memory(available: int, status: str, says: str, machine: Machine) -> None:
    machine.memory(available=available)
    assert matches(machine.look(memory.host_cache), status, says)


@pytest.mark.parametrize(
    ("swap", "free", "status", "says"),
    [(0, 0, "ok", "none"), (4, 4, "ok", "0 B used of 4 GiB"), (4, 2, "warning", "2 GiB used of 4 GiB")],
)
def test_used_swap_is_a_warning(swap: int, free: int, status: str, says: str, machine: Machine) -> None:
    machine.memory(swap=swap * GIB, free=free * GIB)
    assert matches(machine.look(memory.swap), status, says)


def test_strict_overcommit_is_a_warning(machine: Machine) -> None:
    assert matches(machine.look(memory.overcommit), "ok")
    machine.write("proc/sys/vm/overcommit_memory", "2\n")
    assert matches(
        machine.look(memory.overcommit), "warning", "vm.overcommit_memory is 2", "sysctl vm.overcommit_memory=0"
    )


@pytest.mark.parametrize(
    ("text", "own", "variable", "status", "says"),
    [
        ("always [madvise] never", "1", "1", "ok", "on (madvise)"),
        ("[always] madvise never", "", "1", "ok", "on (always)"),
        ("always madvise [never]", "1", "1", "warning", "off (never)"),
        ("always [madvise] never", "0", "1", "warning", "off for this process"),
        ("always [madvise] never", "1", "0", "warning", "not for torch tensors"),
        ("", "1", "1", "note", "not available"),
    ],
)
def test_huge_pages(
    text: str, own: str, variable: str, status: str, says: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of the kernel, the process and torch are all considered."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", variable)
    machine.write("proc/self/status", f"THP_enabled:\t{own}\n")
    file = "sys/kernel/mm/transparent_hugepage/enabled"
    machine.write(file, text)
    if not text:
        (machine.root / file).unlink()
    assert matches(machine.look(memory.huge_pages), status, says)


@pytest.mark.parametrize(
    ("limit", "capabilities", "uids", "status", "says"),
    [
        (UNLIMITED, 0, "0 0 4294967295", "ok", "no limit"),
        (32 * GIB, 0, "0 0 4294967295", "ok", "32 GiB"),
        (8 << 20, 0, "0 0 4294967295", "note", "8 MiB, less than 2 times the host cache (30 GiB)"),
        (8 << 20, 1 << 14, "0 0 4294967295", "ok", "CAP_IPC_LOCK"),
        (8 << 20, 1 << 14, "0 1000 1", "note", "8 MiB"),
    ],
)
def test_locked_memory(
    limit: int, capabilities: int, uids: str, status: str, says: str, machine: Machine, limits: Callable[..., None]
) -> None:
    """CAP_IPC_LOCK lifts the limit only in the initial user namespace."""
    limits("MEMLOCK", limit)
    machine.write("proc/self/status", f"CapEff:\t{capabilities:016x}\n")
    machine.write("proc/self/uid_map", f"   {uids}\n")
    assert matches(machine.look(memory.locked_memory), status, says)


@pytest.mark.parametrize(
    ("check", "name", "limit", "status", "fix"),
    [
        (memory.open_files, "NOFILE", 1024, "ok", ""),
        (memory.open_files, "NOFILE", UNLIMITED, "ok", ""),
        (memory.open_files, "NOFILE", 256, "warning", "LimitNOFILE="),
        (memory.open_files, "NOFILE", 16, "problem", "nofile=65536"),
        (memory.file_size, "FSIZE", UNLIMITED, "ok", ""),
        (memory.file_size, "FSIZE", GIB, "warning", "ulimit -f"),
        (memory.address_space, "AS", UNLIMITED, "ok", ""),
        (memory.address_space, "AS", GIB, "warning", "ulimit -v"),
    ],
)
def test_resource_limits(
    check: Check[World], name: str, limit: int, status: str, fix: str, machine: Machine, limits: Callable[..., None]
) -> None:
    limits(name, limit)
    assert matches(machine.look(check), status, fix=fix)


@pytest.mark.parametrize(
    ("hard", "fix"), [(4096, "ulimit -n 4096"), (1 << 20, "ulimit -n 65536"), (UNLIMITED, "65536")]
)
def test_fix_depends_on_hard_limit(hard: int, fix: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is `ulimit` up to the hard limit, and limits.conf above it."""
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (64, hard))
    assert matches(machine.look(memory.open_files), "warning", "64", fix)
    assert matches(
        machine.look(memory.locked_memory), "note", "64 B", "ulimit -l" if hard == UNLIMITED else "limits.conf"
    )


def test_small_or_missing_shared_memory_is_a_note(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(memory.shared_memory), "note", "No such file", "/dev/shm")
    for size, status in ((64 << 20, "note"), (8 * GIB, "ok")):
        monkeypatch.setattr(os, "statvfs", lambda path, size=size: SimpleNamespace(f_frsize=1, f_blocks=size))
        assert matches(machine.look(memory.shared_memory), status)


@pytest.mark.parametrize(
    ("affinity", "quota", "threads", "status", "says", "fix"),
    [
        (8, "max 100000", "", "ok", "8 of 16", ""),
        (16, "max 100000", "", "ok", "16", ""),
        (8, "200000 100000", "", "warning", "for 2 (", "OMP_NUM_THREADS=2"),
        (8, "50000 100000", "", "warning", "would start 8 threads", "OMP_NUM_THREADS=1"),
        (8, "200000 100000", "2", "note", "for 2", "unset OMP_NUM_THREADS"),
        (8, "max 100000", "32", "warning", "would start 32 threads", "OMP_NUM_THREADS=8"),
        (8, "max 100000", "2,1", "note", "to 2 threads", "unset OMP_NUM_THREADS"),
        (1, "max 100000", "", "note", "1", "more cores"),
    ],
)
def test_cores(
    affinity: int,
    quota: str,
    threads: str,
    status: str,
    says: str,
    fix: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU affinity and the cgroup quota are compared with the number of torch threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(affinity)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    machine.group(cpu_max=quota)
    assert matches(machine.look(processor_check.cores), status, says, fix)


def test_cgroup_v1_quota_is_smallest_of_hierarchy(machine: Machine) -> None:
    """A quota of -1 means no limit."""
    machine.write("proc/self/cgroup", "1:cpu,cpuacct:/job/step\n")
    machine.write("proc/self/mountinfo", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
    here = World.of([], machine.root, machine.root)
    assert cores_of_groups(here.root) == math.inf
    for group, time in (("", -1), ("job", 150000), ("job/step", 400000)):
        machine.write(f"sys/fs/cgroup/cpu/{group}/cpu.cfs_quota_us", f"{time}\n")
        machine.write(f"sys/fs/cgroup/cpu/{group}/cpu.cfs_period_us", "100000\n")
    assert cores_of_groups(here.root) == 1.5


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("flags : avx2 amx_bf16", "ok"),
        ("Features : asimd bf16", "ok"),
        ("flags : avx512bw avx512dq avx512vl", "note"),
        ("flags : avx2", "warning"),
        (None, "note"),
    ],
)
def test_bf16_support_on_x86_and_arm(text: str | None, status: str, machine: Machine) -> None:
    machine.write("proc/cpuinfo", text or "")
    if text is None:
        (machine.root / "proc/cpuinfo").unlink()
    assert matches(machine.look(processor_check.bf16), status)


def test_several_numa_nodes_are_a_note(machine: Machine) -> None:
    assert matches(machine.look(processor_check.numa), "ok", "one node")
    (machine.root / "sys/devices/system/node/node1").mkdir()
    assert matches(machine.look(processor_check.numa), "note", "2 nodes", "--numa-binding")


@pytest.mark.parametrize(
    ("code", "disabled", "seccomp", "kernel", "fix"),
    [
        (errno.EPERM, "2", "0", "6.8.0", "sysctl kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", "2", "6.8.0", "seccomp"),
        (errno.EPERM, None, "2", "5.15.0", "seccomp"),
        (errno.ENOSYS, None, "0", "5.4.0-100-generic", "Linux 5.6 or newer"),
        (errno.ENOSYS, None, "0", "6.8.0", "CONFIG_IO_URING"),
        (errno.ENOSYS, None, "2", "6.8.0", "seccomp"),
        (errno.EINVAL, None, "0", "5.15.0", "Linux 6.1 or newer"),
        (errno.ENOMEM, None, "0", "5.10.0", "ulimit -l"),
    ],
)
def test_io_uring_failure_reports_reason_and_fix(
    code: int,
    disabled: str | None,
    seccomp: str,
    kernel: str,
    fix: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(entries: int) -> None:
        raise RingRefusedError(code)

    monkeypatch.setattr(io_engine, "Ring", fail)
    monkeypatch.setattr(platform, "release", lambda: kernel)
    machine.write("proc/self/status", f"Seccomp:\t{seccomp}\nSeccomp_filters:\t1\n")
    if disabled is not None:
        machine.write("proc/sys/kernel/io_uring_disabled", disabled)
    assert matches(machine.look(io_engine.io_uring), "warning", f"{errno.errorcode[code]} (", fix)


def test_available_io_uring_is_ok(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring created by the check is closed."""
    closed = []
    monkeypatch.setattr(io_engine, "Ring", lambda entries: SimpleNamespace(close=lambda: closed.append(entries)))
    assert matches(machine.look(io_engine.io_uring), "ok", "allowed")
    assert closed == [33]
