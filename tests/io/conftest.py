"""Fixtures with engines and files for the tests of `infinity.io`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.io import Engine
from support.engines import KINDS, make_engine


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Name of an I/O engine."""
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[Engine]:
    """A running engine of each kind, which is closed afterwards."""
    running = make_engine(kind)
    yield running
    running.close()


@pytest.fixture(scope="session")
def blob() -> bytes:
    """Four MiB of random bytes."""
    return os.urandom(4 << 20)


@pytest.fixture
def filled(tmp_path: Path, blob: bytes) -> str:
    """Path of a file that contains `blob`."""
    path = tmp_path / "filled"
    path.write_bytes(blob)
    return str(path)
