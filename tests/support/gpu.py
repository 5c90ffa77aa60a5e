"""A plugin of pytest, for `make gpu-test`: without a GPU nothing passes as skipped; torch's sanitizer knows blocks."""

from __future__ import annotations

import traceback
from bisect import bisect_left, insort
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer as sanitizer


class WholeBlocks(sanitizer._TensorsAccessed):
    """What the sanitizer knows of memory by its address: it forgets all of a block that is freed.

    Torch's forgets the first address alone. What was done to a view further inside, such as one gradient of an FSDP
    module, is
    then held against the next tensor that begins there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[int] = []
        """All addresses, in order."""
        self._blocks: set[int] = set()
        """Those at which a block that the allocator has given out begins."""

    def create_tensor(self, data_ptr: int, stack_trace: traceback.StackSummary | None) -> None:
        """Know a block, or a view inside of one where there is no trace."""
        super().create_tensor(data_ptr, stack_trace)
        insort(self._known, data_ptr)
        if stack_trace is not None:
            self._blocks.add(data_ptr)

    def delete_tensor(self, data_ptr: int) -> None:
        """Forget a block, and all inside of it."""
        first = bisect_left(self._known, data_ptr)
        behind = first + 1
        if data_ptr in self._blocks:
            while behind < len(self._known) and self._known[behind] not in self._blocks:
                behind += 1
        for address in self._known[first:behind]:
            super().delete_tensor(address)
        del self._known[first:behind]
        self._blocks.discard(data_ptr)


def see_views() -> None:
    """Let the sanitizer of this process, if there is one, know of whole blocks."""
    tracing: Any = sanitizer.cuda_sanitizer
    if tracing.enabled:
        tracing.dispatch.event_handler.tensors_accessed = WholeBlocks()


def pytest_configure() -> None:
    """Refuse to begin without a GPU."""
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"torch {torch.__version__} sees no GPU: nothing was tested")
    see_views()
