"""I/O engine that injects faults. The same seed and the same requests result in the same faults."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from infinity.errors import InfinityError, StorageError
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.files import pin_request
from infinity.units import align_down
from support.wrapped_engine import WrappedEngine

_log = logging.getLogger(__name__)


class FaultKind(Enum):
    """Type of a fault."""

    EIO = "eio"
    """The request fails with EIO, and no data is transferred."""
    ENOSPC = "enospc"
    """A write fails with ENOSPC, and no data is transferred."""
    SHORT = "short"
    """Part of the data is transferred, and the request fails without an errno."""
    TORN = "torn"
    """Only a prefix of the data is written, and the request succeeds."""
    MISDIRECTED = "misdirected"
    """The data is written to a different offset, and the request succeeds."""
    FLIP = "flip"
    """One bit of the data that was read is inverted, and the request succeeds."""
    SLOW = "slow"
    """The request is submitted after a random delay, so that later requests may complete earlier."""
    STUCK = "stuck"
    """The request is not submitted until `FaultEngine.release`, or fails at `close`."""


_ONLY = {
    FaultKind.ENOSPC: Op.WRITE,
    FaultKind.TORN: Op.WRITE,
    FaultKind.MISDIRECTED: Op.WRITE,
    FaultKind.FLIP: Op.READ,
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Rule that selects requests and the fault to inject into them.

    Requests that match `op` are numbered from 0. The fault is injected if the number is in `at`, for every `every`-th
    request, or with `probability`. If none of these is set, it is injected into all matching requests.
    """

    kind: FaultKind
    op: Op | None = None
    """Direction. By default, all directions that the kind supports."""
    probability: float | None = None
    every: int | None = None
    at: tuple[int, ...] | None = None
    seconds: float = 0.1
    """Maximum delay of `SLOW` faults."""

    def matches(self, op: Op) -> bool:
        """Return whether a request matches this rule."""
        return self.op in (None, op) and _ONLY.get(self.kind) in (None, op)

    def applies(self, number: int, rng: random.Random) -> bool:
        """Return whether to inject the fault into the `number`-th matching request."""
        if self.at is not None:
            return number in self.at
        if self.every is not None:
            return number % self.every == self.every - 1
        return self.probability is None or rng.random() < self.probability


@dataclass(eq=False, slots=True)
class _Call:
    op: Op
    file: DataFile
    offset: int
    memory: memoryview
    ticket: Ticket
    rng: random.Random


class FaultEngine(WrappedEngine):
    """Forward requests to `inner`, which is owned and closed by this engine, and inject `faults` into some of them.

    If several rules apply to a request, the first one is used. Every ticket completes: at `close`, delayed requests are
    submitted and stuck requests fail.
    """

    kind = "faulty"

    def __init__(self, inner: Engine, seed: int, faults: Sequence[Fault] = (), *, on: bool = True) -> None:
        super().__init__(inner)
        self.on = on
        """Whether faults are injected. Requests are numbered only while this is true."""
        self._seed, self._faults = seed, tuple(faults)
        self._lock = threading.Lock()
        self._seen = [0] * len(self._faults)
        self._stuck: list[_Call] = []
        self._delayed: list[threading.Thread] = []
        self._closed = threading.Event()
        self.injected = 0
        """Number of faults."""

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer, possibly with a fault."""
        if not self.on:
            return self._inner.submit(op, file, offset, memory)
        pin_request(op, file, offset, memory).release()
        with self._lock:
            if self._closed.is_set():
                raise InfinityError(f"{op.value} of {file.path}: the I/O engine is closed")
            selected = self._choose(op)
            if selected is None:
                return self._inner.submit(op, file, offset, memory)
            fault, rng = selected
            self.injected += 1
            ticket = Ticket(op, file.path, offset, memory.nbytes)
            # A separate view, because the caller may release its view before the request completes.
            call = _Call(op, file, offset, memoryview(memory).cast("B"), ticket, rng)
        _INJECT[fault.kind](self, fault, call)
        return ticket

    def release(self) -> None:
        """Submit all requests that are currently stuck."""
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for call in stuck:
            self._pass_on(call)

    def close(self) -> None:
        """Submit delayed requests, let stuck requests fail, and close the inner engine. Idempotent."""
        with self._lock:
            self._closed.set()
            stuck, self._stuck = self._stuck, []
        for call in stuck:
            self._finish(call, _failure(call, None, "stuck until the engine was closed"))
        for thread in self._delayed:
            if thread is not threading.current_thread():
                thread.join()
        self._inner.close()

    def _choose(self, op: Op) -> tuple[Fault, random.Random] | None:
        chosen = None
        for index, fault in enumerate(self._faults):
            if not fault.matches(op):
                continue
            number = self._seen[index]
            self._seen[index] += 1
            # Each decision has its own generator, so that rules do not affect each other.
            rng = random.Random(f"{self._seed}/{index}/{number}")
            if chosen is None and fault.applies(number, rng):
                chosen = fault, rng
        return chosen

    def _fail(self, fault: Fault, call: _Call) -> None:
        code = errno.EIO if fault.kind is FaultKind.EIO else errno.ENOSPC
        self._finish(call, _failure(call, code, "injected"))

    def _short(self, fault: Fault, call: _Call) -> None:
        moved = _prefix(call)
        error = _failure(call, None, f"injected: short transfer, {moved} bytes")
        self._transfer(call, call.offset, call.memory[:moved], lambda inner: inner or error)

    def _torn(self, fault: Fault, call: _Call) -> None:
        self._transfer(call, call.offset, call.memory[: _prefix(call)], lambda inner: inner)

    def _misdirected(self, fault: Fault, call: _Call) -> None:
        length = call.ticket.length
        steps = [step for step in (-2, -1, 1, 2) if call.offset + step * length >= 0]
        self._transfer(call, call.offset + call.rng.choice(steps) * length, call.memory, lambda inner: inner)

    def _flip(self, fault: Fault, call: _Call) -> None:
        bit = call.rng.randrange(8 * call.ticket.length)

        def flip(inner: InfinityError | None) -> InfinityError | None:
            if inner is None:
                call.memory[bit // 8] ^= 1 << bit % 8
            return inner

        self._transfer(call, call.offset, call.memory, flip)

    def _slow(self, fault: Fault, call: _Call) -> None:
        thread = threading.Thread(target=self._later, args=(call.rng.uniform(0, fault.seconds), call), daemon=True)
        with self._lock:
            self._delayed = [*filter(threading.Thread.is_alive, self._delayed), thread]
            thread.start()

    def _later(self, seconds: float, call: _Call) -> None:
        # The request is submitted after the delay, so that during the delay a read has no effect and a write still
        # needs its buffer. A buffer that is reused too early therefore causes a visible error.
        self._closed.wait(seconds)
        self._pass_on(call)

    def _stuck_request(self, fault: Fault, call: _Call) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._stuck.append(call)
                return
        self._finish(call, _failure(call, None, "stuck until the engine was closed"))

    def _pass_on(self, call: _Call) -> None:
        self._transfer(call, call.offset, call.memory, lambda inner: inner)

    def _transfer(
        self,
        call: _Call,
        offset: int,
        memory: memoryview,
        result: Callable[[InfinityError | None], InfinityError | None],
    ) -> None:
        if not len(memory):
            self._finish(call, result(None))
            return
        try:
            inner = self._inner.submit(call.op, call.file, offset, memory)
        except (InfinityError, ValueError) as error:
            self._finish(call, _failure(call, None, str(error)))
            return
        inner.on_done(lambda ticket: self._finish(call, result(ticket.error)))

    def _finish(self, call: _Call, error: InfinityError | None) -> None:
        call.memory.release()  # before a waiting thread continues and unmaps it
        try:
            call.ticket.complete(error)
        except Exception:
            _log.exception("a callback of %s failed", call.ticket)


_INJECT: dict[FaultKind, Callable[[FaultEngine, Fault, _Call], None]] = {
    FaultKind.EIO: FaultEngine._fail,
    FaultKind.ENOSPC: FaultEngine._fail,
    FaultKind.SHORT: FaultEngine._short,
    FaultKind.TORN: FaultEngine._torn,
    FaultKind.MISDIRECTED: FaultEngine._misdirected,
    FaultKind.FLIP: FaultEngine._flip,
    FaultKind.SLOW: FaultEngine._slow,
    FaultKind.STUCK: FaultEngine._stuck_request,
}


def _prefix(call: _Call) -> int:
    """Return an aligned length that is shorter than the request; 0 for a request of one block."""
    block = max(call.file.alignment, 1)
    return align_down(call.rng.randrange(call.ticket.length), block)


def _failure(call: _Call, code: int | None, detail: str) -> StorageError:
    return StorageError(call.op.value, call.file.path, call.offset, call.ticket.length, code, detail)
