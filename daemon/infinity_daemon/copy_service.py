"""Requests of ranks to copy checkpoints to other nodes.

A registration ends with the process of the client.

    {"op": "copies_join", "run_id": "…", "rank": 0, "token": "…"}
    {"op": "copies_start", "run_id": "…", "rank": 0, "identity": "…", "manifest": "…", "roots": ["…"], "target": "…",
     "peers": [{"rank": 1, "address": "…"}], "nodes": 2, "rate": 0}     serve a checkpoint and copy its peers
    {"op": "copies_progress", "run_id": "…", "rank": 0}
    {"op": "copies_stop", "run_id": "…", "rank": 0}                     end serving and copying
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from prometheus_client.core import Metric as Family

from infinity.errors import ConfigError, InfinityError
from infinity.schema import Rule, integer, printable, record, sequence, text
from infinity_daemon.collectors import Sample, family_of
from infinity_daemon.copy_channel import RANK, RUN_ID, Channel, Ends
from infinity_daemon.copy_pull import Contributor, Job, Pull
from infinity_daemon.copy_server import IDENTITY, SIZE, CopyServer, Served, host_and_port
from infinity_daemon.copy_source import Source
from infinity_daemon.daemon_config import CopiesConfig
from infinity_daemon.log import event
from infinity_daemon.requests import Answer, absolute_path
from infinity_daemon.reservations import Owner

_THREADS: Final = 8
_MAX_REGISTRATIONS: Final = 256


@dataclass(eq=False, kw_only=True)
class _Registration(Served):
    """Rank whose checkpoints are served and copied."""

    owner: Owner
    pull: Pull | None = None
    task: asyncio.Task[None] | None = None
    """Copy in progress, or the last one."""
    identity: str = ""
    """Identity of the last checkpoint of which a copy was requested."""
    copied: str = ""
    """Identity of the last checkpoint of which the copy is complete."""
    error: str = ""
    """Error of the last copy."""
    earlier: int = 0
    """Bytes of pages that copies before the last one have received."""
    succeeded: float = 0.0
    """Unix time of the last complete copy, or 0."""


class Copies:
    """Copies of the checkpoints of the ranks on this node. All methods run on the event loop, except `families`."""

    def __init__(self, settings: CopiesConfig, is_alive: Callable[[Owner], bool], *, several: bool) -> None:
        """Initialize. `several` is True if the daemon serves several users."""
        self._is_alive, self._several = is_alive, several
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        """Locks of the parity files, because a copy may still write after it has been cancelled."""
        self._ranks: dict[tuple[str, int], _Registration] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "copies")
        self._server = CopyServer(settings, lambda run_id, rank: self._ranks.get((run_id, rank)), self._threads)
        self.ops: dict[str, tuple[Rule, Callable[..., Awaitable[Answer]]]] = {
            "copies_join": (record(run_id=RUN_ID, rank=RANK, token=text("[0-9a-f]{64}")), self._join),
            "copies_start": (
                record(
                    run_id=RUN_ID,
                    rank=RANK,
                    identity=IDENTITY,
                    manifest=absolute_path,
                    roots=sequence(absolute_path, least=1, most=64),
                    target=absolute_path,
                    peers=sequence(record(Contributor, rank=RANK, address=printable(1, 300)), least=1, most=1024),
                    nodes=integer(2, 1025),
                    rate=SIZE,
                ),
                self._start,
            ),
            "copies_progress": (record(run_id=RUN_ID, rank=RANK), self._progress),
            "copies_stop": (record(run_id=RUN_ID, rank=RANK), self._stop),
        }
        """For each request over the Unix socket: the rule that validates its keys, and its handler."""

    async def start(self) -> None:
        """Listen for the daemons of other nodes, if `copies.host` is set. Raises `ConfigError`."""
        await self._server.start()

    async def stop(self) -> None:
        """End all copies and connections."""
        tasks = [registration.task for registration in self._ranks.values() if registration.task is not None]
        for names in list(self._ranks):
            self._forget(names)
        await asyncio.gather(*tasks, self._server.stop(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def expire(self) -> None:
        """End the registrations of ranks whose process no longer exists."""
        for (run_id, rank), registration in list(self._ranks.items()):
            if not self._is_alive(registration.owner):
                event(logging.INFO, "copies.expired", run=run_id, rank=rank, pid=registration.owner.pid)
                self._forget((run_id, rank))

    def _forget(self, names: tuple[str, int]) -> None:
        registration = self._ranks.pop(names)
        registration.source = None
        if registration.task is not None:
            registration.task.cancel()

    async def _join(self, owner: Owner, run_id: str, rank: int, token: str) -> Answer:
        if not self._server.address:
            raise ConfigError(
                "copies.host of infinityd is not set on this node. Set it to the interface that connects the nodes, "
                'e.g. host = "eth1"'
            )
        if self._several:
            raise ConfigError("infinityd with server.group does not copy checkpoints. Start one for this user.")
        if not owner.pid:
            raise ConfigError(
                "infinityd cannot see the process of this rank. Run both in one PID namespace, e.g. with --pid=host."
            )
        self.expire()
        names = run_id, rank
        if (found := self._ranks.get(names)) is not None:
            if found.owner != owner:
                raise ConfigError(f"rank {rank} of run {run_id} has already joined (pid {found.owner.pid})")
            self._forget(names)
        if len(self._ranks) >= _MAX_REGISTRATIONS:
            raise ConfigError(f"the limit of {_MAX_REGISTRATIONS} ranks that copy checkpoints is reached")
        self._ranks[names] = _Registration(owner=owner, token=bytes.fromhex(token))
        return {"address": self._server.address}

    async def _start(
        self,
        owner: Owner,
        run_id: str,
        rank: int,
        identity: str,
        manifest: str,
        roots: Sequence[str],
        target: str,
        peers: Sequence[Contributor],
        nodes: int,
        rate: int,
    ) -> Answer:
        registration = self._own(owner, run_id, rank)
        if len({peer.rank for peer in peers} - {rank}) != nodes - 1 or len(peers) != nodes - 1:
            raise ConfigError(f"a copy over {nodes} nodes needs {nodes - 1} different peers")
        for peer in peers:
            host_and_port(peer.address)
        if registration.identity == identity and _busy(registration):  # the client repeats a request
            return {}
        job = Job(identity=identity, target=Path(target), contributors=peers, nodes=nodes, rate=rate)
        registration.identity, registration.error, registration.source = identity, "", None
        if registration.task is not None:
            registration.task.cancel()
        if registration.pull is not None:
            registration.earlier += registration.pull.received
            registration.pull = None
        work = self._copy(registration, Ends(run_id, rank, -1), job, Path(manifest), roots)
        registration.task = asyncio.create_task(work)
        return {}

    async def _progress(self, owner: Owner, run_id: str, rank: int) -> Answer:
        registration = self._own(owner, run_id, rank)
        pull, busy = registration.pull, _busy(registration)
        return {
            "busy": busy,
            "copied": registration.copied,
            "bytes": pull.received if pull else 0,
            "waited": pull.waited if pull and busy else 0.0,
            "error": registration.error,
        }

    async def _stop(self, owner: Owner, run_id: str, rank: int) -> Answer:
        registration = self._own(owner, run_id, rank)
        registration.source, registration.identity = None, ""
        if registration.task is not None:
            registration.task.cancel()
        return {}

    def _own(self, owner: Owner, run_id: str, rank: int) -> _Registration:
        registration = self._ranks.get((run_id, rank))
        if registration is None or registration.owner != owner:
            raise ConfigError(f"rank {rank} of run {run_id} has not joined. Send copies_join first.")
        return registration

    async def _copy(
        self, registration: _Registration, ends: Ends, job: Job, manifest: Path, roots: Sequence[str]
    ) -> None:
        """Serve a checkpoint, and copy the parts of its peers. Errors are recorded for the rank."""
        values = {"run": ends.run_id, "rank": ends.rank, "identity": job.identity}
        lock = self._locks.setdefault(job.target, asyncio.Lock())
        try:
            source = await asyncio.get_running_loop().run_in_executor(
                self._threads, Source, manifest, roots, job.identity, ends.run_id, ends.rank
            )
            registration.source = source

            async def connect(peer: Contributor) -> Channel:
                return await self._server.connect(peer.address, ends._replace(peer=peer.rank), registration.token)

            registration.pull = pull = Pull(job, source, connect, self._threads)
            async with lock:
                await pull.run()
        except Exception as error:  # also defects, so that the rank learns of them
            registration.error = _described(error)
            event(logging.WARNING, "copy.failed", **values, reason=registration.error)
        else:
            registration.copied, registration.succeeded = job.identity, time.time()
            event(logging.INFO, "copy.done", **values, bytes=pull.received)

    # Metrics #

    def families(self) -> Iterator[Family]:
        """Yield the metric families. Called by another thread."""
        found = list(self._ranks.items())

        def family(name: str, value: Callable[[_Registration], float]) -> Family:
            samples: Iterable[Sample] = (((run, str(rank)), value(each)) for (run, rank), each in found)
            return family_of(name, samples)

        yield family("copy_received_bytes_total", _received)
        yield family("copy_last_success_timestamp_seconds", lambda each: each.succeeded)
        yield family("copy_failed", lambda each: float(bool(each.error)))


def _received(registration: _Registration) -> float:
    return registration.earlier + (registration.pull.received if registration.pull else 0)


def _busy(registration: _Registration) -> bool:
    return registration.task is not None and not registration.task.done()


def _described(error: Exception) -> str:
    if isinstance(error, InfinityError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return f"{type(error).__name__}: {error}"
