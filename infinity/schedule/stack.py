"""What a stack of pages moves that has not enough frames. Pure, as the planner is.

[Note: a stack] What a forward keeps last is needed first. So what was kept last stays in its frames, and the oldest is
written as soon as there would be fewer than `SPARE_FRAMES` for what comes. Nothing moves fewer bytes: each page that
does not fit is written once and read once. In backward the pages are read ahead in the reverse order, as frames come
free. Where tensors are needed in another order, or more than once, the same holds of each, and only more bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SPARE_FRAMES: Final = 2
"""Frames that are for what is being written, and for what comes next."""
LEAST_FRAMES: Final = 2 * SPARE_FRAMES
"""Fewest frames of a stack."""


def moved_bytes(pages: Sequence[int], frames: int) -> int:
    """Return how many bytes of a stack are written in a forward, and read in its backward.

    Args:
        pages: sizes in bytes, in the order in which they are kept.
        frames: for all of them.
    """
    return sum(pages[: max(0, len(pages) - (frames - SPARE_FRAMES))])
