"""What a stack of pages moves that has not enough cache slots. Pure, as the planner is.

[Note: a stack] What a forward keeps last is needed first. So what was kept last stays in its cache slots, and the
oldest is
written as soon as there would be fewer than `SPARE_CACHE_SLOTS` for what comes. Nothing moves fewer bytes: each page
that
does not fit is written once and read once. In backward the pages are read ahead in the reverse order, as cache slots
come
free. Where tensors are needed in another order, the same holds of each, and only more bytes move.

What is kept again, for another layer, as the output of an encoder is for each layer of a decoder, is on top of the
stack again: backward needs it from there on. So it stays in its cache slots between them, where it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from infinity.content.format import Role
from infinity.content.layout import PAGE_ALIGNMENT, Page

SPARE_CACHE_SLOTS: Final = 2
"""Cache slots that are for what is being written, and for what comes next."""
LEAST_CACHE_SLOTS: Final = 2 * SPARE_CACHE_SLOTS
"""Fewest cache slots of a stack."""

_PARTS: Final = 4
"""Lengths of pages from a power of two to the next one. A page of more than 16 KiB is longer than its content by a
quarter at most, and pages that batches of another length have left are used again."""


def page_lengths(nbytes: int, page_bytes: int) -> list[int]:
    """Return the lengths in bytes of the pages of a tensor of so many bytes: all but the last one are of `page_bytes`.

    The last one has the next of the few lengths that there are, see `_PARTS`.
    """
    whole, rest = divmod(nbytes, page_bytes)
    if not rest:
        return [page_bytes] * whole
    step = max(PAGE_ALIGNMENT, (1 << (rest - 1).bit_length()) // (2 * _PARTS))
    return [page_bytes] * whole + [min(-(-rest // step) * step, page_bytes)]


def activation_page(number: int, nbytes: int) -> Page:
    """Return a page of no FSDP module, of so many bytes."""
    return Page(index=number, role=Role.ACTIVATION, fsdp_module=0, segment=0, start=0, count=0, nbytes=nbytes)


def moved_bytes(pages: Sequence[int], tensors: int, cache_slots: int) -> int:
    """Return how many bytes of a stack are written in a forward, and read in its backward.

    Args:
        pages: sizes in bytes of those of a tensor, in their order.
        tensors: how many of these are kept.
        cache slots: for all of them.
    """
    whole, part = divmod(max(0, tensors * len(pages) - (cache_slots - SPARE_CACHE_SLOTS)), len(pages))
    return whole * sum(pages) + sum(pages[:part])
