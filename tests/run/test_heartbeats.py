"""Tests of `Silence` with a fake clock, of `StoreAccess` with a store that blocks, and of both in `Peers`.

`tests/nodes/test_failed_nodes.py` tests them with nodes and links, which requires root.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from infinity import peer_failures
from infinity.errors import LostRankError
from infinity.heartbeats import _ATTEMPTS, Silence, StoreAccess
from infinity.ranks import Ranks
from infinity.run import run_directory
from support.processes import fork_server
from support.ranks import PATIENCE
from support.separate_nodes import node
from support.session import Session
from support.tables import alternate

LIMIT = 15.0


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def look(silence: Silence[str], clock: Clock, looks: int, *, every: float = 1.0, alive: str = "") -> None:
    """Look a number of times, with a sign of life of `alive` at each."""
    for _ in range(looks):
        clock.now += every
        silence.look()
        if alive:
            silence.saw(alive, int(clock.now * 10))


def test_silent_process_is_given_up_after_the_limit() -> None:
    silence: Silence[str] = Silence(LIMIT, clock := Clock())
    silence.saw("a", 1)
    silence.saw("b", 1)
    look(silence, clock, 15, alive="b")
    assert [silence.given_up(key) for key in ("a", "b", "unknown")] == [0, 0, 0]
    look(silence, clock, 1, alive="b")
    assert [silence.given_up(key) for key in ("a", "b", "unknown")] == [16, 0, 0]


def test_sign_of_life_must_increase() -> None:
    """An access that was pending for long returns an old sign of life."""
    silence: Silence[str] = Silence(LIMIT, clock := Clock())
    silence.saw("a", 7)
    look(silence, clock, 10)
    silence.saw("a", 7)
    silence.saw("a", 5)
    look(silence, clock, 10)
    assert silence.given_up("a") == 20
    silence.saw("a", 8)
    assert not silence.given_up("a")


@pytest.mark.parametrize(("every", "looks"), [(0.5, 32), (4.0, 4)])
def test_slow_looks_count(every: float, looks: int) -> None:
    silence: Silence[str] = Silence(LIMIT, clock := Clock())
    silence.saw("a", 1)
    look(silence, clock, looks, every=every)
    assert silence.given_up("a") == 16


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    silence: Silence[str] = Silence(LIMIT, clock := Clock())
    silence.saw("a", 1)
    look(silence, clock, 10)
    look(silence, clock, 1, every=3600)
    assert not silence.given_up("a")
    look(silence, clock, 5)
    assert silence.given_up("a")


def test_forgotten_process_is_not_given_up() -> None:
    silence: Silence[str] = Silence(LIMIT, clock := Clock())
    silence.saw("a", 1)
    silence.forget("a")
    look(silence, clock, 100)
    assert not silence.given_up("a")


class Store:
    """A store whose clones share its state. Accesses through `Store.access` block until `open` is set."""

    def __init__(self) -> None:
        self.clones = 0
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)

    def clone(self) -> Store:
        self.clones += 1
        return self

    def access(self, value: str) -> Callable[[Any], str]:
        """Return an access that returns `value`."""

        def access(store: Store) -> str:
            store.begun.release()
            store.open.wait()
            return value

        return access


@pytest.fixture
def store() -> Any:
    """A store that no thread waits for after the test."""
    store = Store()
    yield store
    store.open.set()


def test_accesses_reuse_a_connection(store: Store) -> None:
    access: StoreAccess[str] = StoreAccess(store, 3.0, lambda: False, Clock())
    store.open.set()
    assert [access.run(store.access(value), 900) for value in "abc"] == ["a", "b", "c"]
    assert store.clones == 1
    access.close()


def test_blocked_access_is_repeated_on_a_new_connection(store: Store) -> None:
    access: StoreAccess[str] = StoreAccess(store, 3.0, lambda: False, clock := Clock())
    begun = 0
    for second in range(100):
        assert access.run(store.access(str(second)), 0) is None
        expected = min(second // 4 + 1, _ATTEMPTS)  # one access every four seconds, because 3 s do not exceed 3 s
        while begun < expected:
            assert store.begun.acquire(timeout=900)
            begun += 1
        clock.now += 1
    assert not store.begun.acquire(timeout=0)
    assert store.clones == _ATTEMPTS
    store.open.set()
    # All attempts end; afterwards, one of their threads serves the next accesses.
    while access.run(store.access("after"), 900) != "after":
        pass
    assert store.clones <= _ATTEMPTS + 1
    access.close()


def test_lost_connection_is_reported_only_if_no_other_is_pending(store: Store) -> None:
    def lost(_: Any) -> str:
        gone.wait()
        raise RuntimeError("closed")

    gone = threading.Event()
    access: StoreAccess[str] = StoreAccess(store, 3.0, lambda: False, clock := Clock())
    assert access.run(lost, 0) is None
    clock.now += 4
    assert access.run(store.access("new"), 0) is None
    assert store.begun.acquire(timeout=900)
    gone.set()
    while access._pending > 1:
        time.sleep(0.01)
    store.open.set()
    clock.now = 0.0  # start no further access
    assert access.run(store.access("unused"), 900) == "new"
    with pytest.raises(RuntimeError, match="closed"):
        access.run(lost, 900)
    access.close()


@pytest.mark.parametrize(("losses", "accepts"), [(1, True), (1, False), (2, True)])
def test_access_is_repeated_once_if_the_store_accepts_connections(losses: int, accepts: bool, store: Store) -> None:
    def lost(_: Any) -> str:
        begun.append(1)
        if len(begun) <= losses:
            raise RuntimeError("closed")
        return "new"

    begun: list[int] = []
    store.open.set()
    access: StoreAccess[str] = StoreAccess(store, 3.0, lambda: accepts, Clock())
    assert access.run(store.access("first"), 900) == "first"
    if losses == 1 and accepts:
        assert access.run(lost, 900) == "new"
    else:
        with pytest.raises(RuntimeError, match="closed"):
            access.run(lost, 900)
    assert (len(begun), store.clones) == ((2, 2) if accepts else (1, 1))
    access.close()


def test_connection_that_was_reset_is_replaced() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    accepts = partial(peer_failures.accepts_connections, ("127.0.0.1", store.port))
    access: StoreAccess[int] = StoreAccess(store, 900, accepts)
    assert access.run(lambda connection: connection.add("beats", 1), 900) == 1
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == store.port:
            with socket.fromfd(connection.fd, socket.AF_INET, socket.SOCK_STREAM) as client:
                client.shutdown(socket.SHUT_RDWR)
    assert access.run(lambda connection: connection.add("beats", 1), 900) == 2
    access.close()


def test_closed_port_accepts_no_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert peer_failures.accepts_connections(address)
    assert not peer_failures.accepts_connections(address)
    assert not peer_failures.accepts_connections(("", 0))


def watch(rank: int, folder: str, stopped: bool) -> None:
    """Watch the other rank as if it was on another node, and write the reported failure to a file."""

    def told(error: Exception) -> None:
        Path(folder, f"partial{rank}").write_text(str(error))
        Path(folder, f"partial{rank}").rename(Path(folder, f"told{rank}"))

    peer_failures._node = lambda: ("node", str(rank))
    peer_failures.GRACE_SECONDS = PATIENCE
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    peers = peer_failures.Peers(Ranks(rank, 0, 2), 5.0)
    peers.tell(told)
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_stopped_rank_on_another_node_is_reported(stopped: int, tmp_path: Path) -> None:
    """The stopped rank learns that it was given up when it continues."""
    processes = [fork_server().Process(target=watch, args=(rank, str(tmp_path), rank == stopped)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for rank in (1 - stopped, stopped):
            file = tmp_path / f"told{rank}"
            end = time.monotonic() + PATIENCE
            while not file.exists():
                assert time.monotonic() < end
                time.sleep(0.02)
            assert file.read_text().startswith(f"no sign of life from rank {stopped} on host ")
            os.kill(processes[stopped].pid, signal.SIGCONT)
    finally:
        for process in processes:
            process.kill()
            process.join()


def start(rank: int, folder: str, stage: str, failure: int) -> None:
    """Start a run as a rank on a node of its own. Rank 1 fails in a stage of the startup. The log is a file."""
    logging.basicConfig(filename=f"{folder}/log{rank}", format="%(message)s")
    peer_failures._node = lambda: ("node", str(rank))
    peer_failures.GRACE_SECONDS = 1.0
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    if rank == 1:
        setattr(run_directory, stage, lambda *_: os.kill(os.getpid(), failure))
    with node(folder) as place:
        try:
            Session(place, run={"resume": "auto", "heartbeat_timeout_seconds": 5})
        except LostRankError as error:
            logging.getLogger("infinity").error("raised: %s", error)
            raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "failure"), alternate(["make_paths", "choose_run"], [signal.SIGSTOP, signal.SIGKILL])
)
def test_node_that_fails_while_the_run_is_looked_for_is_reported(stage: str, failure: int, tmp_path: Path) -> None:
    """The other rank waits in a collective. If the rank is stopped, its process is terminated."""
    ranks = [fork_server().Process(target=start, args=(rank, str(tmp_path), stage, failure)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        ranks[0].join(PATIENCE)
        assert ranks[0].exitcode == 1
        log = (tmp_path / "log0").read_text()
        assert "no sign of life from rank 1 on host node1 for " in log
        assert ("raised: no sign of life" in log) == (failure == signal.SIGKILL)
    finally:
        for process in ranks:
            process.kill()
            process.join()
