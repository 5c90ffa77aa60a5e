"""Failures during a run, the expected errors of all ranks, and the processes that run the ranks."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from support.processes import fork_server
from support.session import EVERY, Session
from support.train import Switch, faulty

PATIENCE = 900.0
"""Seconds within which both ranks must end, on any machine. The timeout of the process group is longer."""
PLACE = r"(read|write) of \d+ bytes at offset \d+ of \S+\.pages"
CORRUPT = rf"CorruptPageError: {PLACE} failed: .*page \S+ is corrupt: checksum"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A failure that occurs on one rank after the first checkpoint."""

    error: str
    """Regular expression for ``Type: message`` of the error on the failing rank."""
    peer: str = ""
    """Regular expression for the error on the other rank. By default, a `LostRankError` with the error of this rank."""
    fault: Fault | None = None
    act: Callable[[Session], None] | None = None
    storage: dict[str, Any] = field(default_factory=dict)
    damages: bool = False
    """Whether the last checkpoint may be damaged."""
    peer_act: Callable[[Session], None] | None = None
    """Action of the other rank at the time of the failure."""

    def peer_error(self, rank: int) -> str:
        """Return the regular expression for the error on the other rank if `rank` fails."""
        return self.peer.format(rank=rank) or rf"LostRankError: rank {rank} failed: {self.error}"

    def begin(self, session: Session, engine: Switch) -> None:
        """Cause the failure, immediately or at one of the next transfers."""
        engine.on = True
        if self.act is not None:
            self.act(session)


def _kill(session: Session) -> None:
    session.model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def _exit_early(session: Session) -> None:
    session.optimizer.close()
    os._exit(0)


def _raise_user_error(session: Session) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("user error")

    session.model.blocks[1].register_full_backward_hook(fail)


def _shorten_waits(session: Session) -> None:
    run = session.optimizer.run
    assert run.pager.transfers._timeout == run.settings.storage.timeout_seconds == 5
    run.pager.transfers._timeout = 1.0


def _move_data(session: Session) -> None:
    folder, rank = session.optimizer.run.folder, dist.get_rank() if dist.is_initialized() else 0
    move_away(folder.data_file(0, rank))


def _move_checkpoints(session: Session) -> None:
    session.step()  # after which the other rank has completed its checkpoint
    move_away(session.optimizer.run.folder.checkpoints)


def _receive_into_weight(session: Session) -> None:
    with torch.no_grad():
        dist.recv(_weight(session), 1 - dist.get_rank())


def _send_weight(session: Session) -> None:
    with torch.no_grad():
        dist.send(_weight(session).clone(), 1 - dist.get_rank())


def _weight(session: Session) -> torch.Tensor:
    return session.model.blocks[0].up.weight.to_local()


def move_away(place: Path) -> None:
    """Rename a file or folder, so that it is missing."""
    place.rename(place.with_name(f"{place.name}.aside"))


def put_back(folder: Path) -> None:
    """Undo `move_away` for all files in a folder."""
    for place in folder.rglob("*.aside"):
        place.rename(place.with_name(place.name.removesuffix(".aside")))


CASES = {
    "EIO-read": Case(
        fault=Fault(kind=FaultKind.EIO, op=Op.READ),
        error=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "EIO-write": Case(
        fault=Fault(kind=FaultKind.EIO, op=Op.WRITE),
        error=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "EIO-without-retries": Case(
        fault=Fault(kind=FaultKind.EIO, at=(7,)),
        storage={"retries": 0},
        error=rf"StorageError: {PLACE} failed: EIO \(Input/output error\)",
    ),
    "short": Case(
        fault=Fault(kind=FaultKind.SHORT, at=(5,)),
        error=rf"StorageError: {PLACE} failed: .*short transfer, \d+ bytes",
    ),
    "ENOSPC": Case(
        fault=Fault(kind=FaultKind.ENOSPC, at=(3,)),
        error=rf"StorageError: {PLACE} failed: ENOSPC \(No space left on device\)",
    ),
    "misdirected": Case(fault=Fault(kind=FaultKind.MISDIRECTED, at=(2,)), error=CORRUPT, damages=True),
    "torn": Case(fault=Fault(kind=FaultKind.TORN, at=(2,)), error=CORRUPT),
    "flipped": Case(fault=Fault(kind=FaultKind.FLIP), error=CORRUPT),
    "stuck": Case(
        fault=Fault(kind=FaultKind.STUCK, at=(4,)),
        act=_shorten_waits,
        storage={"timeout_seconds": 5},
        error=r"StallError: waited \d s for (a page to be (read|written)|the update of a page); "
        rf"oldest of \d+ requests in flight: {PLACE}, for \d+\.\d s",
    ),
    "data-file-missing": Case(
        act=_move_data,
        error=r"StorageError: sync .*\.pages failed: ENOENT .*: the data file was removed or replaced",
        peer=r"InfinityError: checkpoint of step 6 failed on rank {rank}: StorageError: sync .* was removed",
    ),
    "checkpoints-folder-missing": Case(
        act=_move_checkpoints,
        error=r"StorageError: checkpoint .*checkpoints\S* failed: ENOENT \(No such file or directory\)",
        peer=r"StorageError: checkpoint .*checkpoints\S* failed: ENOENT \(No such file or directory\)",
    ),
    "user-error": Case(act=_raise_user_error, error="ValueError: user error"),
}
KILLED = Case(
    act=_kill, error="", peer=r"LostRankError: rank {rank} \(process \d+\) exited unexpectedly \(killed, out of"
)
RECEIVED = Case(
    act=_receive_into_weight,
    peer_act=_send_weight,
    error=r"UnsupportedError: c10d\.recv_\.default would write to blocks\.0\.up\.weight, but collectives cannot write",
)
EXITED = Case(act=_exit_early, error="", peer="RuntimeError: .*by peer")
"""A rank that closes its optimizer and exits while the other rank continues. The collectives of the latter fail."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Exit status, error and log of the process of a rank."""

    status: int
    error: str
    logged: str


def describe(error: BaseException) -> str:
    """Return ``Type: message`` of an error."""
    return f"{type(error).__name__}: {error}"


class FaultyRanks:
    """Two ranks in separate processes, one of which fails."""

    def __init__(self) -> None:
        self._context = fork_server()

    def run(self, case: Case, rank: int, folder: Path, *, swallowed: bool = False) -> list[RankResult]:
        """Run both ranks, with the failure `case` on `rank`; return the results of both.

        Args:
            case: Failure.
            rank: Rank that fails.
            folder: Folder of the run.
            swallowed: Whether the rank catches its error and continues, without closing, until the other has ended.
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
            RankResult(
                status=process.exitcode,
                error=_text(folder / f"said{number}"),
                logged=_text(folder / f"log{number}"),
            )
            for number, process in enumerate(processes)
        ]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _live(case: Case, fails: bool, rank: int, folder: str, swallowed: bool) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(filename=f"{folder}/log{rank}", format="%(message)s")
    peer_failures.GRACE_SECONDS = 0.1 if swallowed else PATIENCE  # a failing rank may need long to close
    store = dist.FileStore(f"{folder}/group", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2 * PATIENCE))
    try:
        _run_rank(case, Path(folder), fails=fails, swallowed=swallowed)
    except BaseException as error:
        Path(folder, f"said{rank}").write_text(describe(error))
        raise SystemExit(1) from None


def _run_rank(case: Case, folder: Path, *, fails: bool, swallowed: bool) -> None:
    faults = (case.fault,) if fails and case.fault is not None else ()
    with faulty(*faults, on=False) as engines, Session(folder, storage=case.storage) as session:
        session.run(EVERY)
        try:
            if fails:
                case.begin(session, engines[-1])
            elif case.peer_act is not None:
                case.peer_act(session)
            session.run()
        except Exception:
            if not (swallowed and fails):
                raise
            while not (folder / f"ended{1 - dist.get_rank()}").exists():
                time.sleep(0.02)


def damaged_pages(folder: Path) -> int:
    """Return the number of checkpointed pages with a wrong checksum, for example after a misdirected write."""
    found = 0
    for run in (folder / "nvme0").glob("*/checkpoints"):
        for name in published_in(run):
            for page, version in read_manifest(run / name.file_name).pages.items():
                try:
                    read_version(run.with_name(f"rank{name.rank:05d}.pages"), page, version, str(page))
                except CorruptPageError:
                    found += 1
    return found
