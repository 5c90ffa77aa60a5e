"""What the tests of the core share: ranks that stay alive, one thread per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from core_ranks import RankPool
from hypothesis import settings

settings.register_profile("default", settings.get_profile("default"), deadline=None)  # a busy machine is no failure
settings.load_profile("default")
settings.register_profile("fuzz", max_examples=5000, deadline=None)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()
