"""Check of the I/O engine."""

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
    "docker run --security-opt seccomp=FILE, where the profile FILE allows io_uring_setup, io_uring_enter and "
    "io_uring_register"
)


@check("io_uring")
def io_uring(world: World) -> Verdict:
    """Availability of io_uring, tested as in a run. Without it, `storage.engine = "auto"` uses threads, which need more
    CPU time. Docker's default seccomp profile does not allow io_uring."""
    try:
        Ring(StorageConfig().queue_depth + 1).close()
    except RingRefusedError as error:
        return warning(f'{error}; engine = "auto" uses threads', _remedy(error.errno, world))
    return ok('allowed; engine = "auto" uses it unless threads are faster')


def _remedy(code: int, world: World) -> str:
    if code == errno.EPERM and (world.read("proc/sys/kernel/io_uring_disabled") or "0") != "0":
        return "as root: sysctl kernel.io_uring_disabled=0"
    if code in (errno.ENOSYS, errno.EINVAL):
        old = release(platform.release()) < _OLDEST_KERNEL
        if code == errno.EINVAL or old or world.own("Seccomp") != "2":
            return (
                "use Linux 6.1 or newer"
                if code == errno.EINVAL
                else "use Linux 5.6 or newer, built with CONFIG_IO_URING"
            )
    if code == errno.ENOMEM:
        return "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return _ALLOW


ENGINE: Final = Group("Engine", (io_uring,))
