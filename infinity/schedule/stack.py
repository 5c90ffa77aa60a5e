"""Traffic of a stack of activation pages that has too few cache slots. Pure, like the planner.

[Note: a stack] Backward needs tensors in the reverse of the order in which forward kept them. Therefore the newest
pages stay in their cache slots, and the oldest page is written as soon as fewer than `SPARE_CACHE_SLOTS` slots would be
left for the next pages. No other policy transfers fewer bytes: each page that does not fit is written once and read
once. In backward, pages are prefetched in reverse order as cache slots become free. If backward needs tensors in a
different order, the results are still correct, but more bytes are transferred.

A tensor may be kept again for another layer. For example, each decoder layer keeps the output of the encoder. The
tensor then moves to the top of the stack, because backward needs it first, and if it fits, it stays in its cache slots
between its uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from infinity.content.format import Role
from infinity.content.layout import PAGE_ALIGNMENT, Page

SPARE_CACHE_SLOTS: Final = 2
"""Number of cache slots that are set aside for pages that are being written and for the next pages."""
LEAST_CACHE_SLOTS: Final = 2 * SPARE_CACHE_SLOTS
"""Minimum number of cache slots that a stack needs."""

_PARTS: Final = 4
"""Number of different page lengths between one power of two and the next. With these lengths, a page of more than 16
KiB is at most a quarter longer than its content, and batches of different lengths can reuse the same pages.
"""


def page_lengths(nbytes: int, page_bytes: int) -> list[int]:
    """Return the lengths of the pages for a tensor of `nbytes` bytes. All pages except the last are `page_bytes` long.

    The length of the last page is rounded up to one of a few values, see `_PARTS`.
    """
    whole, rest = divmod(nbytes, page_bytes)
    if not rest:
        return [page_bytes] * whole
    step = max(PAGE_ALIGNMENT, (1 << (rest - 1).bit_length()) // (2 * _PARTS))
    return [page_bytes] * whole + [min(-(-rest // step) * step, page_bytes)]


def activation_page(number: int, nbytes: int) -> Page:
    """Return a page of `nbytes` bytes that does not belong to any FSDP module."""
    return Page(index=number, role=Role.ACTIVATION, fsdp_module=0, segment=0, start=0, count=0, nbytes=nbytes)


def moved_bytes(pages: Sequence[int], tensors: int, cache_slots: int) -> int:
    """Return the number of bytes that forward writes, which is also the number of bytes that backward reads.

    Args:
        pages: sizes of the pages of one tensor in bytes, in order.
        tensors: number of tensors of this size that forward keeps.
        cache_slots: number of cache slots for all tensors.
    """
    whole, part = divmod(max(0, tensors * len(pages) - (cache_slots - SPARE_CACHE_SLOTS)), len(pages))
    return whole * sum(pages) + sum(pages[:part])
