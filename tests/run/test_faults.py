"""Tests of faults during training: error and exit status of each rank, and resume from a checkpoint."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import BudgetError, CorruptPageError, InfinityError, StorageError
from infinity.io import Op
from infinity.run import space_reservation
from infinity.store import folder
from support import models
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
from support.tables import WIDE, all_but
from support.train import Paging, Recipe, batch, faulty, offloaded

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
        assert engines[-1].struck > 3


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
