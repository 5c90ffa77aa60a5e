"""An engine that hands requests on as fast as a file may be moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import InfinityError
from infinity.io import Op, PacedEngine, ThreadEngine, Ticket
from support.engines import BLOCK, PATIENCE, mapped

KIB = 1 << 10
SIZE = 64 * BLOCK


@pytest.fixture
def paced() -> Iterator[PacedEngine]:
    """An engine without limits."""
    engine = PacedEngine(ThreadEngine(4, 1 << 20))
    yield engine
    engine.close()


def pacing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "infinity-io-pace"]


def test_it_goes_no_faster_than_its_rate(paced: PacedEngine, tmp_path: Path) -> None:
    """A tenth of a second's worth goes ahead of time, and the last request."""
    file = paced.open(str(tmp_path / "file"), create=True)
    rate = 4 * SIZE
    with mapped(SIZE) as memory:
        paced.pace({str(tmp_path): rate})
        began = time.monotonic()
        tickets = [
            paced.submit(Op.WRITE, file, at, memory[at : at + BLOCK]) for at in range(0, SIZE, BLOCK) for _ in "xx"
        ]
        for ticket in tickets:
            ticket.wait(PATIENCE)
        assert time.monotonic() - began >= (2 * SIZE - BLOCK) / rate - 0.1
        tickets.clear()


def test_files_of_a_folder_share_its_rate(paced: PacedEngine, tmp_path: Path) -> None:
    """What one moves, the other has to wait for."""
    files = [paced.open(str(tmp_path / name), create=True) for name in ("pages", "activations")]
    rate = 4 * SIZE
    with mapped(SIZE) as memory:
        paced.pace({str(tmp_path): rate})
        began = time.monotonic()
        tickets = [
            paced.submit(Op.WRITE, file, at, memory[at : at + BLOCK]) for at in range(0, SIZE, BLOCK) for file in files
        ]
        for ticket in tickets:
            ticket.wait(PATIENCE)
        assert time.monotonic() - began >= (2 * SIZE - BLOCK) / rate - 0.1
        tickets.clear()


def test_other_folders_are_not_held_back(paced: PacedEngine, tmp_path: Path) -> None:
    """Even if the files of one may hardly move anything; what waits goes when its rate is taken back."""
    for name in ("slow", "free"):
        (tmp_path / name).mkdir()
    slow, free = (paced.open(str(tmp_path / name / "file"), create=True) for name in ("slow", "free"))
    with mapped(SIZE) as memory:
        paced.pace({str(tmp_path / "slow"): 1.0})
        waiting = [paced.submit(Op.WRITE, slow, at, memory[at : at + BLOCK]) for at in range(0, SIZE, BLOCK)]
        paced.submit(Op.WRITE, free, 0, memory).wait(PATIENCE)
        assert not waiting[-1].done
        paced.pace({})
        for ticket in waiting:
            ticket.wait(PATIENCE)
        assert (tmp_path / "slow" / "file").stat().st_size == SIZE
        waiting.clear()


def test_a_file_s_requests_keep_their_order(tmp_path: Path) -> None:
    """Also when its rate changes meanwhile."""
    seen: list[int] = []

    class Noted(ThreadEngine):
        def submit(self, op: Op, file, offset: int, memory: memoryview) -> Ticket:  # type: ignore[no-untyped-def]
            seen.append(offset)
            return super().submit(op, file, offset, memory)

    engine = PacedEngine(Noted(1, 1 << 20))
    file = engine.open(str(tmp_path / "file"), create=True)
    with mapped(SIZE) as memory:
        engine.pace({str(tmp_path): 1.0})
        for at in range(0, SIZE, BLOCK):
            engine.submit(Op.WRITE, file, at, memory[at : at + BLOCK])
            if at == SIZE // 2:
                engine.pace({str(tmp_path): 1e12})
        engine.close()
    assert seen == sorted(seen)
    assert len(seen) == SIZE // BLOCK


def test_closing_completes_what_waits(tmp_path: Path) -> None:
    """At once, whatever the rate; then nothing more is taken, and no rate starts a thread."""
    engine = PacedEngine(ThreadEngine(4, 1 << 20))
    file = engine.open(str(tmp_path / "file"), create=True)
    with mapped(SIZE) as memory:
        engine.pace({str(tmp_path): 1.0})
        tickets = [engine.submit(Op.WRITE, file, at, memory[at : at + BLOCK]) for at in range(0, SIZE, BLOCK)]
        engine.close()
        assert all(ticket.done and ticket.error is None for ticket in tickets)
        assert not pacing_threads()
        engine.pace({str(tmp_path): 1.0})
        assert not pacing_threads()
        with pytest.raises(InfinityError):
            engine.submit(Op.WRITE, file, 0, memory)
        tickets.clear()


def test_what_the_other_engine_refuses_fails(paced: PacedEngine, tmp_path: Path) -> None:
    """On the pacing thread there is nobody to raise it to: whoever waits hears it."""
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(BLOCK) as memory:
        paced.pace({str(tmp_path): 1e9})
        paced.forget(file)
        ticket = paced.submit(Op.WRITE, file, 0, memory)
        with pytest.raises(InfinityError, match="not open"):
            ticket.wait(PATIENCE)


def test_without_a_rate_there_is_no_thread(paced: PacedEngine, tmp_path: Path) -> None:
    """And the ticket is the other engine's own."""
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(BLOCK) as memory:
        paced.submit(Op.WRITE, file, 0, memory).wait(PATIENCE)
        paced.pace({})
        assert not pacing_threads()


def test_a_rate_of_next_to_nothing_does_not_end_the_thread(paced: PacedEngine, tmp_path: Path) -> None:
    """A clock has a largest time to wait; when the rate is gone, requests go on."""
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(2 * BLOCK) as memory:
        paced.pace({str(tmp_path): 1e-9})
        tickets = [paced.submit(Op.WRITE, file, at, memory[at : at + BLOCK]) for at in (0, BLOCK)]
        time.sleep(0.2)
        paced.pace({})
        for ticket in tickets:
            ticket.wait(PATIENCE)
