"""Lives of a training run, which are forked from processes that have imported torch. `crash` kills them.

A life consists of one process per rank, on this machine or on nodes (`support.nodes`) that each have a drive.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch._dynamo  # imported before lives are forked
import torch.distributed as dist

from infinity.ranks import Ranks
from support.ends import End, ending
from support.nodes import Node, Program
from support.session import Session
from support.train import KIB, MIB, digest

STEPS = 5
RETAINED = 2
HUNG = 1000
"""Exit status of a life whose ranks were killed because they did not end."""
_PATIENCE = 300.0
_EXIT_SECONDS = 1.0
"""Time for a killed process to exit after it has closed its connections."""
_GRACE = 0.05
"""Maximum seconds between the death of one rank and the kill of the others."""


def state_of(session: Session) -> str:
    """Return a digest of the state that must survive: weights, moments, step counts, random states, learning rates."""
    randoms = torch.get_rng_state().numpy().tobytes(), random.getstate()
    rates = [group["lr"] for group in session.optimizer.param_groups]
    return digest(session.model, session.optimizer, randoms, rates, session.scheduler.state_dict()["last_epoch"])


def live(folder: Path, log: int, end: End, seed: int, *, reference: bool = False, other_pages: bool = False) -> None:
    """Run one rank of a life, which writes its progress as lines to the file descriptor `log`.

    It logs digests of its first and last state or, for the `reference`, of the state after every step.
    """

    def say(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    ranks = Ranks.current() if dist.is_initialized() else Ranks(0, 0, 1)
    alone = ranks.local_world_size == 1
    with ending(end, seed, folder, "" if alone else f"rank{ranks.rank:05d}") as calls:
        run = {"resume": "auto", "retained_checkpoints": RETAINED}
        memory = {"memory": {"page_bytes": 128 * KIB, "host_bytes": 64 * MIB}} if other_pages else {}
        with Session(folder, host_cache="small", run=run, **memory) as session:
            exists, note = bool(session.optimizer.resumed_extra), session.optimizer.resumed_extra.get("note", 0)
            say("resumed" if exists else "started", session.optimizer.steps, state_of(session), note)
            say("begun", calls())
            if not exists:
                save_checkpoint(session, say)
            while session.optimizer.steps < STEPS:
                session.step()
                if reference or session.optimizer.steps == STEPS:
                    say("trained", session.optimizer.steps, state_of(session), 0)
                save_checkpoint(session, say)
        say("calls", calls())


def save_checkpoint(session: Session, say: Callable[..., None]) -> None:
    """Save one checkpoint or, in every other step, two checkpoints that differ only in `extra`."""
    steps = session.optimizer.steps
    for note in range(1, 2 + steps % 2):
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": note})
        say("checkpointed", steps, note)


class _Forked:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and (found := os.waitpid(self._pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)


def _ended(processes: Mapping[int, _Forked | Program]) -> dict[int, int]:
    """Return the exit statuses of the processes that have exited."""
    return {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}


class Life:
    """The processes of one life, one per rank.

    Each node runs the same number of ranks. Without `nodes`, all ranks run on this machine.
    """

    def __init__(self, folder: Path, ranks: int, nodes: Sequence[Node] = ()) -> None:
        self._folder, self._ranks, self._nodes = folder, ranks, nodes

    def run(
        self, ends: dict[int, End], seed: int, *, whole_node: bool = False, **options: bool
    ) -> tuple[list[list[list[str]]], int]:
        """Run the life until all ranks have ended.

        Args:
            ends: End of each rank that is interrupted.
            seed: Seed of the time until the other ranks are killed, and of the effects of a loss of power.
            whole_node: Whether all processes of a node end together with an interrupted rank.
            options: See `live`.

        Returns:
            Logged words of every rank, and the exit status (or negative signal) of the rank that failed first, or
            `HUNG`.
        """
        logs = [self._folder / f"log{rank}" for rank in range(self._ranks)]
        for file in (*logs, self._folder / "store", *self._folder.glob("trace*")):
            file.unlink(missing_ok=True)
        began = time.monotonic()
        left = {rank: self._start(rank, ends.get(rank, End()), seed, options) for rank in range(self._ranks)}
        timed: list[tuple[float, list[int] | None]] = [
            (began + end.seconds, [rank]) for rank, end in ends.items() if end.seconds is not None
        ]
        # Without victims, all ranks must have ended at the deadline.
        deadline, victims = min(timed, key=lambda each: each[0], default=(began + _PATIENCE, None))
        first: int | None = None
        grace = random.Random(seed).uniform(0, _GRACE)
        while left:
            ended = _ended(left)
            if first is None and any(code > 0 for code in ended.values()):
                time.sleep(_EXIT_SECONDS)  # the error of this rank may be due to a killed rank that has not yet exited
                ended = _ended(left)
            for rank, code in sorted(ended.items(), key=lambda entry: entry[1]):  # a kill before the errors it causes
                del left[rank]
                if code and first is None:
                    first, deadline, victims = code, time.monotonic() + grace, list(left)
                    if whole_node:
                        self._node(rank).kill()
            if time.monotonic() >= deadline:
                if victims is None and first is None:
                    first = HUNG
                for rank in left if victims is None else left.keys() & victims:
                    left[rank].signal(signal.SIGKILL)
                deadline, victims = time.monotonic() + _PATIENCE, None
            elif not ended:
                time.sleep(0.001)
        words = [[line.split() for line in log.read_text().splitlines()] if log.exists() else [] for log in logs]
        return words, first or 0

    def _node(self, rank: int) -> Node:
        return self._nodes[rank * len(self._nodes) // self._ranks]

    def _start(self, rank: int, end: End, seed: int, options: dict[str, bool]) -> _Forked | Program:
        arguments = (self._folder, self._ranks, rank, end, seed, options)
        if self._nodes:
            count = self._ranks // len(self._nodes)
            return self._node(rank).start(
                _live, Path("drive0"), *arguments,
                LOCAL_RANK=str(rank % count), LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR=self._nodes[0].name, MASTER_PORT="29500",
            )  # fmt: skip
        child = os.fork()
        if child:
            return _Forked(child)
        _live(self._folder, *arguments)
        raise AssertionError


def _live(place: Path, shared: Path, ranks: int, rank: int, end: End, seed: int, options: dict[str, bool]) -> None:
    """Run one rank of a life with its files in `place`, and exit."""
    status = 1
    try:
        torch.set_num_threads(1)
        if ranks > 1:
            method = "env://" if "MASTER_ADDR" in os.environ else f"file://{shared / 'store'}"
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
        log = os.open(shared / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        live(place.absolute(), log, end, seed, **options)
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        (shared / f"trace{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)
