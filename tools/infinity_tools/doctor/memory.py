"""Checks of memory and process limits."""

from __future__ import annotations

import os
import resource
from typing import Final

from infinity.io.uring import RINGS
from infinity.memory.limits import available_memory, default_host_cache
from infinity.units import GIB, KIB, MIB, format_size
from infinity_tools.doctor.finding import Finding, Group, check, note, ok, problem, warning
from infinity_tools.doctor.world import World

_CAP_IPC_LOCK = 14
_SMALL_HOST_CACHE: Final = 256 * MIB
_FEW_FILES: Final = 1024
_FEWEST_FILES: Final = 32  # minimum for one small rank with one path
_MANY_FILES: Final = 65536
_LITTLE_SHARED: Final = GIB
_MEMLOCK: Final = (
    "docker run --ulimit memlock=-1; memlock unlimited in /etc/security/limits.conf; LimitMEMLOCK=infinity in the "
    "systemd unit"
)
_CLOSE: Final = 0.98  # the available memory changes between two readings
_WHOLE_UIDS = ["0", "0", "4294967295"]


def _meminfo(world: World) -> dict[str, int]:
    fields = [line.split() for line in (world.read("proc/meminfo") or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in fields if len(words) > 2}


@check("memory")
def memory(world: World) -> Finding:
    """Memory available to this process: the available memory of the machine, or less if a control group limits it (for
    a container, a Slurm job or a systemd unit). Linux kills processes that exceed such a limit."""
    sizes, available = _meminfo(world), available_memory(world.root)
    value = f"{format_size(available)} available of {format_size(sizes['MemTotal'])}"
    if available < _CLOSE * sizes["MemAvailable"]:
        return note(
            f"{format_size(available)} within the limit of a control group, of {format_size(sizes['MemAvailable'])} "
            "available on the machine",
            "raise the limit: docker run --memory, Slurm's --mem, or MemoryMax= in the systemd unit",
        )
    return ok(value)


@check("host cache")
def host_cache(world: World) -> Finding:
    """Default size of the host cache (`memory.host_bytes`): a quarter of the available memory, divided among the ranks
    on the node. A larger host cache reduces NVMe traffic."""
    size = default_host_cache(1, world.root)
    value = f"{format_size(size)}, divided among the ranks on this node"
    if size < _SMALL_HOST_CACHE:
        return (warning if size else problem)(
            f"{value}, which is small", "free memory, raise the limit, or set memory.host_bytes"
        )
    return ok(value)


@check("swap")
def swap(world: World) -> Finding:
    """Swap space in use. A page in a swapped-out part of the host cache is read twice: from NVMe and from swap."""
    sizes = _meminfo(world)
    total, used = sizes.get("SwapTotal", 0), sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    if not total:
        return ok("none")
    value = f"{format_size(used)} used of {format_size(total)}"
    if used > total / 10:
        return warning(value, "set a smaller memory.host_bytes, or as root: swapoff -a")
    return ok(value)


@check("overcommit")
def overcommit(world: World) -> Finding:
    """Memory overcommit (`vm.overcommit_memory`). Without it, allocations by torch and CUDA may fail, because both
    reserve more memory than they use."""
    if world.read("proc/sys/vm/overcommit_memory") == "2":
        return warning("off: vm.overcommit_memory is 2", "as root: sysctl vm.overcommit_memory=0")
    return ok("allowed")


@check("huge pages")
def huge_pages(world: World) -> Finding:
    """Transparent huge pages for the host cache and torch tensors. With small pages, each I/O request is split into
    hundreds of pieces, and the operating system clears the memory of each all-gather page by page."""
    text = world.read("sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return note("not available, or not reported by Linux", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    mode = text.partition("[")[2].partition("]")[0]
    if mode not in ("madvise", "always"):
        return warning(f"off ({mode})", "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    if world.own("THP_enabled") == "0":
        return warning(
            "off for this process (PR_SET_THP_DISABLE)", "start it from a parent process that does not disable them"
        )
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":  # importing infinity sets it, unless it is already set
        return warning(f"on ({mode}), but not for torch tensors", "unset THP_MEM_ALLOC_ENABLE")
    return ok(f"on ({mode}), for the host cache and tensors")


@check("locked memory")
def locked_memory(world: World) -> Finding:
    """Limit on locked memory (`ulimit -l`). io_uring locks the host cache once per ring, which avoids page lookups on
    each transfer. The part of the host cache that exceeds the limit is not registered, which is slower."""
    limit, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int(world.own("CapEff") or "0", 16)
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    if capabilities >> _CAP_IPC_LOCK & 1 and (world.read("proc/self/uid_map") or "").split() == _WHOLE_UIDS:
        return ok(f"no limit for this process (CAP_IPC_LOCK); {format_size(limit)} for others")
    wanted = RINGS * default_host_cache(1, world.root)
    if limit < wanted:
        return note(
            f"{format_size(limit)}, less than {RINGS} times the host cache ({format_size(wanted)}): only a part of it "
            "can be registered with io_uring",
            "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else _MEMLOCK,
        )
    return ok(format_size(limit))


@check("open files")
def open_files(world: World) -> Finding:
    """Limit on open files (`ulimit -n`). A rank needs few, but data loaders and connections between ranks may need
    many."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        return ok("no limit" if limit == resource.RLIM_INFINITY else str(limit))
    fix = "docker run --ulimit nofile=65536; nofile in /etc/security/limits.conf; LimitNOFILE= in the systemd unit"
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        fix = f"ulimit -n {_MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)}"
    return (problem if limit < _FEWEST_FILES else warning)(str(limit), fix)


@check("file size")
def file_size(world: World) -> Finding:
    """Limit on the size of a file (`ulimit -f`). A rank stores its state in one file per path."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(f"at most {format_size(limit)} per rank per path", "ulimit -f unlimited")
    return ok("no limit")


@check("address space")
def address_space(world: World) -> Finding:
    """Limit on the address space (`ulimit -v`). torch and CUDA reserve much more address space than the memory they
    use."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(format_size(limit), "ulimit -v unlimited")
    return ok("no limit")


@check("shared memory")
def shared_memory(world: World) -> Finding:
    """Size of /dev/shm, which NCCL uses for communication within a node, and data loaders use for batches. The default
    in Docker containers is 64 MiB."""
    try:
        found = os.statvfs(world.root / "dev/shm")
    except OSError as error:
        return note(f"/dev/shm cannot be used: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    size = found.f_frsize * found.f_blocks
    if size < _LITTLE_SHARED:
        return note(
            f"/dev/shm has {format_size(size)}, which may be too small for NCCL and data loaders",
            "docker run --shm-size=8g, or --ipc=host",
        )
    return ok(f"/dev/shm has {format_size(size)}")


MEMORY: Final = Group(
    "Memory and limits",
    (
        memory,
        host_cache,
        swap,
        overcommit,
        huge_pages,
        locked_memory,
        open_files,
        file_size,
        address_space,
        shared_memory,
    ),
)
