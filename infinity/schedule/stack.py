"""Bytes that a stack of pages moves if it has too few cache slots. Pure, as the planner is.

[Note: a stack] Backward first needs the tensors that forward kept last. Therefore the latest pages stay in their cache
slots, and the oldest page is written as soon as fewer than `SPARE_CACHE_SLOTS` would be left for the next pages. No
other policy moves fewer bytes: each page that does not fit is written once and read once. In backward, pages are read
ahead in reverse order as cache slots become free. If tensors are needed in another order, the content is the same and
only more bytes move.

A tensor may be kept again for another layer, e.g. the output of an encoder for each layer of a decoder. It then moves
to the top of the stack, because backward needs it from there on, and stays in its cache slots between these uses if it
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from infinity.content.format import Role
from infinity.content.layout import PAGE_ALIGNMENT, Page

SPARE_CACHE_SLOTS: Final = 2
"""Number of cache slots for pages that are being written and for the next pages."""
LEAST_CACHE_SLOTS: Final = 2 * SPARE_CACHE_SLOTS
"""Minimum number of cache slots of a stack."""

_PARTS: Final = 4
"""Number of page lengths from one power of two to the next. With these lengths, a page of more than 16 KiB is at most a
quarter longer than its content, and pages are reused for batches of another length.
"""


def page_lengths(nbytes: int, page_bytes: int) -> list[int]:
    """Return the page lengths for a tensor of a number of bytes. All pages except the last have `page_bytes`.

    The last page has the next of a few lengths, see `_PARTS`.
    """
    whole, rest = divmod(nbytes, page_bytes)
    if not rest:
        return [page_bytes] * whole
    step = max(PAGE_ALIGNMENT, (1 << (rest - 1).bit_length()) // (2 * _PARTS))
    return [page_bytes] * whole + [min(-(-rest // step) * step, page_bytes)]


def activation_page(number: int, nbytes: int) -> Page:
    """Return a page of a number of bytes that belongs to no FSDP module."""
    return Page(index=number, role=Role.ACTIVATION, fsdp_module=0, segment=0, start=0, count=0, nbytes=nbytes)


def moved_bytes(pages: Sequence[int], tensors: int, cache_slots: int) -> int:
    """Return the number of bytes of a stack that forward writes, and that backward reads.

    Args:
        pages: sizes of the pages of one tensor, in bytes, in their order.
        tensors: number of such tensors that are kept.
        cache_slots: number of cache slots for all of them.
    """
    whole, part = divmod(max(0, tensors * len(pages) - (cache_slots - SPARE_CACHE_SLOTS)), len(pages))
    return whole * sum(pages) + sum(pages[:part])
