"""Helpers for tests of `infinity.io`."""

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

KINDS = (
    *("io_uring", "threads", "paced-threads"),
    *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("paced-io_uring", "faulty-io_uring", "faulty-threads")),
)
BLOCK = 4096
PATIENCE = 300.0
"""Seconds after which a transfer counts as lost."""


class _Paced(PacedEngine):
    """A paced engine whose files all have a rate limit, which is high enough for tests."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rates: dict[str, float] = {}

    def open(self, path: str, *, create: bool = False) -> DataFile:
        file = super().open(path, create=create)
        self._rates[os.path.dirname(path)] = 1e9
        self.pace(self._rates)
        return file


def make_engine(kind: str, *, depth: int = 8, request: int = 64 << 10) -> Engine:
    """Start an engine of one of `KINDS`. Skip the test if the operating system does not allow io_uring."""
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
    """Yield page-aligned zeroed memory. Unmapping it fails if an engine still references it."""
    area = mmap.mmap(-1, size)
    view = memoryview(area)
    yield view
    view.release()
    area.close()


def open_descriptors() -> int:
    """Return the number of open descriptors after a garbage collection."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
