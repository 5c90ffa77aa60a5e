"""Checks of the installed software, the processor and the I/O engine."""

from __future__ import annotations

import errno
import math
import os
import platform
import re
from importlib import metadata
from typing import Final

from infinity.config import StorageConfig
from infinity.io.ring import Ring, RingRefusedError
from infinity.memory.cgroups import cores_of_groups
from infinity.optional_dependencies import NEWEST_TORCH, OLDEST
from infinity.processor import crawls_in_bf16, multiplies_bf16
from infinity_tools.doctor.finding import Finding, Group, check, note, ok, problem, warning
from infinity_tools.doctor.world import World

_TORCH = f"pip install 'torch>={OLDEST['torch']}'"
_NUMBA = "pip install 'infinity-offload[jit]'"
_TRANSFORMERS = "pip install 'infinity-offload[hf]'"


def installed(package: str) -> str | None:
    """Return the version of a package without importing it, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version. Raises `ValueError` if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return int(found[1]), int(found[2])


@check("python")
def python(world: World) -> Finding:
    """Version of Python in this environment. If it is not supported, create an environment with a newer version."""
    version = platform.python_version()
    if release(version) < release(OLDEST["python"]):
        return problem(f"{version}, older than {OLDEST['python']}", f"install Python {OLDEST['python']} or newer")
    return ok(version)


@check("torch")
def torch(world: World) -> Finding:
    """Version of torch, compared with the tested versions. infinity uses private FSDP2 APIs. If they have changed in a
    newer version of torch, importing infinity fails with an error."""
    version = installed("torch")
    if version is None:
        return problem("not installed", _TORCH)
    if release(version) < release(OLDEST["torch"]):
        return problem(f"{version}, older than {OLDEST['torch']}", _TORCH)
    if release(version) > release(NEWEST_TORCH):
        newest, (major, minor) = NEWEST_TORCH, release(NEWEST_TORCH)
        return warning(
            f"{version}, newer than {newest}, the newest tested version", f"pip install 'torch<{major}.{minor + 1}'"
        )
    return ok(version)


@check("transformers")
def transformers(world: World) -> Finding:
    """Version of transformers, which is required for `infinity train`, `weights=` and exports, but not for custom
    models."""
    version = installed("transformers")
    if version is None:
        return note("not installed; not required for custom models", _TRANSFORMERS)
    if release(version) < release(OLDEST["transformers"]):
        return warning(f"{version}, older than {OLDEST['transformers']}", _TRANSFORMERS)
    return ok(version)


@check("numba")
def numba(world: World) -> Finding:
    """Version of numba, which compiles the CPU code for every `state.format` except `fp32`. Without numba, torch
    executes this code, which is several times slower; a run reports this at startup."""
    version = installed("numba")
    if version is None:
        return note("not installed; every state.format except fp32 is slower on the CPU without it", _NUMBA)
    return ok(version)


SOFTWARE: Final = Group("Software", (python, torch, transformers, numba))


def _threads() -> int:
    """Return the number of threads set by OMP_NUM_THREADS, or 0 if it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


@check("cores")
def cores(world: World) -> Finding:
    """CPU cores that this process may use, given its affinity and the CPU time limit of control groups. Threads in
    excess of this number slow each other down. torchrun sets OMP_NUM_THREADS to 1 if it starts several ranks."""
    mine, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    time = min(cores_of_groups(world.root), mine)
    value = f"{mine}" + (f" of {there}" if mine < there else "")
    threads = _threads() or mine
    if time < mine:
        value += f", but CPU time for {time:.2g} (limit of a control group)"
    if threads > math.ceil(time):
        return warning(
            f"{value}; torch would start {threads} threads",
            f"export OMP_NUM_THREADS={max(1, math.floor(time))}, or raise the limit",
        )
    if mine == 1:
        return note(f"{value}: computation, updates and transfers compete for one core", "give the process more cores")
    if threads < mine:
        return note(
            f"{value}; OMP_NUM_THREADS={threads} limits torch to {threads} threads",
            "if this is the only rank on the node and there is no GPU: unset OMP_NUM_THREADS",
        )
    return ok(value)


@check("bf16")
def bf16(world: World) -> Finding:
    """Native bf16 multiplication on the CPU. If there is neither this nor a GPU, `infinity train` uses fp32, because
    emulated bf16 is several times slower, or about a hundred times slower without AVX-512."""
    if multiplies_bf16(world.root):
        return ok("native bf16 multiplication")
    fix = "without a GPU, train in fp32 (`infinity train` selects it)"
    if world.read("proc/cpuinfo") is None:
        return note("not reported by Linux", fix)
    if crawls_in_bf16(world.root):
        return warning("emulated with plain loops, about a hundred times slower than fp32", fix)
    return note("emulated", fix)


@check("numa")
def numa(world: World) -> Finding:
    """NUMA nodes, which are parts of the machine with their own memory. Transfers are fastest if the memory, cores, GPU
    and drives of a rank belong to the same node."""
    nodes = [path.name for path in (world.root / "sys/devices/system/node").glob("node[0-9]*")]
    if len(nodes) > 1:
        return note(
            f"{len(nodes)} nodes; accessing the memory of a different node is slower",
            "use torchrun --numa-binding=node with GPUs, or numactl without",
        )
    return ok("one node" if nodes else "not reported by Linux")


PROCESSOR: Final = Group("Processor", (cores, bf16, numa))


_ALLOW: Final = (
    "docker run --security-opt seccomp=FILE, where the profile FILE allows io_uring_setup, io_uring_enter and "
    "io_uring_register"
)


@check("io_uring")
def io_uring(world: World) -> Finding:
    """Availability of io_uring, tested as in a run. Without it, `storage.engine = "auto"` uses threads, which need more
    CPU time. Docker's default seccomp profile does not allow io_uring."""
    try:
        Ring(StorageConfig().queue_depth + 1).close()
    except RingRefusedError as error:
        return warning(f'{error}; engine = "auto" uses threads', _remedy(error.errno, world))
    return ok('allowed; engine = "auto" uses it')


def _remedy(code: int, world: World) -> str:
    if code == errno.EPERM and (world.read("proc/sys/kernel/io_uring_disabled") or "0") != "0":
        return "as root: sysctl kernel.io_uring_disabled=0"
    old = release(platform.release()) < (6, 1)
    if code in (errno.ENOSYS, errno.EINVAL) and (old or world.own("Seccomp") != "2"):
        return "use Linux 6.1 or newer, built with CONFIG_IO_URING"
    if code == errno.ENOMEM:
        return "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return _ALLOW


ENGINE: Final = Group("Engine", (io_uring,))
