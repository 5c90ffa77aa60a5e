"""Tests of fault injection: each kind of fault has its effect, and a seed reproduces it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import StallError, StorageError
from infinity.io import DataFile, Op, ThreadEngine, Ticket
from support.engines import BLOCK, PATIENCE, mapped
from support.fault_engine import Fault, FaultEngine, FaultKind

SIZE = 16 * BLOCK
OLD, NEW = b"\x01" * SIZE, b"\x02" * SIZE


class Rig:
    """A file of 64 pieces of `SIZE` bytes with value 1, and memory with value 2."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        self.path, self.memory = folder / "file", memory
        self.engine = FaultEngine(ThreadEngine(4, 1 << 20), 0)

    def start(self, *faults: Fault, seed: int = 1) -> DataFile:
        self.engine.close()
        self.engine = FaultEngine(ThreadEngine(4, 1 << 20), seed, faults)
        self.path.write_bytes(OLD * 64)
        self.memory[:] = NEW
        return self.engine.open(str(self.path))

    def write(self, file: DataFile, piece: int = 8) -> Ticket:
        return self.engine.submit(Op.WRITE, file, piece * SIZE, self.memory)

    def read(self, file: DataFile, piece: int = 8) -> Ticket:
        return self.engine.submit(Op.READ, file, piece * SIZE, self.memory)

    def pieces(self) -> list[bytes]:
        content = self.path.read_bytes()
        return [content[start : start + SIZE] for start in range(0, len(content), SIZE)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig whose engine is closed afterwards."""
    with mapped(SIZE) as memory:
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
    assert rig.pieces()[8:10] == [NEW, OLD]


def test_transfers_are_short_torn_or_misdirected(rig: Rig) -> None:
    """A short transfer raises an error; a torn or misdirected write reports success."""
    file = rig.start(Fault(kind=FaultKind.SHORT))
    for transfer in (rig.write, rig.read):
        with pytest.raises(StorageError, match="short transfer"):
            transfer(file).wait(PATIENCE)
    file = rig.start(Fault(kind=FaultKind.TORN))
    rig.write(file).wait(PATIENCE)
    torn = rig.pieces()[8].count(2)
    assert torn < SIZE
    assert torn % file.alignment == 0
    file = rig.start(Fault(kind=FaultKind.MISDIRECTED))
    rig.write(file).wait(PATIENCE)
    assert rig.pieces()[8] == OLD
    assert rig.pieces().count(NEW) == 1
    rig.write(file, 0).wait(PATIENCE)
    assert rig.pieces()[0] == OLD


def test_flip_changes_one_bit(rig: Rig) -> None:
    file = rig.start(Fault(kind=FaultKind.FLIP))
    rig.read(file).wait(PATIENCE)
    (wrong,) = (byte for byte in rig.memory if byte != 1)
    assert (wrong ^ 1).bit_count() == 1
    assert rig.pieces()[8] == OLD


def test_delayed_write_is_overtaken_and_uses_the_current_memory_content(rig: Rig) -> None:
    """Memory that is reused before its ticket completes shows up in the file."""
    for seconds in (0.4, 4, 40, 400):  # longer delays if the machine is busy
        file = rig.start(Fault(kind=FaultKind.SLOW, at=(0,), seconds=seconds))
        slow = rig.write(file)
        rig.write(file, 20).wait(PATIENCE)
        overtaken = not slow.done
        rig.memory[:] = OLD
        slow.wait(PATIENCE + seconds)
        if overtaken and rig.pieces()[8] == OLD:
            break
    assert overtaken
    assert (rig.pieces()[8], rig.pieces()[20]) == (OLD, NEW)


def test_stuck_request_completes_after_release_or_close(rig: Rig) -> None:
    """Closing submits delayed requests at once."""
    file = rig.start(Fault(kind=FaultKind.STUCK, every=3), Fault(kind=FaultKind.SLOW, every=2, seconds=36e3))
    tickets = [rig.write(file, piece) for piece in range(6)]
    with pytest.raises(StallError):
        tickets[2].wait(0.05)
    rig.engine.release()
    tickets[2].wait(PATIENCE)
    assert rig.pieces()[2] == NEW
    tickets += [rig.write(file, piece) for piece in range(6, 12)]
    rig.engine.close()
    assert all(ticket.done for ticket in tickets)
    assert [piece for piece, ticket in enumerate(tickets) if ticket.error is not None] == [8, 11]
    assert [piece for piece, content in enumerate(rig.pieces()[:12]) if content == OLD] == [8, 11]


def test_seed_reproduces_faults(rig: Rig) -> None:
    def run(seed: int) -> list[object]:
        faults = (Fault(kind=kind, probability=0.2) for kind in (FaultKind.EIO, FaultKind.TORN, FaultKind.FLIP))
        file = rig.start(*faults, Fault(kind=FaultKind.MISDIRECTED, op=Op.WRITE, every=7), seed=seed)
        failed = []
        for piece in range(60):
            ticket = rig.write(file, piece) if piece % 2 else rig.read(file, piece)
            try:
                ticket.wait(PATIENCE)
            except StorageError:
                failed.append(piece)
        return [failed, rig.engine.injected, rig.path.read_bytes()]

    assert run(5) == run(5) != run(6)
