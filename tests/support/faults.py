"""What can go wrong while a run goes on, and what every rank must say then; and the ranks to try it on."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity import peer_failures
from infinity.checkpoint.manifest import published_in, read_manifest
from infinity.errors import CorruptPageError
from infinity.io import Op
from infinity.store.page_store import read_version
from support.fault_engine import Fault, FaultKind
from support.processes import ready_made
from support.session import EVERY, Session
from support.train import Switch, faulty

PATIENCE = 900.0
"""Seconds within which both ranks have ended, however slow the machine; the process group waits for longer."""
PLACE = r"(read|write) of \d+ bytes at offset \d+ of \S+\.pages"
CORRUPT = rf"CorruptPageError: {PLACE} failed: .*page \S+ is corrupt: checksum"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that happens on one rank after the first checkpoint."""

    says: str
    """What the rank that it happens to raises, as a pattern over ``Type: message``."""
    peer: str = ""
    """What the others raise; by default that this rank failed, with what it says."""
    fault: Fault | None = None
    act: Callable[[Session], None] | None = None
    storage: dict[str, Any] = field(default_factory=dict)
    damages: bool = False
    """The last checkpoint may be hit."""
    prepare: Callable[[], None] | None = None
    """Called on every rank before it begins."""

    def peer_says(self, rank: int) -> str:
        """Return the pattern for the other ranks when it happens to `rank`."""
        return self.peer.format(rank=rank) or rf"LostRankError: rank {rank} failed: {self.says}"

    def begin(self, session: Session, engine: Switch) -> None:
        """Let it happen, now or at the next transfers."""
        engine.on = True
        if self.act is not None:
            self.act(session)


def _kill(session: Session) -> None:
    session.model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def _refuse_pidfd() -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.pidfd_open = refuse


def _lack_pidfd() -> None:
    del os.pidfd_open  # as in Pythons that were built without it


def _leave(session: Session) -> None:
    session.optimizer.close()
    os._exit(0)


def _mistake(session: Session) -> None:
    def raise_it(*_: Any) -> None:
        raise ValueError("a mistake of one's own")

    session.model.blocks[1].register_full_backward_hook(raise_it)


def _move_data(session: Session) -> None:
    folder, rank = session.optimizer.run.folder, dist.get_rank() if dist.is_initialized() else 0
    aside(folder.data_file(0, rank))


def _move_checkpoints(session: Session) -> None:
    session.step()  # the other rank has ended its checkpoint then
    aside(session.optimizer.run.folder.checkpoints)


def aside(place: Path) -> None:
    """Rename a file or folder."""
    place.rename(place.with_name(f"{place.name}.aside"))


def put_back(folder: Path) -> None:
    """Undo `aside` everywhere below a folder."""
    for place in folder.rglob("*.aside"):
        place.rename(place.with_name(place.name.removesuffix(".aside")))


CASES = {
    "EIO-read": Case(
        fault=Fault(kind=FaultKind.EIO, op=Op.READ),
        says=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "EIO-write": Case(
        fault=Fault(kind=FaultKind.EIO, op=Op.WRITE),
        says=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "EIO-without-retries": Case(
        fault=Fault(kind=FaultKind.EIO, at=(7,)),
        storage={"retries": 0},
        says=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "short": Case(
        fault=Fault(kind=FaultKind.SHORT, at=(5,)),
        says=rf"StorageError: {PLACE} failed: .*short transfer, \d+ bytes",
    ),
    "ENOSPC": Case(
        fault=Fault(kind=FaultKind.ENOSPC, at=(3,)),
        says=rf"StorageError: {PLACE} failed: ENOSPC \(No space left on device\)",
    ),
    "misdirected": Case(fault=Fault(kind=FaultKind.MISDIRECTED, at=(2,)), says=CORRUPT, damages=True),
    "torn": Case(fault=Fault(kind=FaultKind.TORN, at=(2,)), says=CORRUPT),
    "flipped": Case(fault=Fault(kind=FaultKind.FLIP), says=CORRUPT),
    "no-answer": Case(
        fault=Fault(kind=FaultKind.STUCK, at=(4,)),
        storage={"timeout_seconds": 5},
        says=r"StallError: waited 5 s for (a page to be (read|written)|the update of a page); "
        rf"oldest of \d+ requests in flight: {PLACE}, for \d+\.\d s",
    ),
    "data-file-gone": Case(
        act=_move_data,
        says=r"StorageError: sync .*\.pages failed: ENOENT .*: the data file was removed or replaced",
        peer=r"InfinityError: checkpoint of step 6 failed on rank {rank}: StorageError: sync .* was removed",
    ),
    "checkpoints-folder-gone": Case(
        act=_move_checkpoints,
        says=r"StorageError: checkpoint .*checkpoints\S* failed: ENOENT \(No such file or directory\)",
        peer=r"StorageError: checkpoint .*checkpoints\S* failed: ENOENT \(No such file or directory\)",
    ),
    "own-mistake": Case(act=_mistake, says="ValueError: a mistake of one's own"),
}
KILLED = Case(
    act=_kill, says="", peer=r"LostRankError: rank {rank} \(process \d+\) exited unexpectedly \(killed, out of"
)
KILLED_UNSEEN = {
    "pidfd_open failed (Operation not permitted)": replace(KILLED, prepare=_refuse_pidfd),
    "pidfd_open failed (module 'os' has no attribute 'pidfd_open')": replace(KILLED, prepare=_lack_pidfd),
}
"""By what is logged where no descriptor of another process can be held: it is forbidden, or Python lacks it."""
LEFT = Case(act=_leave, says="", peer="RuntimeError: .*by peer")
"""Closed in order, though the others go on: no failure, but the end of their collectives."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How the process of a rank has ended."""

    status: int
    said: str
    logged: str


def describe(error: BaseException) -> str:
    """Return an error as the patterns have it."""
    return f"{type(error).__name__}: {error}"


class DyingRanks:
    """Two ranks in processes of their own, one of which is disturbed; forked from one that has loaded torch."""

    def __init__(self) -> None:
        self._context = ready_made()

    def run(self, case: Case, rank: int, folder: Path, *, swallowed: bool = False) -> list[End]:
        """Let `case` happen to `rank`; return how both have ended.

        Args:
            swallowed: the rank catches its error and lives on, without closing, until the other one has ended.
        """
        arguments = [(case, number == rank, number, str(folder), swallowed) for number in range(2)]
        processes = [self._context.Process(target=_live, args=each) for each in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE
        left = set(range(2))
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            for number in [number for number in left if processes[number].exitcode is not None]:
                left.remove(number)
                (folder / f"ended{number}").touch()
        for process in processes:
            process.kill()
            process.join()
        assert not left, f"still alive after {PATIENCE:.0f} s: ranks {sorted(left)}"
        return [
            End(
                status=process.exitcode,
                said=_text(folder / f"said{number}"),
                logged=_text(folder / f"log{number}"),
            )
            for number, process in enumerate(processes)
        ]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _live(case: Case, struck: bool, rank: int, folder: str, swallowed: bool) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(filename=f"{folder}/log{rank}", format="%(message)s")
    peer_failures.GRACE_SECONDS = 2.0 if swallowed else PATIENCE  # a rank that fails takes its time to close
    if case.prepare is not None:
        case.prepare()
    store = dist.FileStore(f"{folder}/group", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2 * PATIENCE))
    try:
        _disturbed(case if struck else None, Path(folder), case.storage, swallowed)
    except BaseException as error:
        Path(folder, f"said{rank}").write_text(describe(error))
        raise SystemExit(1) from None


def _disturbed(case: Case | None, folder: Path, storage: dict[str, Any], swallowed: bool) -> None:
    faults = (case.fault,) if case is not None and case.fault is not None else ()
    with faulty(*faults, on=False) as engines, Session(folder, storage=storage) as session:
        session.run(EVERY)
        if case is not None:
            case.begin(session, engines[-1])
        try:
            session.run()
        except Exception:
            if not (swallowed and case):
                raise
            while not (folder / f"ended{1 - dist.get_rank()}").exists():
                time.sleep(0.02)


def damaged_pages(folder: Path) -> int:
    """Return how many checkpointed pages are not what they were: a misdirected write lies in the place of something."""
    found = 0
    for run in (folder / "nvme0").glob("*/checkpoints"):
        for name in published_in(run):
            for page, version in read_manifest(run / name.file_name).pages.items():
                try:
                    read_version(run.with_name(f"rank{name.rank:05d}.pages"), page, version, str(page))
                except CorruptPageError:
                    found += 1
    return found
