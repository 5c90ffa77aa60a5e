"""Limit on the freed memory that the C library keeps: as much as the largest FSDP module needs.

FSDP2 allocates and frees the weights and gradients of every FSDP module in every pass. By default, glibc handles this
in one of two ways, both of them bad. It may return large blocks to the operating system, which must then zero fresh
memory for every module (this takes a third of the step time, `make bench-step`). Or it may keep the blocks in a heap
that grows, because glibc often fails to reuse a freed aligned block for a later aligned request of the same size.
Peak memory then grows with the number of layers (by 1 to 6 bytes per parameter in measurements). With this limit,
memory does not depend on the number of layers.
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
"""Number of bytes that may be kept beyond the need of the FSDP modules before all free memory is returned."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = (1 << 31) - 1
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 * MIB, _M_TRIM_THRESHOLD: 64 * MIB}
"""Values that glibc selects by itself in a process that has freed large blocks. After a `mallopt` call, it no longer
adapts them.
"""
_bounded: weakref.WeakSet[FreedMemory] = weakref.WeakSet()
"""Limits of all open runs of this process."""


@dataclass(slots=True)
class _Need:
    """Memory that an FSDP module needs, measured from a state in which no freed memory is kept."""

    base: int = 0
    """Resident set size of the process before the module runs, in bytes."""
    grown: int = 0
    """Number of bytes by which the process grew when the module was last measured."""


class FreedMemory:
    """Limit on the freed memory that the C library keeps, for blocks of any size.

    The limit is measured in the first step: all free memory is returned before each FSDP module, so the size of the
    process after the module is the size that the module needs. Afterwards, the process may exceed the need of the
    largest module by `CREEP_BYTES`. If a later measurement finds that a module needs more, the limit increases.

    A module can reuse memory that a module of the same size has freed. A module that needs more than is kept, such as
    the head of a language model after its layers, may not be able to use the kept memory. Therefore all free memory
    is returned before such a module if the process would otherwise become too large. The same applies at the
    beginning of a step: the many small pieces that the head leaves may not fit the gather of its weights, and
    returning them once per step costs little.

    Reducing the gradients of a root with a large vocabulary also returns free memory
    (`torch_private.reuse_reduce_buffers`), so the measured need of the preceding module may be too low. In that case
    less memory is kept.

    Only glibc supports this; other C libraries are left unchanged. Only the training thread uses the attributes.
    """

    def __init__(self) -> None:
        libc = _glibc()
        self._keeps = bool(libc and libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
        """``True`` if the C library is glibc and has accepted the settings."""
        self._largest = resident_bytes()
        """Resident set size that the process needs for the largest FSDP module known so far, in bytes; initially the
        current size.
        """
        self._needs: dict[Hashable, _Need] = {}
        """Measured needs, by the key passed to `bound`."""
        self._running = _Need()
        """Need of the FSDP module that is currently running."""
        self._measuring = False
        """``True`` if the last call of `bound` was a measurement."""
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
        """Return all freed memory to the operating system if the process is larger than necessary.

        Call this method once per FSDP module, from one thread.

        Args:
            fsdp_module: key of the FSDP module that is about to run. The module is assumed to need about the same
                amount of memory each time.
            measure: measure the need of the module. Free memory is then returned at every call.
            first: whether this FSDP module is the first of a step.
        """
        if not self._keeps:
            return
        resident = resident_bytes()
        if measure and not self._measuring:
            self._largest = 0
            self._needs.clear()
        elif self._emptied:  # all allocations since then belong to a single FSDP module
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
    if libc := _glibc():
        for name, value in _USUAL.items():
            libc.mallopt(name, value)


def _in_child() -> None:
    if _bounded:  # a forked child process, such as a data loader worker, does not train
        _forget()


os.register_at_fork(after_in_child=_in_child)


def give_back() -> None:
    """Return all free memory in the C library's heap to the operating system, if the C library is glibc."""
    if libc := _glibc():
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return libc


def resident_bytes() -> int:
    """Return the resident set size of this process in bytes."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)
