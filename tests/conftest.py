"""Shared configuration of all tests. This module does not import torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support import processes
from support.ranks import RankPool

# Without a deadline, a busy machine does not fail a test.
settings.register_profile("default", settings.get_profile("default"), deadline=None)
settings.load_profile("default")
settings.register_profile("fuzz", max_examples=5000, deadline=None)
if "support.gpu" not in sys.modules:
    # `make test` hides the GPU, because modules that fit on it would not be paged. `make gpu-test` uses the GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A script's background job ignores SIGINT, and the processes that tests start would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes a process ignore SIGHUP


@pytest.fixture(scope="session", autouse=True)
def _single_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # already imported at collection if any test needs it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _server_environment() -> None:
    """Start the server of `fork_server` with the environment from before the first test."""
    processes.server_environment.update(os.environ)


@pytest.fixture(scope="session", autouse=True)
def _frozen_modules() -> Iterator[None]:
    """Exclude imported modules from garbage collection, because each pass over their objects takes about 0.4 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _no_node_folder() -> Iterator[None]:
    """Keep tests away from a daemon for several users on this machine."""
    config = sys.modules.get("infinity.config")  # already imported at collection if any test needs it
    if config is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "NODE_FOLDER", Path("/nonexistent/infinity"))
        yield


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Pool of two ranks that stay alive for the whole session."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted `Session`."""
    from support.session import reference

    return reference(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip the test without Ray, and keep Ray away from the home folder and from clusters of the user."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # `tmp_path` is too long for the paths of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("HOME", folder)
        yield
