"""How many requests of each file are in the kernel, and whose turn it is."""

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


def test_every_path_has_a_depth_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for which much was asked first leaves the others their turns, at once."""
    pushed: list[int] = []
    most: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    slots: dict[int, int] = {}
    push, reap = Ring.push, Ring.reap

    def watched_push(
        ring: Ring, opcode: int, fd: int, address: int, length: int, offset: int, data: int, *more: Any
    ) -> None:
        if fd >= 0 and data < 3 * DEPTH:  # a slot: not what tries the ring, nor the wake-up
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


def test_a_run_has_a_depth_for_each_of_its_paths() -> None:
    """In all, as many requests are in flight as all its drives take."""
    try:
        engine, _ = open_engine(StorageConfig(paths=("a", "b", "c"), engine="auto", queue_depth=5))
    except RingRefusedError as error:
        pytest.skip(str(error))
    if not isinstance(engine, UringEngine):
        pytest.skip("io_uring is not allowed here")
    assert [len(ring._slots) for ring in engine._rings] == [9, 6]
    engine.close()


def test_requests_of_each_file_are_shared_by_the_rings(tmp_path: Path) -> None:
    """Also where requests of two files take turns; and the rings share the depth."""
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


def test_one_ring_does_where_there_is_no_room_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the whole depth then; the one that was opened in vain is closed."""
    make_engine("io_uring").close()  # where it is not allowed, this is skipped
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
