"""Pytest plugin for `make gpu-test`: require a GPU, and make torch's CUDA sanitizer track allocator blocks."""

from __future__ import annotations

import traceback
from bisect import bisect_left, insort
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer as sanitizer


class BlockAccesses(sanitizer._TensorsAccessed):
    """Accesses by address, which are removed for an entire block when it is freed.

    Torch removes only the accesses of the first address. Accesses to a view inside of the block, such as a gradient of
    an FSDP module, are then attributed to the next tensor that begins at the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[int] = []
        """All addresses, sorted."""
        self._blocks: set[int] = set()
        """Addresses at which an allocated block begins."""

    def create_tensor(self, data_ptr: int, stack_trace: traceback.StackSummary | None) -> None:
        """Add a block or, without a stack trace, a view inside of a block."""
        super().create_tensor(data_ptr, stack_trace)
        insort(self._known, data_ptr)
        if stack_trace is not None:
            self._blocks.add(data_ptr)

    def delete_tensor(self, data_ptr: int) -> None:
        """Remove a block and all views inside of it."""
        first = bisect_left(self._known, data_ptr)
        end = first + 1
        if data_ptr in self._blocks:
            while end < len(self._known) and self._known[end] not in self._blocks:
                end += 1
        for address in self._known[first:end]:
            super().delete_tensor(address)
        del self._known[first:end]
        self._blocks.discard(data_ptr)


def track_blocks() -> None:
    """Make the sanitizer of this process, if it is enabled, track blocks."""
    tracing: Any = sanitizer.cuda_sanitizer
    if tracing.enabled:
        tracing.dispatch.event_handler.tensors_accessed = BlockAccesses()


def pytest_configure() -> None:
    """Raise an error without a GPU, so that the tests are not merely skipped."""
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"torch {torch.__version__} does not detect a GPU, so that no test can run")
    track_blocks()
