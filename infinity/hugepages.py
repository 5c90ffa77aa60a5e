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

from infinity.units import MIB, align_down

_HUGE_PAGE = 2 * MIB
_MADV_POPULATE_WRITE = 23
_MADV_WIPEONFORK = 18


def use_for_tensors() -> None:
    """Let PyTorch allocate CPU tensors of 2 MiB or more in huge pages, unless the user has already configured this.

    Call this function before PyTorch allocates its first tensor, because PyTorch reads the environment variable at
    that time.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def transfer_memory(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed, populated private memory. `nbytes` must be a multiple of 4096.

    The memory is unmapped when its last view is released. A forked child process sees zeros.

    Raises:
        OSError, ValueError, OverflowError: if there is not enough memory.
    """
    area, start = _mapped(nbytes)
    with contextlib.suppress(OSError):  # otherwise the kernel copies pinned memory at fork
        area.madvise(_MADV_WIPEONFORK)
    memory = memoryview(area)[start : start + nbytes]
    try:
        area.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError:  # before Linux 5.14
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 0
    return memory


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
