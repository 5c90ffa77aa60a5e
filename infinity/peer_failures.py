"""The other ranks of a run: what ends one of them ends all, with its reason.

A rank that fails raises in its own process only. The others wait for it in a collective: under gloo until its process
has ended, under NCCL until a watchdog's time-out. So every rank has one thread that sleeps until something happens.

[Note: how a failure travels] A rank that fails posts its reason in the store of the process group; the first one
counts. One that is killed posts nothing: the ranks beside it hold a descriptor of its process, which tells at once that
it has ended (where that is not allowed they look every second whether it is there), and post for it; of one that closed
in order before it ended, they find a note. Whoever finds a reason raises it from the next access to a page. A thread
that is still in a collective then never reaches one, and a collective cannot be called back (gloo has no abort), so a
process that has not closed after `GRACE_SECONDS` is ended.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from infinity.errors import LostRankError, is_lost_connection
from infinity.ranks import Ranks
from infinity.telemetry.stats_file import process_start

_log = logging.getLogger("infinity")

GRACE_SECONDS = 10.0
"""How long a rank that knows of a failure has, to leave the collective it may be in and to close."""
_LOOK_SECONDS = 1.0
_STORE_SECONDS = 5.0
_EXPLAIN_SECONDS = 5.0
_LONGEST_REASON = 4000


class Peers:
    """Tells the other ranks what ends this one, and this one what ended another; with a single rank, nothing to do.

    It watches from its construction, by all ranks together, until `leave`. `_lock` is held for what this rank has to
    tell (`_reason`, `_leaving`); what it has learnt (`_failure`, `_deadline`) is the thread's alone until `_known`.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Watch. Raises `LostRankError` where there is no process group any more."""
        self._rank = ranks.rank
        self._told: Callable[[LostRankError], None] | None = None  # see `tell`
        self._thread: threading.Thread | None = None
        if ranks.world_size == 1:
            return
        group = dist.group.WORLD
        if group is None:
            raise LostRankError("the process group has been destroyed")
        # A connection of its own, so that nobody waits for anybody; torch's type stubs lack it.
        self._store = group.get_group_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        places = ranks.collect((_node(), os.getpid(), process_start(os.getpid()), secrets.token_hex(8)))
        self._prefix = f"infinity/{places[0][3]}"  # of keys in the store: this run's own
        self._processes: dict[int, tuple[int, int]] = {}
        """Descriptors of the processes of the other ranks of this node: (rank, process id)."""
        self._watched: dict[int, tuple[int, int]] = {}
        """Those of them of which there is none, by rank: (process id, when it started)."""
        refused = ""
        for rank, (node, pid, started, _) in enumerate(places):
            if node == _node() and rank != ranks.rank:
                try:
                    self._processes[os.pidfd_open(pid)] = (rank, pid)
                except (OSError, AttributeError) as error:
                    # A seccomp profile, an old kernel, a Python built without it; or it has ended just now.
                    self._watched[rank] = (pid, started)
                    refused = getattr(error, "strerror", None) or str(error)
        if refused:
            _log.warning(
                "pidfd_open is refused (%s): whether other ranks of this node live is looked up in /proc every %.0f s",
                refused, _LOOK_SECONDS,
            )  # fmt: skip
        self._lock = threading.Lock()
        self._reason: str | None = None  # what ends this rank, to be posted
        self._leaving = False  # whether this rank ends, or the thread has
        self._failure: LostRankError | None = None  # what ended another rank
        self._deadline = 0.0  # when this process is ended if it has not closed by then, of `time.monotonic`
        self._known = threading.Event()  # set behind `_failure`
        # Descriptor that wakes the thread: there is something to tell, or to leave for.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="infinity-peers", daemon=True)
        self._thread.start()

    def tell(self, told: Callable[[LostRankError], None]) -> None:
        """Call `told` when another rank has ended, from a thread; at once if one has already."""
        self._told = told
        if self._thread is not None and self._failure is not None:
            told(self._failure)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that `error` ends this one. Never blocks."""
        if self._thread is None or isinstance(error, LostRankError):
            return
        with self._lock:
            if self._reason is None and not self._leaving:
                text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
                # Names of files may hold bytes that are no text, which the store refuses.
                self._reason = text[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
                os.eventfd_write(self._wake, 1)

    def explain(self, error: BaseException | None) -> LostRankError | None:
        """Return what ended the rank whose connection `error` says was lost; None if that is not known, or not it."""
        if self._thread is None or not is_lost_connection(error):
            return None
        self._known.wait(_EXPLAIN_SECONDS)
        return self._failure

    def leave(self, error: BaseException | None) -> None:
        """End the watch: this rank ends, in order or because of `error`. Idempotent."""
        if self._thread is None:
            return
        if error is not None and not _is_orderly(error):
            self.report(error)
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(2 * _STORE_SECONDS)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake, *self._processes):
            poll.register(descriptor, select.POLLIN)
        ended: list[tuple[int, int]] = []

        def sleep() -> None:
            for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    poll.unregister(descriptor)
                    ended.append(self._processes[descriptor])
            for rank, (pid, started) in list(self._watched.items()):
                if process_start(pid) != started:
                    del self._watched[rank]
                    ended.append((rank, pid))

        try:
            while not self._look(ended):
                sleep()
        except RuntimeError as error:
            # Its host has ended, perhaps in order: no ground to end this rank, but to explain what may follow.
            _log.debug("the store of the process group does not answer: %s", error)
            if not ended:
                sleep()  # connections are closed a moment before a process has ended
            if ended:
                self._learn(_died(*ended[0]))
        finally:
            for descriptor in self._processes:
                os.close(descriptor)
            with self._lock:
                self._leaving = True  # nobody wakes it any more
                os.close(self._wake)

    def _look(self, ended: list[tuple[int, int]]) -> bool:
        """Post what there is to post, see what others have posted; return whether this was the last time."""
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
                "%s; rank %d is still in a collective %.0f s later and is ended",
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
    return f"rank {rank} (process {pid}) has ended without a word: killed, out of memory, or crashed"


def _is_orderly(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _node() -> tuple[str, str]:
    """Return what processes share that see one another's process ids."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # a container may hide it
        machine = socket.gethostname()
    return machine, os.readlink("/proc/self/ns/pid")
