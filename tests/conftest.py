"""What all tests share: ranks that stay alive, one thread per process. Nothing here loads torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from support.ranks import RankPool

settings.register_profile("default", settings.get_profile("default"), deadline=None)  # a busy machine is no failure
settings.load_profile("default")
settings.register_profile("fuzz", max_examples=5000, deadline=None)
if "support.gpu" not in sys.modules:
    # `make test` is the same everywhere: what has room on a GPU would not be paged. `make gpu-test` uses it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A job in the background of a script ignores Ctrl-C, and so would all processes that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup does the same to the end of a terminal


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # loaded when tests are collected, if any of them needs it
    if torch is None:
        yield
        return
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
