"""An engine that fails on purpose, around another one. Same seed and same requests: same faults."""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.files import pin_request
from infinity.units import align_down
from support.wrapped_engine import WrappedEngine

_log = logging.getLogger(__name__)

_LOG_LENGTH = 10_000


class FaultKind(Enum):
    """What goes wrong with a request."""

    EIO = "eio"
    """The device reports EIO; nothing is moved."""
    ENOSPC = "enospc"
    """A write reports ENOSPC; nothing is moved."""
    SHORT = "short"
    """A part is moved, then the request fails without an errno."""
    TORN = "torn"
    """Only a prefix of a write reaches the file, and success is reported."""
    MISDIRECTED = "misdirected"
    """A write goes to another offset of the file, and success is reported."""
    FLIP = "flip"
    """One bit of what is read is wrong, and success is reported."""
    SLOW = "slow"
    """The request reaches the device after a random delay; later requests may overtake it."""
    STUCK = "stuck"
    """The request never reaches the device before `FaultEngine.release` or `close`."""


_ONLY = {
    FaultKind.ENOSPC: Op.WRITE,
    FaultKind.TORN: Op.WRITE,
    FaultKind.MISDIRECTED: Op.WRITE,
    FaultKind.FLIP: Op.READ,
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule: which requests suffer what.

    Requests that match `op` and `path` are counted from 0. A matching request suffers when its number is in
    `at`, or is the last of `every` ones, or with `probability`; with none of the three, always.

    Raises:
        ConfigError: contradicting or out-of-range values.
    """

    kind: FaultKind
    op: Op | None = None
    """Direction; both by default, as far as the kind allows."""
    path: str = ""
    """Part of the file's path; all files by default."""
    probability: float | None = None
    every: int | None = None
    at: tuple[int, ...] | None = None
    limit: int | None = None
    """How often at most; without end by default."""
    seconds: float = 0.1
    """Longest delay of `SLOW`."""

    def __post_init__(self) -> None:
        if sum(rule is not None for rule in (self.probability, self.every, self.at)) > 1:
            raise ConfigError(f"fault {self.kind.value}: give only one of probability, every, at")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise ConfigError(f"fault {self.kind.value}: probability = {self.probability} is not in 0..1")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"fault {self.kind.value}: every = {self.every} is below 1")
        only = _ONLY.get(self.kind)
        if only is not None and self.op not in (None, only):
            raise ConfigError(f"fault {self.kind.value} concerns a {only.value} only")

    def concerns(self, op: Op, path: str) -> bool:
        """Whether a request is counted by this rule."""
        return self.op in (None, op) and _ONLY.get(self.kind) in (None, op) and self.path in path

    def strikes(self, number: int, rng: random.Random) -> bool:
        """Whether the `number`-th request that this rule concerns suffers."""
        if self.at is not None:
            return number in self.at
        if self.every is not None:
            return number % self.every == self.every - 1
        return self.probability is None or rng.random() < self.probability


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault that was injected: what, where, and how bad (a byte count, offset, bit number or seconds)."""

    kind: FaultKind
    op: Op
    path: str
    offset: int
    length: int
    detail: float


@dataclass(eq=False, slots=True)
class _Call:
    op: Op
    file: DataFile
    offset: int
    memory: memoryview
    ticket: Ticket
    rng: random.Random


class FaultEngine(WrappedEngine):
    """Passes requests to `inner`, which it owns and closes, and lets `faults` strike some of them.

    The first rule that strikes a request decides. No ticket is ever lost: what is delayed at `close` is
    carried out, what is stuck fails.
    """

    kind = "faulty"

    def __init__(self, inner: Engine, seed: int, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner)
        self._seed, self._faults = seed, tuple(faults)
        self._lock = threading.Lock()
        self._seen = [0] * len(self._faults)
        self._struck = [0] * len(self._faults)
        self._stuck: list[_Call] = []
        self._delays = _Delays()
        self._closed = False
        self.injected: deque[Injected] = deque(maxlen=_LOG_LENGTH)
        """The latest faults, in order of submission."""

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer, faulty or not. Raises `ValueError` or `InfinityError` as any engine."""
        pin_request(op, file, offset, memory).release()
        with self._lock:
            if self._closed:
                raise InfinityError(f"{op.value} of {file.path}: the I/O engine is closed")
            struck = self._choose(op, file.path)
            if struck is None:
                return self._inner.submit(op, file, offset, memory)
            fault, rng = struck
            ticket = Ticket(op, file.path, offset, memory.nbytes)
            # A view of our own: the caller may release its view as soon as it has let go of the ticket.
            call = _Call(op, file, offset, memoryview(memory).cast("B"), ticket, rng)
        _STRIKES[fault.kind](self, fault, call)
        return ticket

    def release(self) -> None:
        """Let every request that is stuck now go on to the device."""
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for call in stuck:
            self._pass_on(call)

    def close(self) -> None:
        """Carry out what is delayed, fail what is stuck, close the inner engine. Idempotent."""
        with self._lock:
            self._closed = True
            stuck, self._stuck = self._stuck, []
        for call in stuck:
            self._finish(call, _failure(call, None, "stuck until the engine was closed"))
        self._delays.close()
        self._inner.close()

    def _choose(self, op: Op, path: str) -> tuple[Fault, random.Random] | None:
        chosen = None
        for index, fault in enumerate(self._faults):
            if not fault.concerns(op, path):
                continue
            number = self._seen[index]
            self._seen[index] += 1
            # Each decision has its own generator, so that rules do not disturb one another.
            rng = random.Random(f"{self._seed}/{index}/{number}")
            spent = fault.limit is not None and self._struck[index] >= fault.limit
            if chosen is None and not spent and fault.strikes(number, rng):
                self._struck[index] += 1
                chosen = fault, rng
        return chosen

    def _note(self, kind: FaultKind, call: _Call, detail: float) -> None:
        self.injected.append(
            Injected(
                kind=kind,
                op=call.op,
                path=call.file.path,
                offset=call.offset,
                length=call.ticket.length,
                detail=detail,
            )
        )

    def _fail(self, fault: Fault, call: _Call) -> None:
        code = errno.EIO if fault.kind is FaultKind.EIO else errno.ENOSPC
        self._note(fault.kind, call, code)
        self._finish(call, _failure(call, code, "injected"))

    def _short(self, fault: Fault, call: _Call) -> None:
        moved = _prefix(call)
        self._note(fault.kind, call, moved)
        error = _failure(call, None, f"injected: short transfer, {moved} bytes")
        self._transfer(call, call.offset, call.memory[:moved], lambda inner: inner or error)

    def _torn(self, fault: Fault, call: _Call) -> None:
        moved = _prefix(call)
        self._note(fault.kind, call, moved)
        self._transfer(call, call.offset, call.memory[:moved], lambda inner: inner)

    def _misdirected(self, fault: Fault, call: _Call) -> None:
        length = call.ticket.length
        steps = [step for step in (-2, -1, 1, 2) if call.offset + step * length >= 0]
        offset = call.offset + call.rng.choice(steps) * length
        self._note(fault.kind, call, offset)
        self._transfer(call, offset, call.memory, lambda inner: inner)

    def _flip(self, fault: Fault, call: _Call) -> None:
        bit = call.rng.randrange(8 * call.ticket.length)
        self._note(fault.kind, call, bit)

        def flip(inner: InfinityError | None) -> InfinityError | None:
            if inner is None:
                call.memory[bit // 8] ^= 1 << bit % 8
            return inner

        self._transfer(call, call.offset, call.memory, flip)

    def _slow(self, fault: Fault, call: _Call) -> None:
        seconds = call.rng.uniform(0, fault.seconds)
        self._note(fault.kind, call, seconds)
        # The delay comes before the transfer: until it is over a read has brought nothing, and a write
        # still takes its bytes, so that memory which is used again too early shows.
        self._delays.add(seconds, lambda: self._pass_on(call))

    def _hang(self, fault: Fault, call: _Call) -> None:
        self._note(fault.kind, call, 0)
        with self._lock:
            if not self._closed:
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
        call.memory.release()  # before anybody who waits goes on and unmaps it
        try:
            call.ticket.complete(error)
        except Exception:
            _log.exception("a callback of %s failed", call.ticket)


_STRIKES: dict[FaultKind, Callable[[FaultEngine, Fault, _Call], None]] = {
    FaultKind.EIO: FaultEngine._fail,
    FaultKind.ENOSPC: FaultEngine._fail,
    FaultKind.SHORT: FaultEngine._short,
    FaultKind.TORN: FaultEngine._torn,
    FaultKind.MISDIRECTED: FaultEngine._misdirected,
    FaultKind.FLIP: FaultEngine._flip,
    FaultKind.SLOW: FaultEngine._slow,
    FaultKind.STUCK: FaultEngine._hang,
}


def _prefix(call: _Call) -> int:
    """Return a length below that of the request, aligned for its file; 0 for a request of one block."""
    block = max(call.file.alignment, 1)
    return align_down(call.rng.randrange(call.ticket.length), block)


def _failure(call: _Call, code: int | None, detail: str) -> StorageError:
    return StorageError(call.op.value, call.file.path, call.offset, call.ticket.length, code, detail)


class _Delays:
    """Runs actions later, in one thread that exists while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` after `seconds`, or when `close` is called."""
        with self._changed:
            heapq.heappush(self._actions, (time.monotonic() + seconds, next(self._numbers), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infinity-io-delays", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Run what is left at once and end the thread."""
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()
            del action

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                wait = self._actions[0][0] - time.monotonic() if self._actions else None
                if self._actions and (self._closing or (wait is not None and wait <= 0)):
                    return heapq.heappop(self._actions)[2]
                if not self._actions and self._closing:
                    self._thread = None
                    return None
                self._changed.wait(wait)
