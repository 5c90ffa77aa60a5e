"""How pages can be moved: io_uring or threads."""

from __future__ import annotations

import errno
import platform
from typing import Final

from infinity.config import StorageConfig
from infinity.io.ring import Ring, RingRefusedError
from infinity_tools.doctor.finding import Group, Verdict, check, ok, warning
from infinity_tools.doctor.software import release
from infinity_tools.doctor.world import World

_OLDEST_KERNEL = (5, 6)
_ALLOW: Final = (
    "docker run --security-opt seccomp=FILE, with a profile that allows io_uring_setup, io_uring_enter and "
    "io_uring_register"
)


@check("io_uring")
def io_uring(world: World) -> Verdict:
    """Whether the kernel lets this process move bytes with io_uring, tried as a run does; `storage.engine = "auto"`
    takes threads where it does not, which cost more of the processor. Docker's default profile forbids it."""
    try:
        Ring(StorageConfig().queue_depth + 1).close()
    except RingRefusedError as error:
        return warning(f'{error}; engine = "auto" takes threads', _remedy(error.errno, world))
    return ok('allowed; storage.engine = "auto" takes it, unless threads are faster')


def _remedy(code: int, world: World) -> str:
    """Return what lets io_uring be used where the kernel refused it."""
    if code == errno.EPERM and (world.read("proc/sys/kernel/io_uring_disabled") or "0") != "0":
        return "as root: sysctl kernel.io_uring_disabled=0"
    if code in (errno.ENOSYS, errno.EINVAL):
        old = release(platform.release()) < _OLDEST_KERNEL
        if code == errno.EINVAL or old or world.own("Seccomp") != "2":
            return "Linux 6.1 or newer" if code == errno.EINVAL else "Linux 5.6 or newer, built with CONFIG_IO_URING"
    if code == errno.ENOMEM:
        return "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return _ALLOW


ENGINE: Final = Group("Engine", (io_uring,))
