"""Checks of the folders for the state of runs, individually and together."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
from pathlib import Path
from typing import Final

from infinity.errors import InfinityError
from infinity.hugepages import transfer_memory
from infinity.io.alignment import DEFAULT_ALIGNMENT
from infinity.io.block_devices import locate, mount_of, space
from infinity.store.folder import holders
from infinity.units import GIB, MIB, format_size
from infinity_tools.doctor.finding import Finding, Group, Status, check, note, ok, problem, warning
from infinity_tools.doctor.world import Folder, World

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "gpfs", "beegfs", "afs")
)
_IN_MEMORY = frozenset(("tmpfs", "ramfs", "hugetlbfs", "devtmpfs"))
_LOCAL: Final = "use a folder on an ext4 or XFS file system of a local NVMe drive"
_OTHER: Final = "use another folder"
_FREE: Final = "remove earlier runs with `infinity store rm`, or use another folder"
_REMOTE_MODELS = ("amazon elastic block store", "nvme_card-pd", "msft nvme accelerator")
_TRIAL_BYTES: Final = MIB
_LITTLE_SPACE: Final = 10 * GIB
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_BYTES_PER_PARAMETER: Final = 2 * 14  # AdamW with bf16 weights: current state plus checkpoint

_libc = ctypes.CDLL(None, use_errno=True)


@check("folder")
def folder(at: Folder) -> Finding:
    """Existence and permissions of the folder. A run creates a missing folder, but not missing parent folders."""
    path, place = at.path, at.place
    if not at.exists and os.path.lexists(path):
        return problem("is not a folder", _OTHER)
    if not os.path.isdir(place):
        return problem(
            f"cannot be created: {place} is not a folder", f"mkdir -p {shlex.quote(place)}, or mount the drive"
        )
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return problem(
            "is on a file system that is mounted read-only",
            f"as root: mount -o remount,rw {shlex.quote(mount_of(place, at.root / 'proc/self/mountinfo').point)}",
        )
    try:
        with at.trial():
            pass
    except OSError as error:
        fix = _OTHER
        if error.errno == errno.EACCES and os.geteuid():
            owner = f"-o {os.geteuid()} -g {os.getegid()}"
            fix = f"as root: install -d {owner} {shlex.quote(path)}"  # creates the folder or changes its owner
        elif error.errno in _FULL:
            fix = _FREE
        return problem(f"cannot create a file: {error.strerror}", fix)
    return ok("exists and is writable" if at.exists else "will be created by the run")


@check("in use")
def in_use(at: Folder) -> Finding:
    """Use of the folder by a live run. A second run cannot start in the same folder until the first one has
    ended."""
    try:
        held = holders(at.path) if at.exists else []
    except InfinityError as error:
        return warning(f"unknown: {error}", _LOCAL)
    if held:
        return note(f"by {'; '.join(dict.fromkeys(map(str, held)))}", "wait for it to end, or use another folder")
    return ok("by no run")


@check("file system")
def file_system(at: Folder) -> Finding:
    """Type of the file system. Use ext4 or XFS on a local drive. An in-memory file system competes with the host cache
    for memory, and its contents are lost at shutdown. Network and overlay file systems are slow."""
    kind = mount_of(at.place, at.root / "proc/self/mountinfo").kind
    if not os.statvfs(at.place).f_blocks:
        return problem(f"{kind} is an in-memory file system without a size", _LOCAL)
    if kind in _IN_MEMORY:
        return warning(f"{kind} is in memory: the state uses memory and is lost at shutdown", _LOCAL)
    if kind in _NETWORK or kind.startswith("fuse."):
        return warning(f"{kind} is not local: each transfer involves another machine or process", _LOCAL)
    if kind == "overlay":
        return warning(
            "overlay, the file system of a container", "docker run -v /nvme0:/nvme0, and use a folder in /nvme0"
        )
    if kind in ("btrfs", "zfs", "bcachefs"):
        return note(f"{kind} is copy-on-write, which reduces throughput", _LOCAL)
    return ok(kind)


@check("direct")
def direct(at: Folder) -> Finding:
    """Direct I/O (O_DIRECT), tested with one block, and its alignment. Without O_DIRECT, transfers go through the
    operating system's page cache, which uses memory and is slower."""
    with at.trial() as file:
        if not file.direct:
            return warning("no O_DIRECT: transfers go through the operating system's page cache", _LOCAL)
        if file.alignment > DEFAULT_ALIGNMENT:
            return problem(
                f"transfers must be aligned to {file.alignment} bytes, but infinity aligns them to 4096 bytes", _LOCAL
            )
        written, found = transfer_memory(DEFAULT_ALIGNMENT), transfer_memory(DEFAULT_ALIGNMENT)
        written[:] = os.urandom(len(written))
        try:
            os.pwritev(file.fd, [written], 0)
            os.preadv(file.fd, [found], 0)
        except OSError as error:
            if error.errno in _FULL:
                return note("not tested: no space left on the file system", _FREE)
            return problem(f"a direct transfer of 4 KiB failed: {error.strerror}", f"see `dmesg`, or {_LOCAL}")
        if written != found:
            return problem("the data read differs from the data written", f"see `dmesg`, and {_LOCAL}")
        return ok(f"O_DIRECT, aligned to {file.alignment} bytes")


@check("allocation")
def allocation(at: Folder) -> Finding:
    """Allocation of blocks without writing them (fallocate). If the file system does not support it, a run writes all
    blocks of its data files at startup."""
    with at.trial() as file:
        if _libc.fallocate(file.fd, 0, ctypes.c_long(0), ctypes.c_long(_TRIAL_BYTES)) == 0:
            return ok("blocks are allocated without writing them")
        code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return warning("no fallocate: a run writes all blocks of its files at startup", _LOCAL)
    fix = "ulimit -f unlimited" if code == errno.EFBIG else _FREE
    return problem(f"cannot allocate blocks: {os.strerror(code)}", fix)


@check("space")
def free_space(at: Folder) -> Finding:
    """Free space, minus the space that infinityd has reserved for runs that are starting. A run needs space for two
    copies of its state: the current one and the checkpoint."""
    found = space(at.place)
    name = locate(at.place, at.root / "sys").drive.name
    reserved = sum(one["bytes"] for one in (at.daemon.state or {}).get("reservations", ()) if one["device"] == name)
    left = max(0, found.free - reserved)
    value = f"{format_size(left)} free of {format_size(found.capacity)}"
    if reserved:
        value += f", besides {format_size(reserved)} reserved for runs that are starting"
    if left < _LITTLE_SPACE:
        return (warning if left > MIB else problem)(value, _FREE)
    return ok(value)


@check("drive")
def drive(at: Folder) -> Finding:
    """Drive on which the folder is stored. infinity is designed for local NVMe drives. Rotating disks are too slow.
    Measure virtual and network drives before use."""
    place = locate(at.place, at.root / "sys")
    name, block = place.drive.name, at.root / "sys/class/block" / place.drive.name
    probe = f"measure it: infinity probe {shlex.quote(at.place)}"
    if place.in_memory:
        return note("in memory, not on a drive", _LOCAL)
    if not block.exists():
        return note(f"not reported by Linux ({name})", probe)
    model = " ".join(_text(block / "device/model").split())
    value = f"{name} ({model})" if model else name
    if name.startswith("zram"):
        return warning(f"{value} is compressed memory", _LOCAL)
    if name.startswith("loop"):
        return note(f"{value} is a mounted file", _LOCAL)
    if name.startswith(("nbd", "rbd", "drbd")) or model.lower().startswith(_REMOTE_MODELS):
        return note(f"{value} is a network drive", probe)
    if name.startswith(("vd", "xvd")):  # checked first because virtual disks often claim to be rotational
        return note(f"{value} is a virtual disk", probe)
    if _text(block / "queue/rotational") == "1":
        return warning(f"{value} is a rotating disk", "use a folder on an NVMe drive")
    if not name.startswith(("nvme", "dm-", "md")):  # dm and md devices consist of other drives
        return note(f"{value} is not an NVMe drive", probe)
    return ok(value)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


@check("bandwidth")
def bandwidth(at: Folder) -> Finding:
    """Bandwidth of the drive, recorded by infinityd from its own measurements, `infinity probe` and runs."""
    profile = at.daemon.bandwidth(at.place)
    if profile is None:
        probe = f"infinity probe {shlex.quote(at.place)}"
        if at.daemon.state is None:
            return note("unknown, because infinityd is not running", f"infinityd &, then {probe}")
        return note("not measured", probe)
    rates = [(load, profile.get(load)) for load in ("read", "write", "mixed")]
    known = ", ".join(f"{load} {rate / 1e9:.2f} GB/s" for load, rate in rates if isinstance(rate, int | float))
    return ok(known or "measured")


_FIRST: Final = "see the check `folder`"


def _there(world: World) -> list[Folder]:
    return [at for at in world.folders if folder.look(at).status is Status.OK]


@check("drives")
def drives(world: World) -> Finding:
    """Number of drives on which the folders are stored. Two folders on the same drive are no faster than one."""
    by_drive: dict[str, list[str]] = {}
    if not (there := _there(world)):
        return note("skipped: no folder is usable", _FIRST)
    for at in there:
        by_drive.setdefault(locate(at.place, world.root / "sys").drive.name, []).append(at.path)
    shared = [f"{' and '.join(paths)} ({name})" for name, paths in by_drive.items() if len(paths) > 1]
    if shared:
        return warning(f"on the same drive: {', '.join(shared)}", "use only one folder per drive")
    return ok("one" if len(by_drive) == 1 else f"{len(by_drive)}, with one folder each")


@check("largest model")
def largest_model(world: World) -> Finding:
    """Size of the largest model whose state fits into the free space, for AdamW with bf16 weights (two copies of 14
    bytes per parameter). Memory for the largest layer and training time may impose lower limits."""
    if not (there := _there(world)):
        return note("skipped: no folder is usable", _FIRST)
    free = {locate(at.place, world.root / "sys").file_system: space(at.place).free for at in there}
    billions = sum(free.values()) / _BYTES_PER_PARAMETER / 1e9
    return ok(f"about {billions:.2g} billion parameters (AdamW, bf16 weights), limited by free space")


STORAGE: Final = Group(
    "All folders",
    (drives, largest_model),
    (folder, in_use, file_system, direct, allocation, free_space, drive, bandwidth),
)
