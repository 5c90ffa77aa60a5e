"""Folders that the state may lie in: each by itself, and all together."""

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
from infinity_tools.doctor.finding import Group, Status, Verdict, check, note, ok, problem, warning
from infinity_tools.doctor.world import Folder, World

_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "gpfs", "beegfs", "afs")
)
_IN_MEMORY = frozenset(("tmpfs", "ramfs", "hugetlbfs", "devtmpfs"))
_LOCAL: Final = "name a folder on an ext4 or XFS file system of a local NVMe drive"
_OTHER: Final = "name another folder"
_FREE: Final = "remove earlier runs with `infinity store rm`, or name another folder"
_REMOTE_MODELS = ("amazon elastic block store", "nvme_card-pd", "msft nvme accelerator")
_TRIAL_BYTES: Final = MIB
_LITTLE_SPACE: Final = 10 * GIB
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_BYTES_PER_PARAMETER: Final = 2 * 14  # AdamW, bf16 weights: the state as it is trained, and that of the checkpoint

_libc = ctypes.CDLL(None, use_errno=True)


@check("folder")
def folder(at: Folder) -> Verdict:
    """Whether the folder is there and this user may write to it, or it can be made: a run makes a folder, but not
    those that it lies in."""
    path, place = at.path, at.place
    if not at.exists and os.path.lexists(path):
        return problem("is not a folder", _OTHER)
    if not os.path.isdir(place):
        return problem(f"cannot be made: {place} is not a folder", f"mkdir -p {shlex.quote(place)}, or mount the drive")
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
            fix = f"as root: install -d {owner} {shlex.quote(path)}"  # makes it, or gives it to this user
        elif error.errno in _FULL:
            fix = _FREE
        return problem(f"takes no file: {error.strerror}", fix)
    return ok("is there, and writable" if at.exists else "will be made by the run")


@check("in use")
def in_use(at: Folder) -> Verdict:
    """Whether a run that is alive has the folder: a second one is refused until it ends."""
    try:
        held = holders(at.path) if at.exists else []
    except InfinityError as error:
        return warning(f"nobody can tell: {error}", _LOCAL)
    if held:
        return note(f"by {'; '.join(dict.fromkeys(map(str, held)))}", "wait for it to end, or name another folder")
    return ok("by no run")


@check("file system")
def file_system(at: Folder) -> Verdict:
    """The type of the file system. Best are ext4 and XFS on a local drive. One in memory takes the memory that the
    host cache should have, and ends with the machine; those over a network, and overlays of containers, are slow."""
    kind = mount_of(at.place, at.root / "proc/self/mountinfo").kind
    if not os.statvfs(at.place).f_blocks:
        return problem(f"{kind} is memory, and has no size", _LOCAL)
    if kind in _IN_MEMORY:
        return warning(f"{kind} is in memory: the state takes memory, and ends with it", _LOCAL)
    if kind in _NETWORK or kind.startswith("fuse."):
        return warning(f"{kind} is not local: pages take the way over another machine or process", _LOCAL)
    if kind == "overlay":
        return warning("overlay: the layers of a container", "docker run -v /nvme0:/nvme0, and name a folder there")
    if kind in ("btrfs", "zfs", "bcachefs"):
        return note(f"{kind} copies what is written over, which costs speed", _LOCAL)
    return ok(kind)


@check("direct")
def direct(at: Folder) -> Verdict:
    """Whether transfers go to the drive directly (O_DIRECT), tried with a block that is written and read, and to what
    they must be aligned. Without it they go through the page cache, which costs memory and speed."""
    with at.trial() as file:
        if not file.direct:
            return warning("no O_DIRECT: transfers go through the page cache", _LOCAL)
        if file.alignment > DEFAULT_ALIGNMENT:
            return problem(f"transfers must be aligned to {file.alignment} bytes, pages are to 4096", _LOCAL)
        written, found = transfer_memory(DEFAULT_ALIGNMENT), transfer_memory(DEFAULT_ALIGNMENT)
        written[:] = os.urandom(len(written))
        try:
            os.pwritev(file.fd, [written], 0)
            os.preadv(file.fd, [found], 0)
        except OSError as error:
            if error.errno in _FULL:
                return note("not tried: there is no space", _FREE)
            return problem(f"a direct transfer of 4 KiB fails: {error.strerror}", f"see `dmesg`, or {_LOCAL}")
        if written != found:
            return problem("what is read is not what was written", f"see `dmesg`, and {_LOCAL}")
        return ok(f"O_DIRECT, aligned to {file.alignment} bytes")


@check("allocation")
def allocation(at: Folder) -> Verdict:
    """Whether the file system reserves blocks without writing them (fallocate). Where it does not, the start of a run
    writes every block of its data files once."""
    with at.trial() as file:
        if _libc.fallocate(file.fd, 0, ctypes.c_long(0), ctypes.c_long(_TRIAL_BYTES)) == 0:
            return ok("blocks are reserved at once")
        code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return warning("no fallocate: a start writes all blocks of its files", _LOCAL)
    fix = "ulimit -f unlimited" if code == errno.EFBIG else _FREE
    return problem(f"no blocks can be reserved: {os.strerror(code)}", fix)


@check("space")
def free_space(at: Folder) -> Verdict:
    """What is free for users, less what infinityd has reserved for runs that begin. A run needs its state twice: as it
    is trained, and as it is in the checkpoint that is kept."""
    found = space(at.place)
    name = locate(at.place, at.root / "sys").drive.name
    reserved = sum(one["bytes"] for one in (at.daemon.status or {}).get("reservations", ()) if one["device"] == name)
    left = max(0, found.free - reserved)
    value = f"{format_size(left)} free of {format_size(found.capacity)}"
    if reserved:
        value += f", besides {format_size(reserved)} reserved by runs that begin"
    if left < _LITTLE_SPACE:
        return (warning if left > MIB else problem)(value, _FREE)
    return ok(value)


@check("drive")
def drive(at: Folder) -> Verdict:
    """The drive that the folder is on. Local NVMe drives are what infinity is made for; disks that rotate are far too
    slow for pages, and what virtual disks and drives over a network give is not known before it is measured."""
    place = locate(at.place, at.root / "sys")
    name, block = place.drive.name, at.root / "sys/class/block" / place.drive.name
    probe = f"measure it: infinity probe {shlex.quote(at.place)}"
    if place.in_memory:
        return note("memory, no drive", _LOCAL)
    if not block.exists():
        return note(f"not told by the kernel ({name})", probe)
    model = " ".join(_text(block / "device/model").split())
    value = f"{name} ({model})" if model else name
    if name.startswith("zram"):
        return warning(f"{value} is memory, compressed", _LOCAL)
    if name.startswith("loop"):
        return note(f"{value} is a file that is mounted", _LOCAL)
    if name.startswith(("nbd", "rbd", "drbd")) or model.lower().startswith(_REMOTE_MODELS):
        return note(f"{value} is reached over a network", probe)
    if name.startswith(("vd", "xvd")):  # which often say that they rotate
        return note(f"{value} is a virtual disk", probe)
    if _text(block / "queue/rotational") == "1":
        return warning(f"{value} rotates", "name a folder on an NVMe drive")
    if not name.startswith(("nvme", "dm-", "md")):  # the last two are made of others
        return note(f"{value} is no NVMe drive", probe)
    return ok(value)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


@check("bandwidth")
def bandwidth(at: Folder) -> Verdict:
    """What the drive gives, as infinityd keeps it from `infinity probe`, from runs or from its own measurements."""
    profile = at.daemon.bandwidth(at.place)
    if profile is None:
        probe = f"infinity probe {shlex.quote(at.place)}"
        if at.daemon.status is None:
            return note("not kept, as no infinityd runs", f"infinityd &, then {probe}")
        return note("not measured", probe)
    rates = [(load, profile.get(load)) for load in ("read", "write", "mixed")]
    known = ", ".join(f"{load} {rate / 1e9:.2f} GB/s" for load, rate in rates if isinstance(rate, int | float))
    return ok(known or "measured")


_FIRST: Final = "see the check `folder`"


def _there(world: World) -> list[Folder]:
    """Return the folders that can be used."""
    return [at for at in world.folders if folder.look(at).status is Status.OK]


@check("drives")
def drives(world: World) -> Verdict:
    """Whether each folder is on a drive of its own. Two folders on one drive are no faster than one."""
    by_drive: dict[str, list[str]] = {}
    if not (there := _there(world)):
        return note("not looked at: no folder can be used", _FIRST)
    for at in there:
        by_drive.setdefault(locate(at.place, world.root / "sys").drive.name, []).append(at.path)
    shared = [f"{' and '.join(paths)} ({name})" for name, paths in by_drive.items() if len(paths) > 1]
    if shared:
        return warning(f"on one drive: {', '.join(shared)}", "name one folder for each drive")
    return ok("one" if len(by_drive) == 1 else f"{len(by_drive)}: one for each folder")


@check("largest model")
def largest_model(world: World) -> Verdict:
    """The largest model that the free space has room for, with AdamW and bf16 weights: 14 bytes per parameter, twice.
    Space is one limit; the memory for the largest layer, and time, are others."""
    if not (there := _there(world)):
        return note("not looked at: no folder can be used", _FIRST)
    free = {locate(at.place, world.root / "sys").file_system: space(at.place).free for at in there}
    billions = sum(free.values()) / _BYTES_PER_PARAMETER / 1e9
    return ok(f"at most about {billions:.2g} billion parameters (AdamW, bf16), by space")


STORAGE: Final = Group(
    "All folders",
    (drives, largest_model),
    (folder, in_use, file_system, direct, allocation, free_space, drive, bandwidth),
)
