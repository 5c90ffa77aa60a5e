"""An engine that simulates a loss of power, in which writes after the last `sync` may be lost.

`make crash-test` resumes from the remaining files.
"""

from __future__ import annotations

import os
import random
import threading
from typing import NamedTuple

from infinity.hugepages import transfer_memory
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.units import align_up
from support.wrapped_engine import WrappedEngine

_SECTOR = 512


class _Written(NamedTuple):
    ticket: Ticket
    before: bytes


class VolatileEngine(WrappedEngine):
    """Forward requests to `inner`, and keep the data that unsynced writes have replaced."""

    kind = "volatile"

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._unsynced: list[_Written] = []

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer. Before a write, read the data that it replaces."""
        if op is Op.WRITE:
            length = memory.nbytes
            before = transfer_memory(align_up(length, 4096))[:length]
            self._inner.submit(Op.READ, file, offset, before).wait()
            ticket = self._inner.submit(op, file, offset, memory)
            with self._lock:
                self._unsynced.append(_Written(ticket, bytes(before)))
            return ticket
        return self._inner.submit(op, file, offset, memory)

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable, so that they can no longer be lost."""
        with self._lock:
            durable = {id(w) for w in self._unsynced if w.ticket.done and w.ticket.path == file.path}
        self._inner.sync(file)
        with self._lock:
            self._unsynced = [written for written in self._unsynced if id(written) not in durable]

    def lose_power(self, rng: random.Random) -> int:
        """Undo each unsynced write entirely, partly (by sector) or not at all; return the number of unsynced writes.

        The process must end afterwards.
        """
        with self._lock:
            lost, self._unsynced = self._unsynced, []
        for ticket, _ in lost:
            ended = threading.Event()
            ticket.on_done(lambda _, ended=ended: ended.set())  # type: ignore[misc]
            ended.wait()
        rng.shuffle(lost)
        for ticket, before in lost:
            survives = rng.choice((0.0, 0.5, 1.0))
            descriptor = os.open(ticket.path, os.O_WRONLY)
            try:
                for start in range(0, len(before), _SECTOR):
                    if rng.random() >= survives:
                        os.pwrite(descriptor, before[start : start + _SECTOR], ticket.offset + start)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return len(lost)
