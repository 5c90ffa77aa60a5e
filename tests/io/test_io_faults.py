"""Tests of fault injection: each kind of fault has its effect, and a seed reproduces it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import ConfigError, StallError, StorageError
from infinity.io import DataFile, Op, ThreadEngine, Ticket
from support.engines import BLOCK, PATIENCE, make_engine, mapped
from support.fault_engine import Fault, FaultEngine, FaultKind

SIZE = 16 * BLOCK


class Rig:
    """A file of 64 pieces of `SIZE` bytes with value 1, and memory with value 2."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        self.path, self.memory = folder / "file", memory
        self.path.write_bytes(b"\x01" * (64 * SIZE))
        self.engine = FaultEngine(ThreadEngine(4, 1 << 20), 0)

    def start(self, *faults: Fault, seed: int = 1, kind: str = "threads") -> DataFile:
        self.engine.close()
        self.engine = FaultEngine(make_engine(kind), seed, faults)
        self.memory[:] = b"\x02" * len(self.memory)
        return self.engine.open(str(self.path))

    def write(self, file: DataFile, piece: int = 8) -> Ticket:
        return self.engine.submit(Op.WRITE, file, piece * SIZE, self.memory[:SIZE])

    def read(self, file: DataFile, piece: int = 8) -> Ticket:
        return self.engine.submit(Op.READ, file, piece * SIZE, self.memory[:SIZE])

    def piece(self, number: int) -> bytes:
        return self.path.read_bytes()[number * SIZE : (number + 1) * SIZE]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig whose engine is closed afterwards."""
    with mapped(64 * SIZE) as memory:
        made = Rig(tmp_path, memory)
        yield made
        made.engine.close()


@pytest.mark.parametrize(("kind", "code"), [(FaultKind.EIO, errno.EIO), (FaultKind.ENOSPC, errno.ENOSPC)])
def test_errno_fault_raises_storage_error(rig: Rig, kind: FaultKind, code: int) -> None:
    file = rig.start(Fault(kind=kind, op=Op.WRITE, at=(1,)))
    rig.write(file).wait(PATIENCE)
    with pytest.raises(StorageError) as caught:
        rig.write(file, 9).wait(PATIENCE)
    error = caught.value
    assert (error.errno, error.op, error.offset, error.length) == (code, "write", 9 * SIZE, SIZE)
    rig.read(file).wait(PATIENCE)
    assert rig.piece(8) == b"\x02" * SIZE
    assert rig.piece(9) == b"\x01" * SIZE


@pytest.mark.parametrize("op", list(Op))
def test_short_transfer_raises_storage_error(rig: Rig, op: Op) -> None:
    file = rig.start(Fault(kind=FaultKind.SHORT))
    ticket = rig.write(file) if op is Op.WRITE else rig.read(file)
    with pytest.raises(StorageError, match="short transfer"):
        ticket.wait(PATIENCE)
    moved = int(rig.engine.injected[0].detail)
    assert 0 <= moved < SIZE
    landed = rig.piece(8) if op is Op.WRITE else bytes(rig.memory[:SIZE])
    new, old = (b"\x02", b"\x01") if op is Op.WRITE else (b"\x01", b"\x02")
    assert landed == new * moved + old * (SIZE - moved)


def test_torn_write_reports_success(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.TORN))
    rig.write(file).wait(PATIENCE)
    moved = int(rig.engine.injected[0].detail)
    assert moved < SIZE
    assert moved % file.alignment == 0
    assert rig.piece(8) == b"\x02" * moved + b"\x01" * (SIZE - moved)


def test_misdirected_write_reports_success(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.MISDIRECTED))
    rig.write(file).wait(PATIENCE)
    assert rig.piece(8) == b"\x01" * SIZE
    victim = int(rig.engine.injected[0].detail)
    assert victim % SIZE == 0
    assert rig.piece(victim // SIZE) == b"\x02" * SIZE
    rig.write(file, 0).wait(PATIENCE)
    assert rig.engine.injected[1].detail > 0


def test_flip_changes_one_bit(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.FLIP))
    rig.read(file).wait(PATIENCE)
    wrong = [(at, byte) for at, byte in enumerate(rig.memory[:SIZE]) if byte != 1]
    assert len(wrong) == 1
    assert (wrong[0][1] ^ 1).bit_count() == 1
    assert rig.piece(8) == b"\x01" * SIZE
    with pytest.raises(ConfigError, match="flip supports only op = read"):
        Fault(kind=FaultKind.FLIP, op=Op.WRITE)


def test_slow_requests_are_overtaken(rig: Rig) -> None:
    for seconds in (0.4, 4, 40, 400):  # longer delays if the machine is busy
        file = rig.start(Fault(kind=FaultKind.SLOW, at=(0,), seconds=seconds), seed=1)
        order: list[int] = []
        slow = rig.write(file)
        slow.on_done(lambda _, order=order: order.append(0))
        for piece in (20, 21):
            ticket = rig.write(file, piece)
            ticket.on_done(lambda _, order=order, piece=piece: order.append(piece))
            ticket.wait(PATIENCE)
        slow.wait(PATIENCE + seconds)
        assert slow.completed - slow.submitted >= rig.engine.injected[0].detail > 0
        if order[2:] == [0]:
            break
    assert sorted(order[:2]) == [20, 21]
    assert order[2:] == [0]
    assert rig.piece(8) == b"\x02" * SIZE


def test_delayed_write_uses_the_current_memory_content(rig: Rig) -> None:
    """Memory that is reused before its ticket completes shows up in the file."""
    for seconds in (0.3, 3, 30, 300):  # longer delays if the machine is busy
        file = rig.start(Fault(kind=FaultKind.SLOW, seconds=seconds))
        ticket = rig.write(file)
        rig.memory[:SIZE] = b"\x03" * SIZE
        ticket.wait(PATIENCE + seconds)
        if rig.piece(8) == b"\x03" * SIZE:
            break
    assert rig.piece(8) == b"\x03" * SIZE


def test_stuck_request_completes_after_release(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.STUCK, limit=1))
    stuck = rig.write(file)
    rig.write(file, 9).wait(PATIENCE)
    with pytest.raises(StallError):
        stuck.wait(0.05)
    assert rig.piece(8) == b"\x01" * SIZE
    rig.engine.release()
    stuck.wait(PATIENCE)
    assert rig.piece(8) == b"\x02" * SIZE


def test_close_completes_every_ticket(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.STUCK, every=3), Fault(kind=FaultKind.SLOW, every=2, seconds=36e3))
    tickets = [rig.write(file, piece) for piece in range(12)]
    rig.engine.close()  # at once, not after hours
    assert all(ticket.done for ticket in tickets)
    failed = [piece for piece, ticket in enumerate(tickets) if ticket.error is not None]
    assert failed == [2, 5, 8, 11]
    for piece in set(range(12)) - set(failed):
        assert rig.piece(piece) == b"\x02" * SIZE


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_seed_reproduces_faults(rig: Rig, kind: str) -> None:
    def run(seed: int) -> list[object]:
        rig.path.write_bytes(b"\x01" * (64 * SIZE))
        file = rig.start(
            Fault(kind=FaultKind.EIO, probability=0.2),
            Fault(kind=FaultKind.TORN, probability=0.3),
            Fault(kind=FaultKind.FLIP, probability=0.3),
            Fault(kind=FaultKind.MISDIRECTED, op=Op.WRITE, every=7),
            seed=seed,
            kind=kind,
        )
        failed = []
        for piece in range(60):
            ticket = rig.write(file, piece) if piece % 2 else rig.read(file, piece)
            try:
                ticket.wait(PATIENCE)
            except StorageError:
                failed.append(piece)
        return [failed, list(rig.engine.injected), rig.path.read_bytes()]

    first, other = run(5), run(6)
    assert {fault.kind for fault in first[1]} >= {FaultKind.EIO, FaultKind.TORN, FaultKind.FLIP}
    assert run(5) == first
    assert other[1] != first[1]


def test_fault_is_restricted_to_path_and_limit(rig: Rig, tmp_path: Path) -> None:
    file = rig.start(Fault(kind=FaultKind.EIO, path="other", limit=1))
    other = rig.engine.open(str(tmp_path / "other"), create=True)
    rig.write(file).wait(PATIENCE)
    with pytest.raises(StorageError):
        rig.write(other).wait(PATIENCE)
    rig.write(other).wait(PATIENCE)
    assert os.path.getsize(other.path) == 9 * SIZE


def test_contradictory_fault_rules_are_rejected(subtests: pytest.Subtests) -> None:
    for wrong in [{"probability": 2.0}, {"every": 0}, {"every": 2, "at": (1,)}, {"probability": 0.5, "every": 2}]:
        with subtests.test(wrong=wrong), pytest.raises(ConfigError):
            Fault(kind=FaultKind.EIO, **wrong)
