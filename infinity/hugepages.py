"""Memory in huge pages, where the kernel supports them.

For transfers: a request from memory in 4 KiB pages consists of hundreds of physical segments, which drives split into
several commands; from huge pages it is a single segment (`make bench-io`). For tensors: FSDP2 allocates the weights and
gradients of every FSDP module again in each pass, and the kernel clears the memory page by page.
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
    """Let torch allocate CPU tensors of 2 MiB and more in huge pages, unless the user has configured this already.

    It must be called before torch allocates its first tensor, because torch reads the variable then.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def transfer_memory(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed, populated private memory. `nbytes` must be a multiple of 4096.

    The memory is unmapped with its last view. A forked child sees zeros.

    Raises:
        OSError, ValueError, OverflowError: if there is not enough memory.
    """
    area, start = _mapped(nbytes)
    with contextlib.suppress(OSError):  # without this, the kernel copies pinned memory at fork
        area.madvise(_MADV_WIPEONFORK)
    memory = memoryview(area)[start : start + nbytes]
    try:
        area.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError:  # before Linux 5.14
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 0
    return memory


def block(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of zeroed private memory that is returned to the kernel with its last view.

    Use it for large, short-lived buffers. The heap of the C library would need one contiguous block, which freed small
    blocks do not provide, so the process would grow by the size of the buffer permanently.

    Raises:
        OSError, ValueError, OverflowError: if there is not enough memory.
    """
    area, start = _mapped(nbytes)
    return memoryview(area)[start : start + nbytes]


def _mapped(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory for `nbytes` bytes in huge pages, and return it with the offset of the first byte."""
    # The slack, which is never touched, allows the memory to start at a huge page boundary.
    area = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE, start, align_down(nbytes, _HUGE_PAGE))
    return area, start
