"""Memory, and the limits of this process."""

from __future__ import annotations

import os
import resource
from typing import Final

from infinity.io.uring import RINGS
from infinity.memory.limits import available_memory, default_host_cache
from infinity.units import GIB, KIB, MIB, format_size
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, problem, warning
from infinity_tools.doctor.world import World

_CAP_IPC_LOCK = 14
_SMALL_HOST_CACHE: Final = 256 * MIB
_FEW_FILES: Final = 1024
_FEWEST_FILES: Final = 32  # which one small rank on one path needs
_MANY_FILES: Final = 65536
_LITTLE_SHARED: Final = GIB
_MEMLOCK: Final = (
    "docker run --ulimit memlock=-1; memlock unlimited in /etc/security/limits.conf; LimitMEMLOCK=infinity of systemd"
)
_CLOSE: Final = 0.98  # what is free changes from one look to the next
_WHOLE_UIDS = ["0", "0", "4294967295"]


def _meminfo(world: World) -> dict[str, int]:
    """Return the sizes of /proc/meminfo, in bytes."""
    fields = [line.split() for line in (world.read("proc/meminfo") or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in fields if len(words) > 2}


@check("memory")
def memory(world: World) -> Verdict:
    """What this process may still take: what the machine has available, and what the control groups of the process
    (of a container, a job of Slurm, an FSDP module of systemd) leave of it. Who goes beyond a group's limit is
    killed."""
    sizes, available = _meminfo(world), available_memory(world.root)
    value = f"{format_size(available)} available of {format_size(sizes['MemTotal'])}"
    if available < _CLOSE * sizes["MemAvailable"]:
        return note(
            f"{format_size(available)} left by a control group, of {format_size(sizes['MemAvailable'])} that the "
            "machine has available",
            "if that is too little: docker run --memory, Slurm's --mem, MemoryMax= of systemd",
        )
    return ok(value)


@check("host_cache")
def host_cache(world: World) -> Verdict:
    """The host cache that is taken if `memory.host_bytes` is not set: a quarter of what is available, shared by the
    ranks of the node. A larger host cache keeps more of the state in memory, and moves fewer bytes."""
    size = default_host_cache(1, world.root)
    value = f"{format_size(size)}, shared by the ranks of this node"
    if size < _SMALL_HOST_CACHE:
        return (warning if size else problem)(
            f"{value}: little", "end what takes the memory, raise the limit, or set memory.host_bytes"
        )
    return ok(value)


@check("swap")
def swap(world: World) -> Verdict:
    """Swap that is used. A host cache that is swapped out is read twice: from the swap and from the drive."""
    sizes = _meminfo(world)
    total, used = sizes.get("SwapTotal", 0), sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    if not total:
        return ok("none")
    value = f"{format_size(used)} used of {format_size(total)}"
    if used > total / 10:
        return warning(value, "a smaller memory.host_bytes, or as root: swapoff -a")
    return ok(value)


@check("overcommit")
def overcommit(world: World) -> Verdict:
    """Whether the kernel promises more memory than it has (vm.overcommit_memory). Where it does not, torch and CUDA,
    which ask for more than they use, may be refused."""
    if world.read("proc/sys/vm/overcommit_memory") == "2":
        return warning("off: vm.overcommit_memory is 2", "as root: sysctl vm.overcommit_memory=0")
    return ok("allowed")


@check("huge pages")
def huge_pages(world: World) -> Verdict:
    """Transparent huge pages, which the host cache and torch's tensors are put into. From small pages a request to a
    drive
    is hundreds of pieces, and the kernel clears the memory of every gather piece by piece."""
    text = world.read("sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return note("this kernel has none, or does not tell", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    mode = text.partition("[")[2].partition("]")[0]
    if mode not in ("madvise", "always"):
        return warning(f"off ({mode})", "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    if world.own("THP_enabled") == "0":
        return warning("off for this process (PR_SET_THP_DISABLE)", "start it without what turns them off")
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":  # importing infinity has set it where it was not
        return warning(f"on ({mode}), but not for torch's tensors", "unset THP_MEM_ALLOC_ENABLE")
    return ok(f"on ({mode}), for host cache and tensors")


@check("locked memory")
def locked_memory(world: World) -> Verdict:
    """How much memory this process may lock (`ulimit -l`). io_uring locks the host cache, which counts once for each of
    its
    rings, so that transfers need not look up its pages each time; beyond the limit it goes on without."""
    limit, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int(world.own("CapEff") or "0", 16)
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    if capabilities >> _CAP_IPC_LOCK & 1 and (world.read("proc/self/uid_map") or "").split() == _WHOLE_UIDS:
        return ok(f"no limit for this process (CAP_IPC_LOCK); else {format_size(limit)}")
    wanted = RINGS * default_host_cache(1, world.root)
    if limit < wanted:
        return note(
            f"{format_size(limit)}, less than {RINGS} times the host cache ({format_size(wanted)}): not all of it is "
            "registered with io_uring",
            "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else _MEMLOCK,
        )
    return ok(format_size(limit))


@check("open files")
def open_files(world: World) -> Verdict:
    """How many files this process may open (`ulimit -n`). A rank needs few, data loaders and connections between
    ranks many."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        return ok("no limit" if limit == resource.RLIM_INFINITY else str(limit))
    fix = "docker run --ulimit nofile=65536; nofile in /etc/security/limits.conf; LimitNOFILE= of systemd"
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        fix = f"ulimit -n {_MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)}"
    return (problem if limit < _FEWEST_FILES else warning)(str(limit), fix)


@check("file size")
def file_size(world: World) -> Verdict:
    """How large a file may become (`ulimit -f`). The state of a rank is one file on each path."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(f"at most {format_size(limit)}, for each rank and path", "ulimit -f unlimited")
    return ok("no limit")


@check("address space")
def address_space(world: World) -> Verdict:
    """How much address space this process may take (`ulimit -v`). torch and CUDA take far more than memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(format_size(limit), "ulimit -v unlimited")
    return ok("no limit")


@check("shared memory")
def shared_memory(world: World) -> Verdict:
    """The size of /dev/shm, through which NCCL connects the ranks of a node and data loaders hand over batches.
    Containers get 64 MiB unless they ask for more."""
    try:
        found = os.statvfs(world.root / "dev/shm")
    except OSError as error:
        return note(f"/dev/shm cannot be used: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    size = found.f_frsize * found.f_blocks
    if size < _LITTLE_SHARED:
        return note(
            f"/dev/shm has {format_size(size)}: little for NCCL and data loaders",
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
