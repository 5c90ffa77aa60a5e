"""Memory in huge pages, if the operating system supports them.

For transfers: a request from memory in 4 KiB pages consists of hundreds of physical segments, which drives split into
several commands. A request from a huge page is a single segment (`make bench-io`). For tensors: FSDP2 allocates the
weights and gradients of every FSDP module again in each pass, and the operating system zeroes this memory page by
page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from infinity.units import MIB, align_down

_HUGE_PAGE = 2 * MIB
_MADV_POPULATE_WRITE = 23
_MADV_WIPEONFORK = 18
_POPULATED: Final = 128 * MIB
"""Bytes that a thread populates at a time."""
_POPULATING_THREADS: Final = 8
"""Maximum number of threads that populate memory. A single thread does not use the bandwidth of the memory."""
_MBIND, _GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}.get(platform.machine(), (-1, -1))
"""Numbers of system calls without a wrapper in the C library, or -1, which always fails."""
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_NODES: Final = 1024
"""Number of bits of a set of NUMA nodes."""


def use_for_tensors() -> None:
    """Let PyTorch allocate CPU tensors of 2 MiB or more in huge pages, unless the user has already configured this.

    Call this function before PyTorch allocates its first tensor, because PyTorch reads the environment variable at
    that time.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def transfer_memory(nbytes: int, node: int = -1) -> memoryview:
    """Return `nbytes` bytes of zeroed, populated private memory. `nbytes` must be a multiple of 4096.

    The memory is unmapped when its last view is released. A forked child process sees zeros.

    Args:
        node: NUMA node that provides the memory while it has free memory. -1: any node. A memory policy of the process
            (numactl) takes precedence.

    Raises:
        OSError, ValueError, OverflowError: if there is not enough memory.
    """
    area, start = _mapped(nbytes)
    with contextlib.suppress(OSError):  # otherwise the kernel copies pinned memory at fork
        area.madvise(_MADV_WIPEONFORK)
    memory = memoryview(area)[start : start + nbytes]
    libc, address = ctypes.CDLL(None, use_errno=True), ctypes.addressof(ctypes.c_char.from_buffer(area)) + start
    if node >= 0:
        _prefer(libc.syscall, address, nbytes, node)
    try:
        _populate(libc.madvise, address, nbytes)
    except (OSError, RuntimeError):  # before Linux 5.14, or if no thread can be started
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 0
    return memory


def _prefer(syscall: Callable[..., int], address: int, nbytes: int, node: int) -> None:
    """Allocate memory on a NUMA node, unless the process has a memory policy, or Linux does not support this."""
    policy, nodes = ctypes.c_int(), (ctypes.c_uint64 * (_NODES // 64))()
    nodes[node // 64] = 1 << node % 64
    none = ctypes.c_ulong(0)
    if syscall(_GET_MEMPOLICY, ctypes.byref(policy), None, none, None, none) or policy.value != _MPOL_DEFAULT:
        return
    size, count = ctypes.c_ulong(nbytes), ctypes.c_ulong(_NODES)
    syscall(_MBIND, ctypes.c_void_p(address), size, _MPOL_PREFERRED, nodes, count, 0)


def _populate(madvise: Callable[..., int], address: int, nbytes: int) -> None:
    """Populate memory on several threads. Unlike `mmap.madvise`, a call through ctypes releases the GIL."""

    def populate(offset: int) -> None:
        size = ctypes.c_size_t(min(_POPULATED, nbytes - offset))
        if madvise(ctypes.c_void_p(address + offset), size, _MADV_POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), "madvise")

    with ThreadPoolExecutor(min(_POPULATING_THREADS, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(populate, range(0, nbytes, _POPULATED)))


def block(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed private memory, which is unmapped when its last view is released.

    Use this function for large, short-lived buffers. On the C library's heap, such a buffer requires one contiguous
    block. Freed small blocks cannot provide it, so the process would permanently grow by the size of the buffer.

    Raises:
        OSError, ValueError, OverflowError: if there is not enough memory.
    """
    area, start = _mapped(nbytes)
    return memoryview(area)[start : start + nbytes]


def _mapped(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory for `nbytes` bytes in huge pages, and return it with the offset of the first usable byte."""
    # The additional memory, which is never touched, lets the block start at a huge page boundary.
    area = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # the kernel does not support huge pages
        area.madvise(mmap.MADV_HUGEPAGE, start, align_down(nbytes, _HUGE_PAGE))
    return area, start
