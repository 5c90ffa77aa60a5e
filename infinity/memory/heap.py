"""What the C library keeps of freed memory: enough for the next unit, and no more however many units there are.

FSDP2 allocates and frees the weights and gradients of every unit in every pass. glibc by itself does one of two things,
both bad: it gives large blocks back to the kernel, which then clears their pages anew for every unit (a third of a
step, `make bench-step`), or it keeps them in a heap that creeps, because a freed aligned block is not found again for a
request of the same size: peak memory grows with the number of layers (by 1 to 6 bytes per parameter, measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from infinity.units import MIB

KEPT_BYTES = 256 * MIB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 * MIB
_NEVER = (1 << 31) - 1


class FreedMemory:
    """Lets the C library keep freed memory until the process has grown by `KEPT_BYTES`; only glibc, no other.

    Blocks of more than 32 MiB always go back to the kernel at once: glibc has no way to keep them.
    """

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.malloc_trim.argtypes = [ctypes.c_size_t]
            if libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER):
                self._libc = libc
        self._least = _resident_bytes()

    def bound(self) -> None:
        """Give all freed memory back if the process has grown too far. To be called once per unit, from one thread."""
        if self._libc is None:
            return
        resident = _resident_bytes()
        self._least = min(self._least, resident)
        if resident > self._least + KEPT_BYTES:
            self._libc.malloc_trim(0)
            self._least = _resident_bytes()


def _resident_bytes() -> int:
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)
