"""What the tests of `infinity.io` share besides fixtures."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infinity.io import DataFile, Engine, PacedEngine, ThreadEngine, UringEngine
from infinity.io.ring import RingRefusedError
from support.fault_engine import FaultEngine

KINDS = ("io_uring", "threads", "faulty-io_uring", "faulty-threads", "paced-io_uring", "paced-threads")
BLOCK = 4096
PATIENCE = 300.0
"""Seconds after which a transfer is called lost."""


class _Paced(PacedEngine):
    """All its files have a rate, which is high enough for a test."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rates: dict[str, float] = {}

    def open(self, path: str, *, create: bool = False) -> DataFile:
        file = super().open(path, create=create)
        self._rates[os.path.dirname(path)] = 2e8
        self.pace(self._rates)
        return file


def make_engine(kind: str, *, depth: int = 8, request: int = 64 << 10) -> Engine:
    """Start an engine by the name that tests give it; skip where the kernel refuses it."""
    if kind.startswith("faulty-"):
        return FaultEngine(make_engine(kind.removeprefix("faulty-"), depth=depth, request=request), 0)
    if kind.startswith("paced-"):
        return _Paced(make_engine(kind.removeprefix("paced-"), depth=depth, request=request))
    if kind == "threads":
        return ThreadEngine(depth, request)
    try:
        return UringEngine(depth, request)
    except RingRefusedError as error:
        pytest.skip(str(error))


@contextmanager
def mapped(size: int) -> Iterator[memoryview]:
    """Page-aligned zeroed memory; unmapping it fails if an engine still holds on to it."""
    area = mmap.mmap(-1, size)
    view = memoryview(area)
    yield view
    view.release()
    area.close()


def open_descriptors() -> int:
    """Return the number of open descriptors, garbage of earlier tests collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
