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
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from infinity.errors import LostRankError, is_lost_connection
from infinity.ranks import Ranks
from infinity.telemetry.stats_file import has_exited, process_start

_log = logging.getLogger("infinity")

GRACE_SECONDS = 10.0
"""Time, in seconds, within which a rank that knows of a failure must leave its collective and close."""
_LOOK_SECONDS = 1.0
_STORE_SECONDS = 5.0
_EXPLAIN_SECONDS = 5.0
_LONGEST_REASON = 4000


class Peers:
    """Reports failures of this rank to the other ranks, and failures of other ranks to this one.

    All ranks construct the object together. It watches until `leave`. With a single rank it does nothing. `_lock`
    guards `_reason` and `_leaving`, which this rank reports. Only the watching thread uses `_failure` and `_deadline`
    until `_known` is set.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Start watching.

        Raises:
            LostRankError: if the process group has been destroyed.
        """
        self._rank = ranks.rank
        self._told: Callable[[LostRankError], None] | None = None  # see `tell`
        self._thread: threading.Thread | None = None
        if ranks.world_size == 1:
            return
        group = dist.group.WORLD
        if group is None:
            raise LostRankError("the process group has been destroyed")
        # Use a separate connection, so that calls do not wait for each other. PyTorch's type stubs lack `clone`.
        self._store = group.get_group_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        places = ranks.collect((_node(), os.getpid(), process_start(os.getpid()), secrets.token_hex(8)))
        self._prefix = f"infinity/{places[0][3]}"  # prefix of this run's keys in the store
        self._processes = {
            rank: (pid, started)
            for rank, (node, pid, started, _) in enumerate(places)
            if node == _node() and rank != ranks.rank
        }
        """(process id, start time) of each other rank on this node that has not exited, by rank."""
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
                text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
                # File names may contain bytes that are not valid text, which the store rejects.
                self._reason = text[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
                self._wake.set()

    def explain(self, error: BaseException | None) -> LostRankError | None:
        """Return the failure of another rank that caused the lost connection `error`, or None if none is known."""
        if self._thread is None or not is_lost_connection(error):
            return None
        self._known.wait(_EXPLAIN_SECONDS)
        return self._failure

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
        self._thread.join(2 * _STORE_SECONDS)

    def _run(self) -> None:
        ended: list[tuple[int, int]] = []

        def sleep() -> None:
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            for rank, (pid, started) in list(self._processes.items()):
                if has_exited(pid, started):
                    del self._processes[rank]
                    ended.append((rank, pid))

        try:
            while not self._look(ended):
                sleep()
        except RuntimeError as error:
            # The process that hosts the store has exited, possibly normally. This is not a failure, but may explain a
            # later error.
            _log.debug("the store of the process group does not respond: %s", error)
            if not ended:
                sleep()  # connections close shortly before the process exits
            if ended:
                self._learn(_died(*ended[0]))
        finally:
            with self._lock:
                self._leaving = True  # no other thread will wake this one

    def _look(self, ended: list[tuple[int, int]]) -> bool:
        """Publish this rank's state and read the state of the others. Return ``True`` if the thread should end."""
        with self._lock:
            reason, leaving = self._reason, self._leaving
        if reason is not None:
            self._post(self._rank, reason)
        if leaving:
            self._store.set(f"{self._prefix}/left/{self._rank}", "")
            return True
        for rank, pid in ended:
            if not self._store.check([f"{self._prefix}/left/{rank}"]):
                self._post(rank, _died(rank, pid))
        if self._failure is None and self._store.check([f"{self._prefix}/failed"]):
            origin, _, text = self._store.get(f"{self._prefix}/failed").decode().partition(" ")
            if int(origin) != self._rank:
                self._deadline = time.monotonic() + GRACE_SECONDS
                failure = self._learn(text)
                if self._told is not None:
                    self._told(failure)
        elif self._failure is not None and time.monotonic() > self._deadline:
            _log.critical(
                "%s; rank %d is still waiting in a collective after %.0f s and will be terminated",
                self._failure, self._rank, GRACE_SECONDS,
            )  # fmt: skip
            os._exit(1)
        return False

    def _post(self, origin: int, text: str) -> None:
        self._store.compare_set(f"{self._prefix}/failed", "", f"{origin} {text}")

    def _learn(self, text: str) -> LostRankError:
        self._failure = LostRankError(text)
        self._known.set()
        return self._failure


def _died(rank: int, pid: int) -> str:
    return f"rank {rank} (process {pid}) exited unexpectedly (killed, out of memory, or crashed)"


def _node() -> tuple[str, str]:
    """Return an identifier that is equal for all processes that can see each other's process ids."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not readable in some containers
        machine = socket.gethostname()
    return machine, os.readlink("/proc/self/ns/pid")
