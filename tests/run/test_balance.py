"""Pages move between paths of different speed; nothing else changes."""

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
    """Busy is a path while anything of it is on its way."""
    loads = PathLoads(2)
    loads.moved(0, 10, 1.0, 3.0)
    loads.moved(0, 10, 2.0, 4.0)
    loads.moved(0, 10, 6.0, 7.0)
    loads.moved(1, 5, 0.0, 1.0)
    assert loads.take() == [Load(30, 4.0), Load(5, 1.0)]
    assert loads.take() == [Load(0, 0), Load(0, 0)]
    loads.moved(0, 10, 6.5, 8.0)
    assert loads.take()[0] == Load(10, 1.0)


def looked(watch: Watch, first: Load, second: Load, times: int = 30) -> list[list[Finding] | None]:
    """Return what a watch says each time it looks at these loads of a second."""
    return [watch.look([first, second], 1.0) for _ in range(times)]


@pytest.mark.parametrize(
    ("first", "second", "factors"),
    [
        (Load(100, 1.0), Load(100, 0.3), (1.0, 3.0)),
        (Load(100, 1.0), Load(50, 0.3), (1.0, 6.0)),
        (Load(300, 1.0), Load(300, 0.97), None),  # it does what it can
        (Load(100, 1.0), Load(290, 0.97), None),  # a difference that is no matter
        (Load(100, 0.2), Load(100, 0.01), None),  # nobody waits for either
    ],
)
def test_what_must_last_before_pages_move(first: Load, second: Load, factors: tuple[float, float] | None) -> None:
    """The second path is known to do 300 in a second."""
    found = looked(Watch([0.0, 300.0]), first, second)
    assert found[0] is None, "a moment is no reason"
    if factors is None:
        assert found == [None] * len(found)
    else:
        assert found[-1] is not None
        assert [item.factor for item in found[-1]] == pytest.approx(factors, rel=0.2)


def test_a_burst_is_not_taken_for_what_lasts() -> None:
    """Of a path of which nothing is known, pages come in several goes."""
    found = looked(Watch([0.0, 0.0]), Load(100, 1.0), Load(100, 0.01))[-1]
    assert found is not None
    assert found[1].factor == pytest.approx(1.5)


def test_what_was_tried_in_vain_is_tried_ever_more_rarely() -> None:
    """A path that is quick in bursts gets more; if that shows that it cannot do more, it is left alone for a while."""
    watch, waits = Watch([100.0, 100.0]), []
    for _ in range(4):
        looks = 0
        while (found := watch.look([Load(100, 1.0), Load(100, 0.1)], 1.0)) is None:
            looks += 1
        assert [item.factor > 1.05 for item in found] == [False, True]
        waits.append(looks)
        watch.restart()
        looked(watch, Load(100, 1.0), Load(102, 1.0), 10)
        watch.restart()
    assert waits[0] < 10 < waits[1] < waits[2] < waits[3] < 200


def test_a_drive_that_becomes_faster_gets_more() -> None:
    """Bit by bit, until it has all that it can do."""
    watch, moved, other = Watch([100.0, 100.0]), 100.0, 100.0
    for _ in range(200):
        found = watch.look([Load(moved, moved / 100), Load(other, other / 1000)], 1.0)
        if found is not None:
            watch.restart()
            stripe_weight = moved * found[0].factor / (moved * found[0].factor + other * found[1].factor)
            moved, other = (
                100.0,
                100.0 * (1 - stripe_weight) / stripe_weight,
            )  # as long as the first path is the slower one
            if other > 1000:
                moved, other = 100.0 * 1000 / other, 1000.0
    assert other > 900


def made(folder: Path) -> Path:
    """Return a folder, made."""
    folder.mkdir()
    return folder


def always(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let pages be spread by random rates all the time; return where they have been."""
    chance = random.Random(7)
    been: list[tuple[int, ...]] = []
    spread_anew = PageStore.spread_anew

    def note(store: PageStore, paths: Sequence[int]) -> None:
        spread_anew(store, paths)
        been.append(tuple(paths))

    monkeypatch.setattr(PageStore, "spread_anew", note)
    monkeypatch.setattr(balance, "_EVERY_SECONDS", 0.005)
    monkeypatch.setattr(balance, "_FLUSHED_STEPS", 0)
    monkeypatch.setattr(Watch, "look", lambda *_: [Finding(MIB, 0.1 + chance.random()) for _ in range(2)])
    return been


def test_moving_pages_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the time, while training, checkpointing and resuming;

    also with more or fewer checkpoints retained than before.
    """
    expected = reference(made(tmp_path / "one"))
    been = always(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    found: list[float] = []
    for until, retained in ((3, 1), (4, 3), (6, 3), (7, 2), (STEPS, 5)):
        run = {"resume": "latest" if found else "", "retained_checkpoints": retained}
        with Session(tmp_path, storage={"paths": paths}, run=run) as session:
            del found[session.optimizer.steps :]
            found += session.run(until)
    assert found == expected
    assert len(set(been)) > 8
    done = run_here("store", "verify", *paths)
    assert done.status == 0, done.errors


def test_without_room_pages_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and training goes on."""
    expected = reference(made(tmp_path / "one"))
    been = always(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    allocate = FileSpace.allocate

    def full(space: FileSpace, slots: Iterable[SlotClass]) -> None:
        if threading.current_thread().name == "infinity-balance":
            raise BudgetError("no room")
        allocate(space, slots)

    monkeypatch.setattr(FileSpace, "allocate", full)
    with Session(tmp_path, storage={"paths": paths}) as session:
        assert session.run() == expected
    assert not been
    assert [record.message for record in caplog.records if "no room" in record.message] == [
        "the load on storage.paths is uneven, but there is not enough space to move pages: no room"
    ]


def test_a_setting_leaves_pages_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    been = always(monkeypatch)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    with Session(tmp_path, storage={"paths": paths, "balance": False}) as session:
        session.run(3)
    assert not been


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_who_waits_behind_a_slow_drive_is_not_taken_for_slow(engine: str, tmp_path: Path) -> None:
    """A request counts from when the drive is asked, not from when it is queued behind requests to another drive."""
    running, _ = open_engine(StorageConfig(engine=engine, queue_depth=1))  # type: ignore[arg-type]
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
