"""Loop devices over a file in memory, as a fast or a very small drive. Linux, root only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_MKFS = {"xfs": ("mkfs.xfs", "-q"), "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0")}


class LoopDeviceError(RuntimeError):
    """A loop device cannot be set up. The message contains the reason."""


@contextmanager
def loop_device(size: int, *, filesystem: str = "xfs", backing: str = "/dev/shm") -> Iterator[Path]:
    """Mount a new file system on a loop device, and remove both on exit.

    Args:
        size: Size of the device in bytes. XFS needs at least 300 MiB.
        filesystem: ``xfs`` or ``ext4``.
        backing: Folder of the backing file. Files in ``/dev/shm`` are stored in memory.

    Yields:
        The mount point.

    Raises:
        LoopDeviceError: if the process is not root, a tool is missing, or the kernel rejects the device.
    """
    if os.geteuid() != 0:
        raise LoopDeviceError("a loop device requires root")
    make = _MKFS[filesystem]
    for tool in (make[0], "losetup", "mount"):
        if shutil.which(tool) is None:
            raise LoopDeviceError(f"{tool} is not installed")
    with ExitStack() as undo:
        handle, image = tempfile.mkstemp(prefix="infinity-loop-", dir=backing)
        undo.callback(os.unlink, image)
        os.truncate(handle, size)
        os.close(handle)
        # Without direct I/O every byte would pass through the page cache twice.
        device = _run("losetup", "--find", "--show", "--direct-io=on", image, fallback=("--direct-io=on",))
        undo.callback(_run, "losetup", "--detach", device)
        _run(*make, device)
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="infinity-mount-"))
        _run("mount", device, folder)
        undo.callback(_run, "umount", "--lazy", folder)
        yield Path(folder)


def _run(*command: str, fallback: tuple[str, ...] = ()) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and fallback:
        return _run(*(word for word in command if word not in fallback))
    if done.returncode:
        raise LoopDeviceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
