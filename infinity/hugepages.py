"""Memory in huge pages, where the kernel has them.

For transfers: a request from memory in 4 KiB pages is hundreds of runs of physical memory, which drives split into
several commands; from huge pages it is one (`make bench-io`). For tensors: FSDP2 allocates the weights and gradients of
every FSDP module anew, and the kernel clears what it hands out, page by page.
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
    """Let torch allocate CPU tensors of 2 MiB and more in huge pages; a user's own choice stays.

    Works until torch allocates its first tensor: that is when it looks.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def transfer_memory(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed private memory, a multiple of 4096, all of them present.

    It is unmapped when the last view of it is gone. A child that is forked has zeroes there.

    Raises:
        OSError, ValueError, OverflowError: there is not so much memory.
    """
    area, start = _mapped(nbytes)
    with contextlib.suppress(OSError):  # children that are forked see zeroes: else the kernel copies what is pinned
        area.madvise(_MADV_WIPEONFORK)
    memory = memoryview(area)[start : start + nbytes]
    try:
        area.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError:  # before Linux 5.14
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 0
    return memory


def block(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed private memory that the kernel has back as soon as the last view of it is gone.

    For what is large and needed for an instant. From the heap of the C library it would have to be one piece, which
    many small ones that were freed do not make up, so that the process would grow by it, and keep it.

    Raises:
        OSError, ValueError, OverflowError: there is not so much memory.
    """
    area, start = _mapped(nbytes)
    return memoryview(area)[start : start + nbytes]


def _mapped(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory for `nbytes` bytes in huge pages; return it, and where in it they begin."""
    # The slack, of which nothing is touched, lets the memory start where a huge page may.
    area = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE, start, align_down(nbytes, _HUGE_PAGE))
    return area, start
