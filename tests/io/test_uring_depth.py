"""Tests of the io_uring engine's queue depth and the order of requests per file."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infinity.config import StorageConfig
from infinity.io import Op, UringEngine
from infinity.io.ring import Ring, RingRefusedError
from infinity.io.select import open_engine
from support.engines import BLOCK, PATIENCE, make_engine, mapped

DEPTH, CHUNKS = 4, 64


def test_each_path_has_its_own_queue_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with many earlier requests does not delay the requests of other files."""
    pushed: list[int] = []
    most: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    slots: dict[int, int] = {}
    push, reap = Ring.push, Ring.reap

    def watched_push(
        ring: Ring, opcode: int, fd: int, address: int, length: int, offset: int, data: int, *more: Any
    ) -> None:
        if fd >= 0 and data < 3 * DEPTH:  # a request slot, neither a trial request nor a wake-up
            pushed.append(fd)
            slots[data] = fd
            inside[fd] += 1
            most[fd] = max(most[fd], inside[fd])
        push(ring, opcode, fd, address, length, offset, data, *more)

    def watched_reap(ring: Ring) -> list[tuple[int, int]]:
        found = reap(ring)
        for data, _ in found:
            if data in slots:
                inside[slots.pop(data)] -= 1
        return found

    monkeypatch.setattr(Ring, "push", watched_push)
    monkeypatch.setattr(Ring, "reap", watched_reap)
    try:
        engine = UringEngine(DEPTH, BLOCK, paths=3, rings=1)
    except RingRefusedError as error:
        pytest.skip(str(error))
    files = [engine.open(str(tmp_path / name), create=True) for name in "abc"]
    gate = threading.Event()
    (ring,) = engine._rings
    with ring._lock:  # the thread takes all requests at the same moment
        ring._commands.append(lambda: gate.wait(PATIENCE))
        ring._wake()
    with mapped(CHUNKS * BLOCK) as memory:
        tickets = [engine.submit(Op.WRITE, file, 0, memory) for file in files]
        gate.set()
        for ticket in tickets:
            ticket.wait(PATIENCE)
        engine.close()
    fds = [file.fd for file in files]
    assert pushed[: 3 * DEPTH] == DEPTH * fds
    assert most == dict.fromkeys(fds, DEPTH)
    assert Counter(pushed) == dict.fromkeys(fds, CHUNKS)


def test_engine_depth_is_multiplied_by_the_number_of_paths() -> None:
    try:
        engine = open_engine(StorageConfig(paths=("a", "b", "c"), engine="auto", queue_depth=5))
    except RingRefusedError as error:
        pytest.skip(str(error))
    if not isinstance(engine, UringEngine):
        pytest.skip("io_uring is not allowed here")
    assert [len(ring._slots) for ring in engine._rings] == [9, 6]
    engine.close()


def test_rings_share_the_requests_of_each_file(tmp_path: Path) -> None:
    """This holds if requests of two files alternate, and the rings share the depth."""
    try:
        engine = UringEngine(DEPTH, BLOCK, paths=2)
    except RingRefusedError as error:
        pytest.skip(str(error))
    files = [engine.open(str(tmp_path / name), create=True) for name in "ab"]
    gate = threading.Event()
    for ring in engine._rings:
        with ring._lock:
            ring._commands.append(lambda: gate.wait(PATIENCE))
            ring._wake()
    with mapped(2 * CHUNKS * BLOCK) as memory:
        parts = [memory[at * BLOCK : (at + 1) * BLOCK] for at in range(2 * CHUNKS)]
        tickets = [engine.submit(Op.WRITE, files[at % 2], at // 2 * BLOCK, part) for at, part in enumerate(parts)]
        assert {ring.load(file)[0] for ring in engine._rings for file in files} == {CHUNKS // len(engine._rings)}
        gate.set()
        for ticket in tickets:
            ticket.wait(PATIENCE)
        for part in parts:
            part.release()
        engine.close()
    assert sum(ring._depth for ring in engine._rings) == DEPTH


def test_one_ring_is_used_if_a_second_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the full depth, and the failed ring is closed."""
    make_engine("io_uring").close()  # skips the test if io_uring is not available
    opened = 0
    real = Ring.__init__

    def limited(self: Ring, entries: int) -> None:
        nonlocal opened
        opened += 1
        if opened == 2:
            raise RingRefusedError(errno.ENOMEM)
        real(self, entries)

    monkeypatch.setattr(Ring, "__init__", limited)
    engine = UringEngine(DEPTH, BLOCK)
    (ring,) = engine._rings
    assert ring._depth == DEPTH
    file = engine.open(str(tmp_path / "a"), create=True)
    with mapped(BLOCK) as memory:
        engine.submit(Op.WRITE, file, 0, memory).wait(PATIENCE)
        engine.close()
