"""Tests of the paced engine, which limits the bandwidth of each folder."""

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
    """Engine without rate limits."""
    engine = PacedEngine(ThreadEngine(4, 1 << 20))
    yield engine
    engine.close()


def pacing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "infinity-io-pace"]


def test_files_of_a_folder_share_its_rate(paced: PacedEngine, tmp_path: Path) -> None:
    """A tenth of a second's worth of bytes and the last request are not delayed."""
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


def test_rate_does_not_delay_other_folders(paced: PacedEngine, tmp_path: Path) -> None:
    """Delayed requests are submitted when the limit is removed."""
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


def test_requests_of_a_file_keep_their_order(tmp_path: Path) -> None:
    """This holds even if the rate changes meanwhile."""
    seen: list[int] = []

    class RecordingEngine(ThreadEngine):
        def submit(self, op: Op, file, offset: int, memory: memoryview) -> Ticket:  # type: ignore[no-untyped-def]
            seen.append(offset)
            return super().submit(op, file, offset, memory)

    engine = PacedEngine(RecordingEngine(1, 1 << 20))
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


def test_close_completes_delayed_requests(tmp_path: Path) -> None:
    """They complete immediately; afterwards no request is accepted, and no rate starts a thread."""
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


def test_request_rejected_by_the_inner_engine_fails_its_ticket(paced: PacedEngine, tmp_path: Path) -> None:
    """The pacing thread has no caller, so the error is raised by wait()."""
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(BLOCK) as memory:
        paced.pace({str(tmp_path): 1e9})
        paced.forget(file)
        ticket = paced.submit(Op.WRITE, file, 0, memory)
        with pytest.raises(InfinityError, match="not open"):
            ticket.wait(PATIENCE)


def test_no_thread_is_started_without_a_rate(paced: PacedEngine, tmp_path: Path) -> None:
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(BLOCK) as memory:
        paced.submit(Op.WRITE, file, 0, memory).wait(PATIENCE)
        paced.pace({})
        assert not pacing_threads()


def test_very_low_rate_does_not_stop_the_pacing_thread(paced: PacedEngine, tmp_path: Path) -> None:
    """A wait would exceed the longest possible timeout; requests continue when the rate is removed."""
    file = paced.open(str(tmp_path / "file"), create=True)
    with mapped(2 * BLOCK) as memory:
        paced.pace({str(tmp_path): 1e-9})
        tickets = [paced.submit(Op.WRITE, file, at, memory[at : at + BLOCK]) for at in (0, BLOCK)]
        time.sleep(0.2)
        paced.pace({})
        for ticket in tickets:
            ticket.wait(PATIENCE)
