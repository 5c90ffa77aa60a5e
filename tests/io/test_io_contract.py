"""Tests of the contract of `infinity.io.engine` for every engine."""

from __future__ import annotations

import errno
import os
import random
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.errors import InfinityError, StallError, StorageError
from infinity.io import Engine, Op, Ticket
from support.engines import BLOCK, KINDS, PATIENCE, make_engine, mapped, open_descriptors


def test_written_bytes_are_read_back(engine: Engine, tmp_path: Path, blob: bytes) -> None:
    with mapped(len(blob)) as out, mapped(len(blob)) as back:
        out[:] = blob
        engine.register(out)
        file = engine.open(str(tmp_path / "file"), create=True)
        engine.submit(Op.WRITE, file, 0, out).wait(PATIENCE)
        engine.sync(file)
        engine.submit(Op.READ, file, 0, back).wait(PATIENCE)
        assert back == blob
        assert (tmp_path / "file").read_bytes() == blob
        assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
        engine.forget(file)
        engine.close()


_runs = st.lists(st.tuples(st.integers(0, 255), st.integers(1, 64)), min_size=1, max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    writes=_runs,
    reads=_runs,
    request_bytes=st.sampled_from([BLOCK, 3 * BLOCK, 64 * BLOCK]),
    depth=st.integers(1, 9),
    registered=st.booleans(),
)
def test_random_transfers_match_the_expected_content(
    kind: str,
    writes: list[tuple[int, int]],
    reads: list[tuple[int, int]],
    request_bytes: int,
    depth: int,
    registered: bool,
) -> None:
    size = 320 * BLOCK
    expected = bytearray(size)
    with tempfile.TemporaryDirectory() as folder, mapped(size) as memory:
        engine = make_engine(kind, depth=depth, request=request_bytes)
        if registered:
            engine.register(memory[: size // 2])
        file = engine.open(f"{folder}/file", create=True)
        os.truncate(file.fd, size)
        for number, (first, count) in enumerate(writes):
            start, stop = first * BLOCK, (first + count) * BLOCK
            expected[start:stop] = memory[start:stop] = random.Random(number).randbytes(stop - start)
            engine.submit(Op.WRITE, file, start, memory[start:stop]).wait(PATIENCE)
        for first, count in reads:
            start, stop = first * BLOCK, (first + count) * BLOCK
            memory[:] = bytes(size)
            engine.submit(Op.READ, file, start, memory[start:stop]).wait(PATIENCE)
            assert memory[start:stop] == expected[start:stop]
            assert not any(memory[:start])
            assert not any(memory[stop:])
        engine.close()


def test_many_threads_can_submit_concurrently(engine: Engine, filled: str, blob: bytes) -> None:
    file = engine.open(filled)
    failures: list[BaseException] = []

    def body(seed: int) -> None:
        rng = random.Random(seed)
        with mapped(1 << 20) as memory:
            for _ in range(5):
                starts = [rng.randrange(0, 960) * BLOCK for _ in range(16)]
                tickets = [
                    engine.submit(Op.READ, file, start, memory[at * (64 << 10) : (at + 1) * (64 << 10)])
                    for at, start in enumerate(starts)
                ]
                for at, (ticket, start) in enumerate(zip(tickets, starts, strict=True)):
                    ticket.wait(PATIENCE)
                    assert memory[at * (64 << 10) : (at + 1) * (64 << 10)] == blob[start : start + (64 << 10)]

    def guarded(seed: int) -> None:
        try:
            body(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_submitting_thread_may_end_before_its_transfer(engine: Engine, filled: str, blob: bytes) -> None:
    file = engine.open(filled)
    with mapped(len(blob)) as memory:
        tickets: list[Ticket] = []
        thread = threading.Thread(target=lambda: tickets.append(engine.submit(Op.READ, file, 0, memory)))
        thread.start()
        thread.join()
        tickets[0].wait(PATIENCE)
        assert memory == blob


def test_ticket_waits_for_its_own_transfer_only(kind: str, filled: str) -> None:
    engine = make_engine(kind, depth=2, request=BLOCK)
    file = engine.open(filled)
    with mapped((4 << 20) + BLOCK) as memory:
        for _ in range(10):  # the long request may finish first if the machine is busy
            short = engine.submit(Op.READ, file, 0, memory[:BLOCK])
            long = engine.submit(Op.READ, file, 0, memory[BLOCK:])
            short.wait(PATIENCE)
            ahead = not long.done
            long.wait(PATIENCE)
            if ahead:
                break
        else:
            pytest.fail("a short request always waited for a long one")
        engine.close()


def test_wait_times_out(kind: str, filled: str) -> None:
    engine = make_engine(kind, depth=1, request=BLOCK)
    file = engine.open(filled)
    with mapped(4 << 20) as memory:
        ticket = engine.submit(Op.READ, file, 0, memory)
        with pytest.raises(StallError, match=r"read of 4194304 bytes at offset 0 of .*filled has not"):
            ticket.wait(0)
        ticket.wait(PATIENCE)
        engine.close()


def test_callbacks_run_once_in_order(engine: Engine, filled: str) -> None:
    file = engine.open(filled)
    calls: list[tuple[str, Ticket]] = []
    late = threading.Event()
    with mapped(1 << 20) as memory:
        ticket = engine.submit(Op.READ, file, 0, memory)
        ticket.on_done(lambda done: calls.append(("first", done)))
        ticket.on_done(lambda done: calls.append(("second", done)))
        ticket.on_done(lambda _: late.set())
        ticket.wait(PATIENCE)
        assert late.wait(PATIENCE)
        ticket.on_done(lambda done: calls.append(("third", done)))
    assert calls == [("first", ticket), ("second", ticket), ("third", ticket)]


def test_callback_may_submit_and_raise(engine: Engine, filled: str) -> None:
    file = engine.open(filled)
    left = [20]
    end = threading.Event()
    with mapped(64 << 10) as memory:

        def again(_: Ticket) -> None:
            left[0] -= 1
            if left[0]:
                engine.submit(Op.READ, file, 0, memory).on_done(again)
            else:
                end.set()
            raise RuntimeError("an error in a callback must not stop the engine")

        engine.submit(Op.READ, file, 0, memory).on_done(again)
        assert end.wait(PATIENCE)
        engine.submit(Op.READ, file, 0, memory).wait(PATIENCE)


def test_misaligned_or_invalid_requests_are_rejected(engine: Engine, filled: str) -> None:
    file = engine.open(filled)
    if not file.direct:
        pytest.skip("the temporary folder does not support O_DIRECT")
    with mapped(4 * BLOCK) as memory:
        for offset, part in ((1, memory[:BLOCK]), (0, memory[: BLOCK - 1]), (0, memory[1 : BLOCK + 1])):
            with pytest.raises(ValueError, match="multiples of"):
                engine.submit(Op.READ, file, offset, part)
            part.release()
        with pytest.raises(ValueError, match="0 bytes"):
            engine.submit(Op.READ, file, 0, memory[:0])
        with pytest.raises(ValueError, match="negative"):
            engine.submit(Op.READ, file, -BLOCK, memory)
        with pytest.raises(ValueError, match="contiguous"):
            engine.submit(Op.READ, file, 0, memory[::2])
        with pytest.raises(ValueError, match="read-only"):
            engine.submit(Op.READ, file, 0, memory.toreadonly())


def test_read_only_memory_can_be_a_write_source(engine: Engine, tmp_path: Path) -> None:
    file = engine.open(str(tmp_path / "file"), create=True)
    with mapped(4 * BLOCK) as memory:
        memory[:] = os.urandom(4 * BLOCK)
        engine.submit(Op.WRITE, file, 0, memory.toreadonly()).wait(PATIENCE)
        assert Path(file.path).read_bytes() == memory


def test_opening_a_missing_file_raises_storage_error(engine: Engine, tmp_path: Path) -> None:
    path = str(tmp_path / "missing")
    with pytest.raises(StorageError) as caught:
        engine.open(path)
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", path, errno.ENOENT)


def test_read_past_the_end_raises_storage_error(subtests: pytest.Subtests, engine: Engine, filled: str) -> None:
    for start in [2 << 20, 4 << 20, 5 << 20]:
        with subtests.test(start=start):
            file = engine.open(filled)
            with mapped(4 << 20) as memory:
                ticket = engine.submit(Op.READ, file, start, memory)
                with pytest.raises(StorageError, match="end of file") as caught:
                    ticket.wait(PATIENCE)
            error = caught.value
            assert (error.op, error.path, error.offset, error.length) == ("read", filled, start, 4 << 20)


def test_file_ending_within_a_block_raises_storage_error(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(bytes(BLOCK + 100))
    file = engine.open(str(path))
    with mapped(4 * BLOCK) as memory, pytest.raises(StorageError, match="end of file"):
        engine.submit(Op.READ, file, 0, memory).wait(PATIENCE)


def test_request_for_a_forgotten_file_raises(engine: Engine, filled: str) -> None:
    file = engine.open(filled)
    engine.forget(file)
    other = engine.open(filled)  # gets the same descriptor number
    engine.forget(file)
    with mapped(BLOCK) as memory:
        with pytest.raises(StorageError, match="not open"):
            engine.submit(Op.WRITE, file, 0, memory).wait(PATIENCE)
        engine.submit(Op.READ, other, 0, memory).wait(PATIENCE)
    with pytest.raises(StorageError, match="not open"):
        engine.sync(file)


def test_failed_request_does_not_affect_others(engine: Engine, filled: str, blob: bytes) -> None:
    file = engine.open(filled)
    with mapped(len(blob)) as memory, mapped(1 << 20) as scratch:
        bad = [engine.submit(Op.READ, file, 8 << 20, scratch) for _ in range(4)]
        good = engine.submit(Op.READ, file, 0, memory)
        good.wait(PATIENCE)
        assert memory == blob
        for ticket in bad:
            with pytest.raises(StorageError):
                ticket.wait(PATIENCE)


def test_close_completes_requests_in_flight(kind: str, tmp_path: Path, blob: bytes) -> None:
    engine = make_engine(kind)
    with mapped(len(blob)) as memory:
        memory[:] = blob
        file = engine.open(str(tmp_path / "file"), create=True)
        tickets = [engine.submit(Op.WRITE, file, at * len(blob), memory) for at in range(8)]
        engine.close()
        for ticket in tickets:
            assert ticket.done
            ticket.wait(0)
        engine.close()
        with pytest.raises(InfinityError):
            engine.submit(Op.WRITE, file, 0, memory)
    assert Path(file.path).read_bytes() == blob * 8


def test_engine_leaks_no_descriptors_threads_or_mappings(kind: str, filled: str) -> None:
    def cycle() -> None:
        engine = make_engine(kind)
        with mapped(64 << 10) as memory:
            engine.register(memory)
            file = engine.open(filled)
            engine.submit(Op.READ, file, 0, memory).wait(PATIENCE)
            engine.close()

    cycle()
    before = open_descriptors(), threading.active_count(), _mappings()
    for _ in range(40):
        cycle()
    after = open_descriptors(), threading.active_count(), _mappings()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 20  # a leak would add one per cycle; stacks and malloc arenas vary


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_memory_can_be_registered_repeatedly_and_in_pieces(engine: Engine, filled: str, blob: bytes) -> None:
    file = engine.open(filled)
    with mapped(len(blob)) as memory:
        engine.register(memory[: 1 << 20])
        engine.register(memory[: 1 << 20])
        engine.register(memory[3 << 20 :])
        engine.submit(Op.READ, file, 0, memory).wait(PATIENCE)
        assert memory == blob
        engine.close()


def test_gil_is_released_during_transfers(kind: str, tmp_path: Path) -> None:
    """Holding the lock for an entire transfer would allow the counter only one or two steps."""
    engine = make_engine(kind, depth=4, request=8 << 20)
    size = 64 << 20
    stop = threading.Event()
    ticks = [0]

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    with mapped(size) as memory:
        file = engine.open(str(tmp_path / "file"), create=True)
        counter = threading.Thread(target=count)
        counter.start()
        most = {Op.WRITE: 0, Op.READ: 0}
        for _ in range(100):  # other processes may occupy the CPU
            for op in most:
                before = ticks[0]
                engine.submit(op, file, 0, memory).wait(PATIENCE)
                most[op] = max(most[op], ticks[0] - before)
            if min(most.values()) >= 10:
                break
        stop.set()
        counter.join()
        engine.close()
    assert min(most.values()) >= 10, most
