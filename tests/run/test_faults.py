"""Tests of faults during training: the error and exit status of each rank, and resume from the last checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infinity.errors import InfinityError, StorageError
from infinity.io import Op
from support.fault_engine import Fault, FaultKind
from support.faults import (
    CASES,
    EXITED,
    KILLED,
    RECEIVED,
    FaultyRanks,
    damaged_pages,
    describe,
    put_back,
)
from support.ranks import RankPool
from support.session import EVERY, Session, reference
from support.tables import all_but
from support.train import faulty

LATEST = {"resume": "latest"}


@pytest.fixture(scope="module")
def undisturbed_pair(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Losses of a run without faults on two ranks, by rank."""
    return pair.run(reference, tmp_path_factory.mktemp("undisturbed-pair"))


@pytest.fixture(scope="module")
def dying() -> FaultyRanks:
    """Launcher of two ranks in processes that may die."""
    return FaultyRanks()


def resumed(folder: Path) -> tuple[int, list[float]]:
    """Resume the run and train two more steps; return the first step and the losses."""
    with Session(folder, run=LATEST) as session:
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
    name: str, rank: int, pair: RankPool, dying: FaultyRanks, undisturbed_pair: list[list[float]], tmp_path: Path
) -> None:
    """Both ranks exit with the reason, long before the timeout of the process group."""
    case = CASES[name]
    ends = dying.run(case, rank, tmp_path)
    struck, peer = ends[rank], ends[1 - rank]
    assert re.match(case.error, struck.error), struck.error
    assert re.match(case.peer_error(rank), peer.error), peer.error
    assert [struck.status, peer.status] == [1, 1]
    put_back(tmp_path)
    if not (case.damages and damaged_pages(tmp_path)):
        assert pair.run(resumed, tmp_path) == [(EVERY, losses[EVERY : EVERY + 2]) for losses in undisturbed_pair]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_peer_detects_a_killed_rank(
    rank: int, pair: RankPool, dying: FaultyRanks, undisturbed_pair: list[list[float]], tmp_path: Path
) -> None:
    """A killed rank cannot publish a reason, so its peer watches the process."""
    ends = dying.run(KILLED, rank, tmp_path)
    struck, peer = ends[rank], ends[1 - rank]
    assert (struck.status, peer.status) == (-9, 1)
    assert re.match(KILLED.peer_error(rank), peer.error), peer.error
    assert pair.run(resumed, tmp_path) == [(EVERY, losses[EVERY : EVERY + 2]) for losses in undisturbed_pair]


def test_rank_that_closes_first_is_not_reported_as_failed(dying: FaultyRanks, tmp_path: Path) -> None:
    """The process of a rank may exit before the other ranks close."""
    struck, peer = dying.run(EXITED, 1, tmp_path)[::-1]
    assert (struck.status, peer.status) == (0, 1)
    assert re.match(EXITED.peer_error(1), peer.error), peer.error


def test_peer_of_a_failed_rank_exits_from_its_collective(dying: FaultyRanks, tmp_path: Path) -> None:
    """The failed rank keeps its connections open, so its peer would otherwise wait in a collective forever."""
    case = CASES["EIO-read"]
    _, peer = dying.run(case, 1, tmp_path, swallowed=True)[::-1]
    assert peer.status == 1
    assert re.search(rf"rank 1 failed: {case.error}.*; rank 0 .*collective .*0 s", peer.logged)


def test_sender_exits_if_the_receive_is_not_supported(dying: FaultyRanks, tmp_path: Path) -> None:
    """Only the receiver would write to a tensor on NVMe, so the sender would otherwise wait for it forever."""
    _, peer = dying.run(RECEIVED, 1, tmp_path, swallowed=True)[::-1]
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
        return losses, engines[-1].struck, retries, errors


@pytest.mark.parametrize("name", TRANSIENT)
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
