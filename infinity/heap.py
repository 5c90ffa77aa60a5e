"""Bound on the freed memory that the C library keeps: as much as the largest FSDP module needs.

FSDP2 allocates and frees the weights and gradients of every FSDP module in every pass. By default, glibc handles this
in one of two ways, and both are bad. It may return large blocks to the kernel, which then clears their pages again for
every module (a third of a step, `make bench-step`). Or it may keep them in a heap that grows, because a freed aligned
block is not found again for a request of the same size. Peak memory then grows with the number of layers (measured: 1
to 6 bytes per parameter). With the bound, memory does not depend on the number of layers.
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
"""Bytes that may be kept beyond the need of the FSDP modules before all free memory is returned."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = (1 << 31) - 1
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 * MIB, _M_TRIM_THRESHOLD: 64 * MIB}
"""Values that glibc uses by itself in a process that has freed large blocks. After any `mallopt` call, it no longer
adapts them."""
_bounded: weakref.WeakSet[FreedMemory] = weakref.WeakSet()
"""Bounds of all open runs of this process."""


@dataclass(slots=True)
class _Need:
    """Memory need of an FSDP module, measured when the module starts with no freed memory kept."""

    base: int = 0
    """Resident bytes of the process when the module started."""
    grown: int = 0
    """Bytes by which the process grew during the module's latest measured run."""


class FreedMemory:
    """Bound on the memory that the C library keeps after it has been freed, in blocks of any size.

    In the first step, the bound is measured: every FSDP module starts with no freed memory kept, so the size of the
    process after the module is the size that the module needs. Afterwards, the process may exceed the need of the
    largest module by `CREEP_BYTES`. A module that needs more, measured after all free memory was returned, raises the
    limit.

    Memory freed by one module fits the next module of the same size. A module that needs more than is kept, such as the
    head of a language model after its layers, may not be able to use the kept memory. Therefore all free memory is
    returned before such a module if the process would otherwise become too large. The same applies at the beginning of
    a step: the many pieces that the head leaves do not always fit the gather of its weights, and returning them once
    per step costs little.

    The reduction of a root with a large vocabulary also returns free memory (`torch_private.reuse_reduce_buffers`), so
    the measured need of the preceding module may be too low. In that case less memory is kept.

    Only glibc supports this; other C libraries are left unchanged. All attributes are used by the training thread only.
    """

    def __init__(self) -> None:
        libc = _glibc()
        self._keeps = bool(libc and libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
        """``True`` if the C library is glibc and has accepted the settings."""
        self._largest = resident_bytes()
        """Resident bytes of the process that the largest FSDP module needs, as far as known; initially the current
        size."""
        self._needs: dict[Hashable, _Need] = {}
        """Needs by the key passed to `bound`."""
        self._running = _Need()
        """Need of the FSDP module that is running."""
        self._measuring = False
        """``True`` if the last call of `bound` measured."""
        self._emptied = False
        """``True`` if the last call of `bound` returned the free memory."""
        _bounded.add(self)

    def close(self) -> None:
        """Restore the C library's default behavior, unless another run is open. Idempotent."""
        _bounded.discard(self)
        if self._keeps and not _bounded:
            _forget()
            give_back()

    def bound(self, fsdp_module: Hashable = None, *, measure: bool = False, first: bool = False) -> None:
        """Return all freed memory if the process is larger than necessary.

        Call it once per FSDP module, from one thread.

        Args:
            fsdp_module: key of the FSDP module that starts. It is assumed to need about the same memory each time.
            measure: measure the need of the module, and return the free memory at every call meanwhile.
            first: whether a step starts with this FSDP module.
        """
        if not self._keeps:
            return
        resident = resident_bytes()
        if measure and not self._measuring:
            self._largest = 0
            self._needs.clear()
        elif self._emptied:  # all allocations since then belong to one FSDP module
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
    """Restore the C library's default settings, because no run is open."""
    if libc := _glibc():
        for name, value in _USUAL.items():
            libc.mallopt(name, value)


def _in_child() -> None:
    if _bounded:  # a forked child, such as a data loader worker, does not train
        _forget()


os.register_at_fork(after_in_child=_in_child)


def give_back() -> None:
    """Return all free memory in the heap of the C library to the kernel, if the C library is glibc."""
    if libc := _glibc():
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return libc


def resident_bytes() -> int:
    """Return the resident set size of this process, in bytes."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)
