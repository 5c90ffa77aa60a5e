"""Tests of moving pages between storage paths of different speeds."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from infinity.config import StorageConfig
from infinity.errors import BudgetError
from infinity.hugepages import transfer_memory
from infinity.io import Op, open_engine
from infinity.run import balance
from infinity.run.balance import Finding, Load, PathLoads, Watch
from infinity.run.space_reservation import FileSpace
from infinity.store.extents import SlotClass
from infinity.store.page_store import PageStore
from infinity.units import MIB
from support.command import run_here
from support.session import STEPS, Session, reference


def test_overlapping_transfers_count_once() -> None:
    """A path is busy while at least one of its transfers is in flight."""
    loads = PathLoads(2)
    loads.moved(0, 10, 1.0, 3.0)
    loads.moved(0, 10, 2.0, 4.0)
    loads.moved(0, 10, 6.0, 7.0)
    loads.moved(1, 5, 0.0, 1.0)
    assert loads.take() == [Load(30, 4.0), Load(5, 1.0)]
    assert loads.take() == [Load(0, 0), Load(0, 0)]
    loads.moved(0, 10, 6.5, 8.0)
    assert loads.take()[0] == Load(10, 1.0)


def look_repeatedly(watch: Watch, first: Load, second: Load, times: int = 30) -> list[list[Finding] | None]:
    """Return the findings of a watch that sees the same one-second loads several times."""
    return [watch.look([first, second], 1.0) for _ in range(times)]


@pytest.mark.parametrize(
    ("first", "second", "factors"),
    [
        (Load(100, 1.0), Load(100, 0.3), (1.0, 3.0)),
        (Load(100, 1.0), Load(50, 0.3), (1.0, 6.0)),
        (Load(300, 1.0), Load(300, 0.97), None),  # the second path is saturated
        (Load(100, 1.0), Load(290, 0.97), None),  # the difference is too small
        (Load(100, 0.2), Load(100, 0.01), None),  # neither path is saturated
    ],
)
def test_pages_move_only_after_sustained_imbalance(
    first: Load, second: Load, factors: tuple[float, float] | None
) -> None:
    """The second path is known to transfer 300 bytes per second."""
    found = look_repeatedly(Watch([0.0, 300.0]), first, second)
    assert found[0] is None, "a single look must not move pages"
    if factors is None:
        assert found == [None] * len(found)
    else:
        assert found[-1] is not None
        assert [item.factor for item in found[-1]] == pytest.approx(factors, rel=0.2)


def test_burst_speed_is_not_taken_for_sustained_speed() -> None:
    """A path of unknown speed receives pages in several steps."""
    found = look_repeatedly(Watch([0.0, 0.0]), Load(100, 1.0), Load(100, 0.01))[-1]
    assert found is not None
    assert found[1].factor == pytest.approx(1.5)


def test_unsuccessful_moves_are_retried_less_often() -> None:
    """If a path that is fast in bursts does not sustain the load after a move, the next move waits longer."""
    watch, waits = Watch([100.0, 100.0]), []
    for _ in range(4):
        looks = 0
        while (found := watch.look([Load(100, 1.0), Load(100, 0.1)], 1.0)) is None:
            looks += 1
        assert [item.factor > 1.05 for item in found] == [False, True]
        waits.append(looks)
        watch.restart()
        look_repeatedly(watch, Load(100, 1.0), Load(102, 1.0), 10)
        watch.restart()
    assert waits[0] < 10 < waits[1] < waits[2] < waits[3] < 200


def test_faster_drive_receives_more_pages() -> None:
    """Pages move in several steps until the drive is used at its new speed."""
    watch, moved, other = Watch([100.0, 100.0]), 100.0, 100.0
    for _ in range(200):
        found = watch.look([Load(moved, moved / 100), Load(other, other / 1000)], 1.0)
        if found is not None:
            watch.restart()
            stripe_weight = moved * found[0].factor / (moved * found[0].factor + other * found[1].factor)
            moved, other = 100.0, 100.0 * (1 - stripe_weight) / stripe_weight  # while the first path is slower
            if other > 1000:
                moved, other = 100.0 * 1000 / other, 1000.0
    assert other > 900


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def rebalance_continuously(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Spread pages by random rates throughout training; return the paths used by each redistribution."""
    chance = random.Random(7)
    redistributions: list[tuple[int, ...]] = []
    redirect_writes = PageStore.redirect_writes

    def note(store: PageStore, paths: Sequence[int]) -> None:
        redirect_writes(store, paths)
        redistributions.append(tuple(paths))

    monkeypatch.setattr(PageStore, "redirect_writes", note)
    monkeypatch.setattr(balance, "_EVERY_SECONDS", 0.005)
    monkeypatch.setattr(balance, "_FLUSHED_STEPS", 0)
    monkeypatch.setattr(Watch, "look", lambda *_: [Finding(MIB, 0.1 + chance.random()) for _ in range(2)])
    return redistributions


def test_moving_pages_keeps_losses_bitwise_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages move while the run trains, saves and resumes, with a changing number of retained checkpoints."""
    expected = reference(make_folder(tmp_path / "one"))
    redistributions = rebalance_continuously(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    found: list[float] = []
    for until, retained in ((3, 1), (4, 3), (6, 3), (7, 2), (STEPS, 5)):
        run = {"resume": "latest" if found else "", "retained_checkpoints": retained}
        with Session(tmp_path, storage={"paths": paths}, run=run) as session:
            del found[session.optimizer.steps :]
            found += session.run(until)
    assert found == expected
    assert len(set(redistributions)) > 8
    done = run_here("store", "verify", *paths)
    assert done.status == 0, done.errors


def test_pages_are_not_moved_without_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning is logged, and training continues."""
    expected = reference(make_folder(tmp_path / "one"))
    redistributions = rebalance_continuously(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    allocate = FileSpace.allocate

    def full(space: FileSpace, slots: Iterable[SlotClass]) -> None:
        if threading.current_thread().name == "infinity-balance":
            raise BudgetError("path is full")
        allocate(space, slots)

    monkeypatch.setattr(FileSpace, "allocate", full)
    with Session(tmp_path, storage={"paths": paths}) as session:
        assert session.run() == expected
    assert not redistributions
    assert [record.message for record in caplog.records if "path is full" in record.message] == [
        "the load on storage.paths is uneven, but there is not enough space to move pages: path is full"
    ]


def test_balance_false_disables_moving_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    redistributions = rebalance_continuously(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    with Session(tmp_path, storage={"paths": paths, "balance": False}) as session:
        session.run(3)
    assert not redistributions


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_queueing_time_does_not_count_as_transfer_time(engine: str, tmp_path: Path) -> None:
    """A transfer starts when the drive receives the request, not when the request is queued."""
    running = open_engine(StorageConfig(engine=engine, queue_depth=1))  # type: ignore[arg-type]
    memory = transfer_memory(64 << 10)
    try:
        file = running.open(str(tmp_path / "data"), create=True)
        tickets = [running.submit(Op.WRITE, file, 0, memory) for _ in range(20)]
        for ticket in tickets:
            ticket.wait(60)
        assert all(ticket.submitted <= ticket.started <= ticket.completed for ticket in tickets)
        assert all(one.completed <= other.started for one, other in pairwise(tickets))
    finally:
        running.close()
