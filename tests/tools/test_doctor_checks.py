"""Tests of the `infinity doctor` checks of software, memory, limits, processor, io_uring, the node and accelerators."""

from __future__ import annotations

import errno
import math
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import infinity
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import UnsupportedError
from infinity.io.ring import RingRefusedError
from infinity.memory.cgroups import cores_of_groups
from infinity.memory.device import CudaDevice, opened
from infinity_tools.doctor import accelerator, daemon_check, memory, software
from infinity_tools.doctor.finding import Finding
from infinity_tools.doctor.world import World
from support.doctor import GIB, Machine, matches, meminfo_text

UNLIMITED = resource.RLIM_INFINITY


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


def test_torch_version(subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are compared numerically with the tested range; an invalid version is a warning."""
    for version, status, says, fix in [
        ("2.11.0", "ok", "2.11.0", ""),
        ("2.15.3+cu128", "ok", "2.15.3+cu128", ""),
        ("2.10.1", "problem", "older than 2.11", "torch>=2.11"),
        ("2.9.0", "problem", "older than 2.11", "torch>=2.11"),
        ("2.16.0a0+git1234", "warning", "newer than 2.15", "torch<2.16"),
        ("3.0", "warning", "newer than 2.15", "torch<2.16"),
        (None, "problem", "not installed", "pip install"),
        ("unknown", "warning", "ValueError: 'unknown'", "doctor --json"),
    ]:
        with subtests.test(version=version):
            monkeypatch.setattr(software, "installed", lambda package: version)
            assert matches(machine.look(software.torch), status, says, fix)


def test_transformers_and_numba_are_optional(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for check, version, status in [
        (software.transformers, "5.14.0", "ok"),
        (software.transformers, "6.0", "ok"),
        (software.transformers, "4.57.1", "warning"),
        (software.transformers, None, "note"),
        (software.numba, "0.68.1", "ok"),
        (software.numba, None, "note"),
    ]:
        monkeypatch.setattr(software, "installed", lambda package: version)
        assert matches(machine.look(check), status)


MEMORY_MAX = {"memory.max": str(4 * GIB), "memory.current": str(GIB), "memory.stat": "inactive_file 0\n"}


def test_checks_of_files_in_proc_and_sys(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The default size of the host cache is a quarter of the available memory."""
    for number, (check, files, status, says, fix) in enumerate([
        (memory.memory, {}, "ok", "60 GiB available of 64 GiB", ""),
        (memory.memory, {f"sys/fs/cgroup/{name}": text for name, text in MEMORY_MAX.items()}, "note",
         "3 GiB within the limit of a control group, of 60 GiB", "--memory"),
        (memory.host_cache, {}, "ok", "15 GiB", ""),
        (memory.host_cache, {"proc/meminfo": meminfo_text(available=GIB // 2)}, "warning", "128 MiB", ""),
        (memory.host_cache, {"proc/meminfo": meminfo_text(available=0)}, "problem", "0 B", ""),
        (memory.swap, {}, "ok", "none", ""),
        (memory.swap, {"proc/meminfo": meminfo_text(swap=4 * GIB, free=4 * GIB)}, "ok", "0 B used of 4 GiB", ""),
        (memory.swap, {"proc/meminfo": meminfo_text(swap=4 * GIB, free=2 * GIB)}, "warning", "2 GiB used of 4 GiB", ""),
        (memory.overcommit, {}, "ok", "", ""),
        (memory.overcommit, {"proc/sys/vm/overcommit_memory": "2\n"}, "warning", "vm.overcommit_memory is 2",
         "sysctl vm.overcommit_memory=0"),
        (software.bf16, {"proc/cpuinfo": "flags : avx2 amx_bf16"}, "ok", "", ""),
        (software.bf16, {"proc/cpuinfo": "Features : asimd bf16"}, "ok", "", ""),
        (software.bf16, {"proc/cpuinfo": "flags : avx512bw avx512dq avx512vl"}, "note", "emulated", ""),
        (software.bf16, {"proc/cpuinfo": "flags : avx2"}, "warning", "plain loops", ""),
        (software.numa, {}, "ok", "one node", ""),
        (software.numa, {"sys/devices/system/node/node1/cpulist": "1"}, "note", "2 nodes", "--numa-binding"),
    ]):  # fmt: skip
        with subtests.test(check.name, status=status, says=says):
            machine = Machine(tmp_path / str(number))
            for name, text in files.items():
                machine.write(name, text)
            assert matches(machine.look(check), status, says, fix)


def test_huge_pages(subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the kernel, the process and torch are all considered."""
    for text, own, variable, status, says in [
        ("always [madvise] never", "1", "1", "ok", "on (madvise)"),
        ("[always] madvise never", "", "1", "ok", "on (always)"),
        ("always madvise [never]", "1", "1", "warning", "off (never)"),
        ("always [madvise] never", "0", "1", "warning", "off for this process"),
        ("always [madvise] never", "1", "0", "warning", "not for torch tensors"),
        ("", "1", "1", "note", "not available"),
    ]:
        with subtests.test(says):
            monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", variable)
            machine.write("proc/self/status", f"THP_enabled:\t{own}\n")
            file = "sys/kernel/mm/transparent_hugepage/enabled"
            machine.write(file, text)
            if not text:
                (machine.root / file).unlink()
            assert matches(machine.look(memory.huge_pages), status, says)


def test_locked_memory(subtests: pytest.Subtests, machine: Machine, limits: Callable[..., None]) -> None:
    """CAP_IPC_LOCK lifts the limit only in the initial user namespace."""
    for limit, capabilities, uids, status, says in [
        (UNLIMITED, 0, "0 0 4294967295", "ok", "no limit"),
        (32 * GIB, 0, "0 0 4294967295", "ok", "32 GiB"),
        (8 << 20, 0, "0 0 4294967295", "note", "8 MiB, less than 2 times the host cache (30 GiB)"),
        (8 << 20, 1 << 14, "0 0 4294967295", "ok", "CAP_IPC_LOCK"),
        (8 << 20, 1 << 14, "0 1000 1", "note", "8 MiB"),
    ]:
        with subtests.test(says):
            limits("MEMLOCK", limit)
            machine.write("proc/self/status", f"CapEff:\t{capabilities:016x}\n")
            machine.write("proc/self/uid_map", f"   {uids}\n")
            assert matches(machine.look(memory.locked_memory), status, says)


def test_resource_limits(subtests: pytest.Subtests, machine: Machine, limits: Callable[..., None]) -> None:
    for check, name, limit, status, fix in [
        (memory.open_files, "NOFILE", 1024, "ok", ""),
        (memory.open_files, "NOFILE", UNLIMITED, "ok", ""),
        (memory.open_files, "NOFILE", 256, "warning", "LimitNOFILE="),
        (memory.open_files, "NOFILE", 16, "problem", "nofile=65536"),
        (memory.file_size, "FSIZE", UNLIMITED, "ok", ""),
        (memory.file_size, "FSIZE", GIB, "warning", "ulimit -f"),
        (memory.address_space, "AS", UNLIMITED, "ok", ""),
        (memory.address_space, "AS", GIB, "warning", "ulimit -v"),
    ]:
        with subtests.test(name, limit=limit):
            limits(name, limit)
            assert matches(machine.look(check), status, fix=fix)


def test_fix_depends_on_hard_limit(
    subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix is `ulimit` up to the hard limit, and limits.conf above it."""
    for hard, fix in [(4096, "ulimit -n 4096"), (1 << 20, "ulimit -n 65536"), (UNLIMITED, "65536")]:
        with subtests.test(hard=hard):
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


def test_cores(subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU affinity and the cgroup quota are compared with the number of torch threads."""
    for affinity, quota, threads, status, says, fix in [
        (8, "max 100000", "", "ok", "8 of 16", ""),
        (16, "max 100000", "", "ok", "16", ""),
        (8, "200000 100000", "", "warning", "for 2 (", "OMP_NUM_THREADS=2"),
        (8, "50000 100000", "", "warning", "would start 8 threads", "OMP_NUM_THREADS=1"),
        (8, "200000 100000", "2", "note", "for 2", "unset OMP_NUM_THREADS"),
        (8, "max 100000", "32", "warning", "would start 32 threads", "OMP_NUM_THREADS=8"),
        (8, "max 100000", "2,1", "note", "to 2 threads", "unset OMP_NUM_THREADS"),
        (1, "max 100000", "", "note", "1", "more cores"),
    ]:
        with subtests.test(f"{affinity} {quota} {threads}"):
            monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(affinity)))
            monkeypatch.setattr(os, "cpu_count", lambda: 16)
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            machine.group(cpu_max=quota)
            assert matches(machine.look(software.cores), status, says, fix)


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


def test_io_uring_failure_reports_reason_and_fix(
    subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, disabled, seccomp, kernel, fix in [
        (errno.EPERM, "2", "0", "6.8.0", "sysctl kernel.io_uring_disabled=0"),
        (errno.EPERM, "0", "2", "6.8.0", "seccomp"),
        (errno.EPERM, "", "2", "5.15.0", "seccomp"),
        (errno.ENOSYS, "", "0", "5.4.0-100-generic", "Linux 6.1 or newer"),
        (errno.ENOSYS, "", "0", "6.8.0", "CONFIG_IO_URING"),
        (errno.ENOSYS, "", "2", "6.8.0", "seccomp"),
        (errno.EINVAL, "", "2", "5.15.0", "Linux 6.1 or newer"),
        (errno.ENOMEM, "", "0", "5.10.0", "ulimit -l"),
    ]:
        with subtests.test(fix):
            monkeypatch.setattr(software, "Ring", mock.Mock(side_effect=RingRefusedError(code)))
            monkeypatch.setattr(platform, "release", lambda: kernel)
            machine.write("proc/self/status", f"Seccomp:\t{seccomp}\nSeccomp_filters:\t1\n")
            machine.write("proc/sys/kernel/io_uring_disabled", disabled)
            assert matches(machine.look(software.io_uring), "warning", f"{errno.errorcode[code]} (", fix)


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
    runtime = tmp_path / "run time"
    assert matches(
        daemon_finding(runtime, {"version": infinity.__version__, "pid": 7}), "ok", f"infinityd {infinity.__version__}"
    )
    assert matches(daemon_finding(runtime, {"version": "0.0.9", "pid": 7}), "warning", "0.0.9", "kill 7")
    assert matches(daemon_finding(runtime, None), "note", "not running", f"infinityd --runtime-dir '{runtime}' &")
    runtime.mkdir(mode=0o700)
    (runtime / SOCKET_NAME).touch()
    assert matches(daemon_finding(runtime, None), "note", "answers in")
    assert matches(
        daemon_finding(runtime / SOCKET_NAME / "x", None), "warning", "Not a directory", "telemetry.runtime_dir"
    )
    runtime.chmod(0o777)
    assert matches(daemon_finding(runtime, None), "warning", "mode 0777", "telemetry.runtime_dir")


def test_host_name_must_resolve_to_this_host(
    subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo listens on the address that the host name resolves to."""
    for addresses, status, says in [
        (["127.0.0.1"], "ok", "of this host"),
        (["192.0.2.1", "127.0.0.1"], "ok", "of this host"),
        (["192.0.2.1"], "warning", "other hosts"),
        ([], "warning", "does not resolve"),
    ]:
        with subtests.test(says):

            def resolve(*_: object, **__: object) -> list[Any]:
                if not addresses:
                    raise socket.gaierror(-2, "Name or service not known")
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            assert matches(machine.look(daemon_check.host_name), status, says)


def test_missing_loopback_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(daemon_check.loopback), "ok")
    monkeypatch.setattr(socket, "create_server", mock.Mock(side_effect=OSError(99, "Cannot assign requested address")))
    assert matches(machine.look(daemon_check.loopback), "problem", "Cannot assign", "ip link set lo up")


def test_rank_variables_must_be_complete(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert matches(machine.look(daemon_check.ranks), "ok")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert matches(machine.look(daemon_check.ranks), "problem", "RANK is not set", "unset RANK")
    for name, value in zip(names, ("1", "2", "1", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert matches(machine.look(daemon_check.ranks), "note", "rank 1 of 2", "unset RANK")


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


def test_accelerator(subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices that torch sees are compared with the devices in /dev."""
    for torch, device, status, says, fix in [
        (FakeTorch(), "", "ok", "on the CPU", ""),
        (FakeTorch(gpus=8, cuda="12.8"), "nvidiactl", "ok", "8 x H100 with 80 GiB", ""),
        (FakeTorch(), "nvidiactl", "warning", "built without CUDA", "pytorch.org"),
        (FakeTorch(), "kfd", "warning", "built without ROCm", "pytorch.org"),
        (FakeTorch(cuda="12.8"), "nvidiactl", "warning", "a GPU is present", "nvidia-smi"),
        (FakeTorch(other="xpu"), "", "note", "xpu", "CUDA"),
        (None, "", "note", "not installed", "`torch`"),
    ]:
        with subtests.test(says):
            monkeypatch.setattr(accelerator, "_torch", lambda: torch)
            shutil.rmtree(machine.root / "dev", ignore_errors=True)
            if device:
                machine.write(f"dev/{device}", "")
            assert matches(machine.look(accelerator.accelerator), status, says, fix)


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


def test_nccl_is_required_only_with_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for torch, status, says in (
        (FakeTorch(nccl=False), "ok", "gloo"),
        (FakeTorch(gpus=1), "ok", "gloo and NCCL"),
        (FakeTorch(gpus=1, nccl=False), "problem", "NCCL"),
        (None, "note", "skipped"),
    ):
        monkeypatch.setattr(accelerator, "_torch", lambda torch=torch: torch)
        assert matches(machine.look(accelerator.collectives), status, says)


def test_missing_fsdp2_apis_are_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(accelerator.fsdp2), "ok")
    monkeypatch.setattr(
        accelerator, "import_module", mock.Mock(side_effect=UnsupportedError("torch 9 is not supported"))
    )
    assert matches(machine.look(accelerator.fsdp2), "problem", "torch 9 is not supported", "torch>=2.11,<=2.15")
    monkeypatch.setattr(accelerator, "installed", lambda package: None)
    assert matches(machine.look(accelerator.fsdp2), "note", "not installed")


def test_broken_torch_installation_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other checks that need torch are skipped."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert matches(machine.look(accelerator.fsdp2), "problem", "torch cannot be imported", "--force-reinstall")
    assert matches(machine.look(accelerator.collectives), "note", "skipped")
