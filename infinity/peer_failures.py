"""Failure propagation between the ranks of a run: if one rank fails, all ranks end and report its reason.

An error is raised only in the process of the failing rank. The other ranks wait for it in a collective: under gloo
until its process exits, under NCCL until the watchdog times out. Therefore every rank has a thread that looks for
failures every second.

[Note: how a failure travels] A failing rank publishes the reason in the store of the process group; the first reason
counts. A killed rank cannot publish a reason. The other ranks on its node check every second whether its process still
exists, and publish the reason on its behalf. A rank that closes normally leaves a note before it exits. The other
ranks raise the reason at their next access to a page. A thread that waits in a collective never gets there, and a
collective cannot be aborted (gloo does not support it). Therefore a process that has not closed after `GRACE_SECONDS`
is terminated.

[Note: heartbeats] If the ranks are on several nodes, a cut link, a dead host and a stopped process must be noticed,
too. The first rank of each node increases a number in the store every second. Rank 0 reads these numbers, and all other
ranks read the number of rank 0. If a number has not increased for the limit, they publish a failure. A rank that cannot
reach the store for the limit fails by itself. The ranks of a node check whether a process on this node is stopped,
because the heartbeats of its first rank continue. The heartbeats end when rank 0 leaves.

The exit of a process may close the store, for example because torchrun exits, too. Therefore a rank that fails waits
until the ranks on other nodes know the reason, and rank 0 waits until they know that it has left. To them, a closed
store is a failure.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from infinity.errors import LostRankError, is_lost_connection
from infinity.heartbeats import Silence, StoreAccess
from infinity.ranks import Ranks
from infinity.telemetry.stats_file import has_exited, is_stopped, process_start

_log = logging.getLogger("infinity")

GRACE_SECONDS = 10.0
"""Time, in seconds, within which a rank that knows of a failure must leave its collective and close."""
_LOOK_SECONDS = 1.0
_STORE_SECONDS = 5.0
_EXPLAIN_SECONDS = 5.0
_LONGEST_EXPLANATION = 60.0
_EXPLAIN_LOOKS = 5
"""Looks after the limit until all ranks know that a node has been given up."""
_LONGEST_REASON = 4000
_LEAVE_SECONDS = 0.1
_CLOSE_SECONDS = 0.5
"""Time, in seconds, between the closing of the first and the last socket of a process that exits."""
_HEARD_SECONDS = 30.0
"""Time, in seconds, in which ranks on other nodes must learn that rank 0 has left or that this rank has failed."""
_PATIENCE_SECONDS = 3.0
"""Minimum time, in seconds, after which an access to a store on another node is repeated on a new connection."""
_ALL_RANKS = -1
_LEFT = "left"
_FIX = "if it was only paused, raise run.heartbeat_timeout_seconds"


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Process of a rank, as known to the other ranks."""

    node: tuple[str, str]
    host: str
    pid: int
    started: int
    token: str
    hosts_store: bool
    """``True`` if the store of the process group is on this node."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    """State of this rank that an access to the store publishes."""

    failures: tuple[tuple[int, str], ...]
    """Failures: the rank (`_ALL_RANKS` if no rank has reported it itself) and the reason."""
    ended: tuple[tuple[int, int], ...]
    """Rank and process id of processes on this node that have exited."""
    heard: bool
    """``True`` if this rank knows that a rank has failed or that rank 0 has left."""
    leaving: bool
    beat: int
    """Heartbeat of this node."""
    watched: tuple[int, ...]
    """Ranks whose heartbeats are read."""


@dataclass(frozen=True, kw_only=True)
class _News:
    """State of the other ranks that an access to the store has read."""

    failed: str
    """First failure, or an empty string."""
    signs: dict[int, str]
    """Heartbeats by rank."""
    left: bool
    """Whether the store knows that this rank is leaving."""
    heard: bool
    """Whether all other ranks know of the failure, or that rank 0 has left."""


class Peers:
    """Reports failures of this rank to the other ranks, and failures of other ranks to this one.

    All ranks construct the object together. It watches until `leave`. With a single rank it does nothing. `_lock`
    guards `_reason` and `_leaving`, which this rank reports. Only the watching thread uses the other attributes until
    `_known` is set.
    """

    def __init__(self, ranks: Ranks, limit: float) -> None:
        """Start watching.

        Args:
            limit: time in seconds after which another node without a sign of life is given up.

        Raises:
            LostRankError: if the process group has been destroyed.
        """
        self._rank = ranks.rank
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        """Host name of each rank."""
        self._told: Callable[[LostRankError], None] | None = None  # see `tell`
        self._thread: threading.Thread | None = None
        if ranks.world_size == 1:
            return
        group = dist.group.WORLD
        if group is None:
            raise LostRankError("the process group has been destroyed")
        store = group.get_group_store()
        address = _address(store)
        pid = os.getpid()
        places = ranks.collect(
            _Place(
                node=_node(), host=socket.gethostname(), pid=pid, started=process_start(pid),
                token=secrets.token_hex(8), hosts_store=_is_local(address[0]),
            )
        )  # fmt: skip
        mine = places[ranks.rank].node
        self._prefix = f"infinity/{places[0].token}"  # prefix of this run's keys in the store
        self._places = places
        self.hosts = tuple(place.host for place in places)
        self._processes = {
            rank: place for rank, place in enumerate(places) if place.node == mine and rank != ranks.rank
        }
        """The other ranks on this node that have not exited."""
        first = {place.node: rank for rank, place in reversed(list(enumerate(places)))}  # of each node
        self._first = sorted(first.values())
        self._several = len(first) > 1
        self._store = _store_text(places, address)
        self._limit = limit
        patience = max(_PATIENCE_SECONDS, limit / 6) if self._several else math.inf
        self._access: StoreAccess[_News] = StoreAccess(store, patience, partial(accepts_connections, address))
        self._silence: Silence[tuple[str, int]] = Silence(limit)
        self._watched = [rank for rank in (self._first if ranks.rank == 0 else [0]) if rank != ranks.rank]
        processes = [("process", rank) for rank in self._processes]
        for watched in [("store", 0), *(("rank", rank) for rank in self._watched), *processes]:
            self._silence.saw(watched, 0)
        self._beat = 0
        self._rank0_left = False
        self._found = ""  # failure of another node or a stopped process, to be published
        self._left_at = 0.0  # time, from `time.monotonic`, at which the thread learned that this rank leaves
        self._lock = threading.Lock()
        self._reason: str | None = None  # failure of this rank, to be published
        self._leaving = False  # set when this rank leaves or the thread has ended
        self._failure: LostRankError | None = None  # failure of another rank
        self._deadline = 0.0  # time, from `time.monotonic`, at which this process is terminated unless it has closed
        self._known = threading.Event()  # set after `_failure`
        self._wake = threading.Event()  # set after `_reason` or `_leaving`, to wake the thread
        self._thread = threading.Thread(target=self._run, name="infinity-peers", daemon=True)
        self._thread.start()

    def tell(self, told: Callable[[LostRankError], None]) -> None:
        """Call `told` from the watching thread when another rank fails, or immediately if one has already failed."""
        self._told = told
        if self._thread is not None and self._failure is not None:
            told(self._failure)

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this rank fails with `error`. Never blocks."""
        if self._thread is None or isinstance(error, LostRankError):
            return
        with self._lock:
            if self._reason is None and not self._leaving:
                text = f"rank {self._rank}{self._on_host(self._rank)} failed: {type(error).__name__}: {error}"
                # File names may contain bytes that are not valid text, which the store rejects.
                self._reason = text[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
                self._wake.set()

    def explain(self, error: BaseException | None) -> LostRankError | None:
        """Return the failure of another rank that caused the lost connection `error`, or None if none is known."""
        if self._thread is None or not is_lost_connection(error):
            return None
        if not self._several:
            self._known.wait(_EXPLAIN_SECONDS)
            return self._failure
        # Count looks, because on a busy machine they take longer than a second.
        looks = math.ceil(min(self._limit, _LONGEST_EXPLANATION) / _LOOK_SECONDS) + _EXPLAIN_LOOKS
        last = self._beat + looks
        _log.info("waiting up to %d s for the cause of: %s", looks, error)
        while not self._known.wait(_LEAVE_SECONDS) and self._thread.is_alive() and self._beat < last:
            if self._rank0_left:
                break
        return self._failure

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Stop watching if the block, a part of the startup, fails.

        Raises:
            LostRankError: if a collective failed because another rank failed. It replaces the error from torch.
        """
        try:
            yield
        except BaseException as error:
            reason = self.explain(error)
            # `Ranks.together` has already reported an error, unlike an interrupt.
            self.leave(None if isinstance(error, Exception) else error)
            if reason is not None:
                raise reason from error
            raise

    def leave(self, error: BaseException | None) -> None:
        """Stop watching, because this rank ends normally or fails with `error`. Idempotent."""
        if self._thread is None:
            return
        orderly = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not orderly:
            self.report(error)
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
            self._wake.set()
        self._thread.join(_STORE_SECONDS + (_HEARD_SECONDS if self._several else _STORE_SECONDS))

    def _run(self) -> None:
        ended: list[tuple[int, int]] = []

        def sleep() -> None:
            self._wake.wait(_LOOK_SECONDS if not self._left_at else _LEAVE_SECONDS)
            self._wake.clear()
            for rank, place in list(self._processes.items()):
                if has_exited(place.pid, place.started):
                    del self._processes[rank]
                    ended.append((rank, place.pid))

        try:
            while not self._look(ended):
                sleep()
        except dist.DistError as error:
            # The process that hosts the store has exited.
            _log.debug("the store of the process group does not respond: %s", error)
            if not ended:
                sleep()  # connections close shortly before the process exits
            if self._failure is None:
                if self._several and not self._rank0_left and not self._leaving:
                    closed = f"{self._store} closed its connections (process killed, or host failed)"
                    self._give_up_on(self._died(*ended[0]) if ended else closed)
                elif ended:
                    # The process has possibly exited normally. This is not a failure, but may explain a later error.
                    self._learn(self._died(*ended[0]))
            while self._deadline and not self._leaving:
                self._check_deadline()
                sleep()
        finally:
            self._access.close()
            with self._lock:
                self._leaving = True  # no other thread will wake this one

    def _look(self, ended: list[tuple[int, int]]) -> bool:
        """Publish this rank's state and read the state of the others. Return ``True`` if the thread should end."""
        with self._lock:
            reason, leaving = self._reason, self._leaving
        self._silence.look()
        self._beat += 1
        failures = [(self._rank, reason or ""), (_ALL_RANKS, self._found)]
        message = _Message(
            failures=tuple((origin, text) for origin, text in failures if text),
            ended=tuple(ended),
            heard=self._failure is not None or self._rank0_left,
            leaving=leaving,
            beat=self._beat,
            watched=tuple(self._watched) if self._heartbeats else (),
        )
        news = self._access.run(partial(self._exchange, message), _LOOK_SECONDS)
        if news is not None:
            self._read(news)
        if leaving:
            self._left_at = self._left_at or time.monotonic()
            awaited = self._several and (reason is not None or self._rank == 0)
            done = news is not None and news.left and (news.heard or not awaited)
            patience = _HEARD_SECONDS if self._several and self._failure is None else _STORE_SECONDS
            return done or time.monotonic() - self._left_at > patience
        if self._heartbeats:
            self._give_up(news)
        self._check_deadline()
        return False

    @property
    def _heartbeats(self) -> bool:
        return self._several and not self._rank0_left and self._failure is None

    def _exchange(self, message: _Message, store: Any) -> _News:
        """Publish the state of this rank and read the state of the others. Called on a thread of `StoreAccess`."""
        prefix, rank = self._prefix, self._rank
        failures = list(message.failures)
        failures += [
            (other, self._died(other, pid))
            for other, pid in message.ended
            if not store.check([f"{prefix}/left/{other}"])
        ]
        for origin, text in failures:
            store.compare_set(f"{prefix}/failed", "", f"{origin} {text}")
        if message.leaving:
            store.set(f"{prefix}/left/{rank}", "")
        if self._several and (message.heard or message.leaving):
            store.set(f"{prefix}/heard/{rank}", "")
        if self._several and rank in self._first:
            store.set(f"{prefix}/alive/{rank}", _LEFT if message.leaving else str(message.beat))
        # A key is missing until the first heartbeat. Reading it would block.
        keys = [f"{prefix}/alive/{other}" for other in message.watched]
        if keys and not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        values = store.multi_get(keys) if keys else []
        return _News(
            failed=store.get(f"{prefix}/failed").decode() if store.check([f"{prefix}/failed"]) else "",
            signs={int(key.rpartition("/")[2]): value.decode() for key, value in zip(keys, values, strict=True)},
            left=message.leaving,
            heard=message.leaving and store.check([f"{prefix}/heard/{other}" for other in range(len(self._places))]),
        )

    def _read(self, news: _News) -> None:
        for rank, sign in news.signs.items():
            if sign == _LEFT:
                self._silence.forget(("rank", rank))
                self._rank0_left |= rank == 0
            else:
                self._silence.saw(("rank", rank), int(sign))
        if self._failure is None and news.failed:
            origin, _, text = news.failed.partition(" ")
            if int(origin) == _ALL_RANKS:
                self._give_up_on(text)
            elif int(origin) != self._rank:
                self._fail(text)

    def _give_up(self, news: _News | None) -> None:
        """Give up the store and other nodes if they are silent, and stopped processes on this node."""
        silence = self._silence
        if news is not None:
            silence.saw(("store", 0), self._beat)
        for rank, place in self._processes.items():
            if not is_stopped(place.pid):
                silence.saw(("process", rank), self._beat)
        if (seconds := silence.given_up(("store", 0))) and self._failure is None:
            why = f"(host down, link cut, or process stopped); {_FIX}"
            self._give_up_on(f"no sign of life from {self._store} for {seconds:.0f} s {why}")
        # Heartbeats that could not be read do not count as missing.
        for rank in self._watched if news is not None else []:
            if seconds := silence.given_up(("rank", rank)):
                self._found = (
                    f"no sign of life from rank {rank} on host {self._places[rank].host} for {seconds:.0f} s "
                    f"(host down, link cut, or process stopped); {_FIX}"
                )
        for rank, place in self._processes.items():
            if seconds := silence.given_up(("process", rank)):
                self._found = (
                    f"rank {rank} (process {place.pid}) on host {place.host} has been stopped for {seconds:.0f} s "
                    f"(SIGSTOP, Ctrl-Z or a debugger); {_FIX}"
                )

    def _give_up_on(self, text: str) -> None:
        _log.error("%s", text)  # a rank in a collective would report it only when the process is terminated
        self._fail(text)

    def _fail(self, text: str) -> None:
        """Raise an error with `text` on this rank, and terminate the process if it does not close."""
        self._deadline = time.monotonic() + GRACE_SECONDS
        failure = self._learn(text)
        if self._told is not None:
            self._told(failure)

    def _check_deadline(self) -> None:
        if self._failure is not None and time.monotonic() > self._deadline:
            _log.critical(
                "%s; rank %d is still waiting in a collective after %.0f s and will be terminated",
                self._failure, self._rank, GRACE_SECONDS,
            )  # fmt: skip
            os._exit(1)

    def _died(self, rank: int, pid: int) -> str:
        return (
            f"rank {rank} (process {pid}){self._on_host(rank)} exited unexpectedly (killed, out of memory, or crashed)"
        )

    def _on_host(self, rank: int) -> str:
        return f" on host {self._places[rank].host}" if self._several else ""

    def _learn(self, text: str) -> LostRankError:
        self._failure = LostRankError(text)
        self._known.set()
        return self._failure


def _node() -> tuple[str, str]:
    """Return an identifier that is equal for all processes that can see each other's process ids."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not readable in some containers
        machine = socket.gethostname()
    return machine, os.readlink("/proc/self/ns/pid")


def _address(store: Any) -> tuple[str, int]:
    """Return the host and port of a store; ("", 0) if it does not use the network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", ""), getattr(store, "port", 0)


def accepts_connections(address: tuple[str, int]) -> bool:
    """Return whether a store that has closed a connection still accepts others."""
    time.sleep(_CLOSE_SECONDS)
    with suppress(OSError), socket.create_connection(address, _STORE_SECONDS):
        return True
    return False


def _is_local(host: str) -> bool:
    """Return whether a host name or address belongs to this node."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM) if host else ():
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)  # only possible with an address of this node
                return True
    return False


def _store_text(places: Sequence[_Place], address: tuple[str, int]) -> str:
    """Return a phrase that names the store of the process group."""
    ranks = [rank for rank, place in enumerate(places) if place.hosts_store]
    if len({places[rank].node for rank in ranks}) == 1:
        return f"the store of the process group on host {places[ranks[0]].host} (rank {ranks[0]})"
    return (
        f"the store of the process group at {address[0]}:{address[1]}"
        if address[0]
        else "the store of the process group"
    )
