"""Tests of faults during training: error and exit status of each rank, and resume from a checkpoint."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from infinity import peer_failures
from infinity.checkpoint.manifest import published_in, read_manifest
from infinity.errors import BudgetError, CorruptPageError, InfinityError, StorageError
from infinity.io import Op
from infinity.run import space_reservation
from infinity.store import folder
from infinity.store.page_store import read_version
from support import models
from support.fault_engine import Fault, FaultEngine, FaultKind
from support.processes import fork_server
from support.ranks import PATIENCE, TIMEOUT, RankPool
from support.session import EVERY, Session, reference
from support.tables import WIDE, all_but
from support.train import Paging, Recipe, batch, faulty, offloaded

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

    def begin(self, session: Session, engine: FaultEngine) -> None:
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
    assert run.pager.transfers.timeout == run.settings.storage.timeout_seconds == 5
    run.pager.transfers.timeout = 1.0


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


class RankResult(NamedTuple):
    """Exit status, error and log of the process of a rank."""

    status: int
    error: str
    logged: str


def describe(error: BaseException) -> str:
    """Return ``Type: message`` of an error."""
    return f"{type(error).__name__}: {error}"


def run_ranks(case: Case, rank: int, folder: Path, *, swallowed: bool = False) -> list[RankResult]:
    """Run two ranks in separate processes, with the failure `case` on `rank`; return the results of both.

    If `swallowed`, the rank catches its error and continues, without closing, until the other has ended.
    """
    arguments = [(case, number == rank, number, str(folder), swallowed) for number in range(2)]
    processes = [fork_server().Process(target=_live, args=each) for each in arguments]
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
    texts = [[_text(folder / f"{name}{number}") for name in ("said", "log")] for number in range(2)]
    return [RankResult(process.exitcode, *text) for process, text in zip(processes, texts, strict=True)]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _live(case: Case, fails: bool, rank: int, folder: str, swallowed: bool) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(filename=f"{folder}/log{rank}", format="%(message)s")
    peer_failures.GRACE_SECONDS = 0.1 if swallowed else PATIENCE  # a failing rank may need long to close
    store = dist.FileStore(f"{folder}/group", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
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


@pytest.fixture(scope="module")
def undisturbed_pair(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Losses of a run without faults on two ranks, by rank."""
    return pair.run(reference, tmp_path_factory.mktemp("undisturbed-pair"))


def resumed(folder: Path) -> tuple[int, list[float]]:
    """Resume the run and train two more steps; return the first step and the losses."""
    with Session(folder, run={"resume": "latest"}) as session:
        first = session.optimizer.steps
        return first, session.run(first + 2, every=0)


@pytest.mark.parametrize("name", CASES)
def test_fault_with_one_rank(name: str, undisturbed: list[float], tmp_path: Path) -> None:
    case = CASES[name]
    faults = (case.fault,) if case.fault else ()
    with faulty(*faults, on=False) as engines, Session(tmp_path, storage=case.storage) as session:
        session.run(EVERY)
        case.begin(session, engines[-1])
        with pytest.raises(Exception) as caught:  # noqa: PT011
            session.run()
        if name not in ("user-error", "data-file-missing", "checkpoints-folder-missing"):
            with pytest.raises(InfinityError):
                session.save_checkpoint()
    assert re.match(case.error, describe(caught.value)), describe(caught.value)
    if isinstance(caught.value, StorageError):
        assert caught.value.path.startswith(str(tmp_path))
    put_back(tmp_path)
    if not (case.damages and damaged_pages(tmp_path)):
        assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : EVERY + 2])


ON_TWO_RANKS = [
    ("EIO-read", 1),  # other failures of drives differ only in the message
    ("user-error", 1),
    *(pytest.param(name, 1, marks=pytest.mark.wide) for name in CASES if name not in ("EIO-read", "user-error")),
    pytest.param("EIO-read", 0, marks=pytest.mark.wide),
    pytest.param("user-error", 0, marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("name", "rank"), ON_TWO_RANKS)
def test_fault_with_two_ranks(
    name: str, rank: int, pair: RankPool, undisturbed_pair: list[list[float]], tmp_path: Path
) -> None:
    """Both ranks exit with the reason, long before the timeout of the process group."""
    case = CASES[name]
    ends = run_ranks(case, rank, tmp_path)
    struck, peer = ends[rank], ends[1 - rank]
    assert re.match(case.error, struck.error), struck.error
    assert re.match(case.peer_error(rank), peer.error), peer.error
    assert [struck.status, peer.status] == [1, 1]
    put_back(tmp_path)
    if not (case.damages and damaged_pages(tmp_path)):
        assert pair.run(resumed, tmp_path) == [(EVERY, losses[EVERY : EVERY + 2]) for losses in undisturbed_pair]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_peer_detects_a_killed_rank(
    rank: int, pair: RankPool, undisturbed_pair: list[list[float]], tmp_path: Path
) -> None:
    """A killed rank cannot publish a reason, so its peer watches the process."""
    ends = run_ranks(KILLED, rank, tmp_path)
    struck, peer = ends[rank], ends[1 - rank]
    assert (struck.status, peer.status) == (-9, 1)
    assert re.match(KILLED.peer_error(rank), peer.error), peer.error
    assert pair.run(resumed, tmp_path) == [(EVERY, losses[EVERY : EVERY + 2]) for losses in undisturbed_pair]


def test_rank_that_closes_first_is_not_reported_as_failed(tmp_path: Path) -> None:
    """The process of a rank may exit before the other ranks close."""
    struck, peer = run_ranks(EXITED, 1, tmp_path)[::-1]
    assert (struck.status, peer.status) == (0, 1)
    assert re.match(EXITED.peer_error(1), peer.error), peer.error


def test_peer_of_a_failed_rank_exits_from_its_collective(tmp_path: Path) -> None:
    """The failed rank keeps its connections open, so its peer would otherwise wait in a collective forever."""
    case = CASES["EIO-read"]
    _, peer = run_ranks(case, 1, tmp_path, swallowed=True)[::-1]
    assert peer.status == 1
    assert re.search(rf"rank 1 failed: {case.error}.*; rank 0 .*collective .*0 s", peer.logged)


def test_sender_exits_if_the_receive_is_not_supported(tmp_path: Path) -> None:
    """Only the receiver would write to a tensor on NVMe, so the sender would otherwise wait for it forever."""
    _, peer = run_ranks(RECEIVED, 1, tmp_path, swallowed=True)[::-1]
    assert peer.status == 1
    assert re.search(rf"rank 1 failed: {RECEIVED.error}.*; rank 0 .*collective .*0 s", peer.logged)


TRANSIENT = {
    "EIO-read": Fault(kind=FaultKind.EIO, op=Op.READ, every=40),
    "EIO-write": Fault(kind=FaultKind.EIO, op=Op.WRITE, every=20),
    "flipped": Fault(kind=FaultKind.FLIP, every=40),
    "slow": Fault(kind=FaultKind.SLOW, probability=0.1, seconds=0.05),
}


def train_with_transient_fault(name: str, folder: Path) -> tuple[list[float], int, int, int]:
    """Train with a transient fault; return the losses, the number of faults, and the retry and error counts."""
    with faulty(TRANSIENT[name]) as engines, Session(folder) as session:
        losses = session.run()
        page = session.optimizer.run.stats.snapshot()
        retries = sum(int(page.value("io_retries_total", op=op)) for op in ("read", "write"))
        errors = sum(
            int(page.value("io_errors_total", op=op, reason=reason))
            for op in ("read", "write") for reason in ("eio", "corrupt", "other")
        )  # fmt: skip
        return losses, engines[-1].injected, retries, errors


@pytest.mark.parametrize("name", all_but(TRANSIENT, "slow"))
def test_transient_faults_are_retried_with_equal_losses(name: str, undisturbed: list[float], tmp_path: Path) -> None:
    """The retries are counted."""
    check_retries(name, train_with_transient_fault(name, tmp_path), undisturbed)


@pytest.mark.parametrize("name", all_but(TRANSIENT, "EIO-write", "flipped", "slow"))
def test_transient_faults_are_retried_on_two_ranks(
    name: str, pair: RankPool, undisturbed_pair: list[list[float]], tmp_path: Path
) -> None:
    for found, losses in zip(pair.run(train_with_transient_fault, name, tmp_path), undisturbed_pair, strict=True):
        check_retries(name, found, losses)


def check_retries(name: str, found: tuple[list[float], int, int, int], expected: list[float]) -> None:
    losses, struck, retries, errors = found
    assert losses == expected
    assert struck > 0
    assert (retries, errors) == (0 if name == "slow" else struck, 0)


def test_permanent_faults_are_counted_as_errors(tmp_path: Path) -> None:
    """Errors are counted by reason, and transient ones only after `storage.retries` retries."""
    for kind, reason, retries in ((FaultKind.FLIP, "corrupt", 2), (FaultKind.ENOSPC, "enospc", 0)):
        op = "read" if kind is FaultKind.FLIP else "write"
        fault = Fault(kind=kind)
        with faulty(fault, on=False) as engines, Session(tmp_path, storage={"retries": 2}) as session:
            session.run(EVERY, every=0)
            engines[-1].on = True
            with pytest.raises(StorageError):
                session.run(every=0)
            page = session.optimizer.run.stats.snapshot()
            errors = int(page.value("io_errors_total", op=op, reason=reason))
            assert errors > 0
            assert int(page.value("io_retries_total", op=op)) >= retries * errors


RECIPE = Recipe(model="toy", policy="fp32", sequences=150, checkpointing=True)
PAGING = Paging(activations="nvme")


class OnlyActivations:
    """Limit the faults of an engine to transfers of activations."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._submit = engine, engine.submit
        engine.submit = self._choose

    def _choose(self, op: Op, file: Any, offset: int, memory: memoryview) -> Any:
        self._engine.on = file.path.endswith(".activations")
        return self._submit(op, file, offset, memory)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    return losses(tmp_path_factory.mktemp("undisturbed"), steps=4)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(kind=FaultKind.EIO, op=Op.READ), StorageError, r"read of .*rank00000\.activations failed: EIO"),
        (Fault(kind=FaultKind.EIO, op=Op.WRITE), StorageError, r"write of .*rank00000\.activations failed: EIO"),
        pytest.param(
            Fault(kind=FaultKind.ENOSPC, op=Op.WRITE),
            StorageError,
            r"write of .*\.activations failed: ENOSPC",
            marks=WIDE,
        ),
        (Fault(kind=FaultKind.FLIP), CorruptPageError, r"page activations/activation\[\d+\]"),
        pytest.param(Fault(kind=FaultKind.SHORT), StorageError, "short transfer", marks=WIDE),
    ],
    ids=["EIO-read", "EIO-write", "ENOSPC", "flipped", "short"],
)
def test_activation_fault_stops_the_run_but_keeps_the_checkpoint(
    fault: Fault, error: type[InfinityError], message: str, expected: list[float], tmp_path: Path
) -> None:
    """The error names the file or page, and a resumed run has the losses of a run without faults."""
    with faulty(fault, on=False) as engines, pytest.raises(error, match=message):
        losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1]))
    assert losses(tmp_path / "disturbed", steps=4, run={"resume": "latest"}) == expected[2:]


def losses(folder: Path, steps: int, begin: Any = None, **sections: Any) -> list[float]:
    """Train and save a checkpoint after the second step; return the losses."""
    folder.mkdir(exist_ok=True)
    found = []
    with offloaded(RECIPE, PAGING, folder, **sections) as (model, optimizer):
        for step in range(optimizer.steps, steps):
            if step == 2 and begin is not None:
                begin()
            loss = models.loss_of(model, batch(model, step, RECIPE.sequences))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if step == 1:
                optimizer.save_checkpoint()
    return found


def test_transient_activation_faults_are_retried(expected: list[float], tmp_path: Path) -> None:
    with faulty(Fault(kind=FaultKind.EIO, every=7), on=False) as engines:
        assert losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1])) == expected
        assert engines[-1].injected > 3


def test_full_drive_raises_budget_error_in_the_first_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reports the free and the required space."""

    def no_space(*arguments: Any) -> None:
        used = shutil.disk_usage(tmp_path)._replace(free=4096)
        with monkeypatch.context() as patch:
            patch.setattr(folder.shutil, "disk_usage", lambda _: used)
            extend(*arguments)

    extend = space_reservation.extend
    monkeypatch.setattr(space_reservation, "extend", no_space)
    found = (
        r"nvme0/\S+ has \S+ MiB free, including \S+ MiB that this run occupies, but this run needs .* \(No space left"
    )
    with pytest.raises(BudgetError, match=found):
        losses(tmp_path, steps=1)


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def test_activation_files_are_unlinked_and_freed_with_the_run(tmp_path: Path) -> None:
    """The files are not visible in the directory, and closing the run frees their space."""
    with offloaded(RECIPE, PAGING, tmp_path) as (model, optimizer):
        models.loss_of(model, batch(model, 0, RECIPE.sequences)).backward()
        optimizer.step()
        assert not list(tmp_path.rglob("*.activations"))
        assert any(name.endswith(".activations (deleted)") for name in open_files())
        kept, state = optimizer.run.activations.traffic.kept, optimizer.run.layout.state_bytes
        reserved = optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        assert reserved >= state + kept
    assert not any(".activations" in name for name in open_files())
