"""What the C library keeps of freed memory: what the largest FSDP module needs, and no more however many FSDP modules
there are.

FSDP2 allocates and frees the weights and gradients of every FSDP module in every pass. glibc by itself does one of two
things,
both bad: it gives large blocks back to the kernel, which then clears their pages anew for every FSDP module (a third of
a
step, `make bench-step`), or it keeps them in a heap that creeps, because a freed aligned block is not found again for a
request of the same size: peak memory grows with the number of layers (by 1 to 6 bytes per parameter, measured).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from infinity.units import MIB

CREEP_BYTES = 64 * MIB
"""How much more than FSDP modules need may be kept, before all that is free is given back."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = (1 << 31) - 1
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 * MIB, _M_TRIM_THRESHOLD: 64 * MIB}
"""What glibc has by itself in a process that has freed large blocks; once told anything, it adapts nothing any more."""
_bounded: weakref.WeakSet[FreedMemory] = weakref.WeakSet()
"""Of all runs of this process that have not ended."""


@dataclass(slots=True)
class _Need:
    """What an FSDP module needs; changed where it has begun with nothing kept."""

    base: int = 0
    """Resident bytes of the process when it began."""
    grown: int = 0
    """Bytes by which the process has grown meanwhile, the last time."""


class FreedMemory:
    """Lets the C library keep freed memory, in blocks of any size, while the process is as large as FSDP modules need
    it.

    Life cycle: measuring, in the first step, where every FSDP module begins with nothing kept: how large the process is
    when a
    FSDP module has ended is what it needs. Then bounding: the process may be larger by `CREEP_BYTES` than the largest
    FSDP module
    needs it; an FSDP module that needs more, seen after all was given back, raises that. What FSDP modules of one size
    free fits the
    next one. But where an FSDP module needs more than is kept, as the head of a language model does behind its layers,
    what is
    kept may be of no use to it: it is given back before, if the process would become too large beside it. So it is at
    the beginning of a step whatever is kept: the many pieces that the head has left do not always fit the gather of its
    weights, and once in a step costs little.

    The reduction of a root with a large vocabulary gives back what is free too (`private.reuse_reduce_buffers`), so
    that what the FSDP module before it needs may come out lower than it is: less is kept then.

    Only glibc can be told so; others keep what they keep. Everything is read and changed by the training thread.
    """

    def __init__(self) -> None:
        libc = _glibc()
        self._keeps = bool(libc and libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
        """Whether the C library is glibc and has taken the settings."""
        self._largest = resident_bytes()
        """Resident bytes of the process that the largest FSDP module needs, as far as that is known; at first those at
        the
        start."""
        self._needs: dict[Hashable, _Need] = {}
        """What FSDP modules need, by what `bound` was told of them."""
        self._running = _Need()
        """Of the FSDP module that runs."""
        self._measuring = False
        """Whether the last call of `bound` measured."""
        self._emptied = False
        """Whether the last call of `bound` has given back what was free."""
        _bounded.add(self)

    def close(self) -> None:
        """Let the C library give back again what is freed, unless another run goes on. Idempotent."""
        _bounded.discard(self)
        if self._keeps and not _bounded:
            _forget()
            give_back()

    def bound(self, fsdp_module: Hashable = None, *, measure: bool = False, first: bool = False) -> None:
        """Give all freed memory back if the process is larger than it has to be. Once per FSDP module, from one thread.

        Args:
            FSDP module: names what begins: it needs about as much each time.
            measure: whether to see how large it has to be, and to give back what is free at every call meanwhile.
            first: whether a step begins with this FSDP module.
        """
        if not self._keeps:
            return
        resident = resident_bytes()
        if measure and not self._measuring:
            self._largest = 0
            self._needs.clear()
        elif self._emptied:  # so all that has been allocated since is of one FSDP module
            self._largest = max(self._largest, resident)
            self._running.grown = resident - self._running.base
        self._measuring = measure
        self._running = need = self._needs.setdefault(fsdp_module, _Need(base=resident))
        limit = self._largest + CREEP_BYTES
        useless = first or resident - need.base + CREEP_BYTES < need.grown
        self._emptied = measure or resident > limit or (useless and resident + need.grown > limit)
        if self._emptied:
            give_back()
            need.base = resident_bytes()


def _forget() -> None:
    """Have the C library keep what it keeps by itself: nobody bounds it any more."""
    if libc := _glibc():
        for name, value in _USUAL.items():
            libc.mallopt(name, value)


def _in_child() -> None:
    if _bounded:  # it trains nothing, as a worker that loads data
        _forget()


os.register_at_fork(after_in_child=_in_child)


def give_back() -> None:
    """Give all that is free in the heap of the C library back to the kernel, where it is glibc."""
    if libc := _glibc():
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library, if it can be told what to keep."""
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return libc


def resident_bytes() -> int:
    """Return how many bytes of this process are in memory."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)
