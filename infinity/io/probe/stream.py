"""Measurement of one folder, with a constant number of requests in flight until its time is over."""

from __future__ import annotations

import threading
import time
from array import array

from infinity.errors import InfinityError, StallError
from infinity.io.engine import Op, Ticket
from infinity.io.probe.points import BLOCK_MULTIPLE, Load, Measurement, Point, latency_of
from infinity.io.probe.targets import PATIENCE_SECONDS, Target
from infinity.units import align_down


class Stream:
    """Keeps `depth` requests in flight on one target until its time is over.

    Life cycle: `start` submits the first requests. Each completion submits the next request, on the engine's own
    thread, until `seconds` have passed, `most_written` is reached, `stop` is set, or a request has failed. `finish`
    waits for the last request. Reads and writes proceed through the file in order. If both are measured, each uses
    one half of the file.
    """

    def __init__(
        self,
        target: Target,
        point: Point,
        seconds: float,
        most_written: int | None,
        stop: threading.Event,
    ) -> None:
        self.target = target
        self._point, self._seconds = point, seconds
        # maximum number of bytes written (None: no limit); event that ends the measurement early
        self._most_written, self._stop = most_written, stop
        self._lock = threading.Lock()
        """Guards the attributes below, which the engine's threads change."""
        self._moved = {Op.READ: 0, Op.WRITE: 0}
        """Number of bytes transferred."""
        self._next = {Op.READ: 0, Op.WRITE: 0}
        """Number of the next request, which determines its offset in the file."""
        self._slices: list[int] = []
        """Number of bytes transferred in each second."""
        self._latencies = array("d")
        """Latencies of all requests, in seconds."""
        self._inflight = 0
        """Number of slots whose last request has not ended."""
        self._error: InfinityError | None = None
        """First error. `_on_done` reads it without the lock, and may therefore submit one request too many."""
        self._last = 0.0
        """Completion time of the last request, from `time.perf_counter`."""
        self._idle = threading.Event()
        """Set when no request is in flight. Nothing changes afterwards, so `finish` needs no lock."""
        self._began = self._deadline = 0.0
        """Start time, and the time after which no request is submitted, from `time.perf_counter`. `start` sets both
        before it submits the first request, because completions read them.
        """

    def start(self) -> None:
        """Submit the first requests and return."""
        self._began = time.perf_counter()
        self._deadline = self._began + self._seconds
        slots = range(self._point.depth)
        self._inflight = len(slots)
        for slot in slots:
            self._submit(slot, Op.WRITE if self._writes(slot) else Op.READ)

    def finish(self) -> Measurement:
        """Wait for the end of the measurement and return the result. Raises `StorageError` or `StallError`."""
        if not self._idle.wait(self._seconds + PATIENCE_SECONDS):
            raise StallError(f"{self.target.path}: the requests of the probe did not complete in time")
        if self._error is not None:
            raise self._error
        seconds = self._last - self._began
        return Measurement(
            point=self._point,
            read_bytes_per_second=self._moved[Op.READ] / seconds,
            write_bytes_per_second=self._moved[Op.WRITE] / seconds,
            seconds=seconds,
            latency=latency_of(self._latencies),
        )

    @property
    def written(self) -> int:
        """Number of bytes written so far."""
        return self._moved[Op.WRITE]

    def slices(self) -> tuple[int, ...]:
        """Return the number of bytes in each complete second so far. Empty before `start`."""
        with self._lock:
            end = self._last if self._idle.is_set() else time.perf_counter()
            whole = int(end - self._began) if self._began else 0
            return tuple(self._slices[:whole]) + (0,) * max(0, whole - len(self._slices))

    def ended(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the measurement. Return whether it has ended."""
        return self._idle.wait(timeout)

    def _writes(self, slot: int) -> bool:
        return self._point.load is Load.WRITE or (self._point.load is Load.BOTH and slot % 2 == 1)

    def _submit(self, slot: int, op: Op) -> None:
        """Submit the next request of a slot. The slot ends if a write would exceed `most_written`."""
        block = self._point.block_bytes
        with self._lock:
            most = self._most_written if op is Op.WRITE else None
            offset = None if most is not None and (self._next[op] + 1) * block > most else self._place(op)
        if offset is None:
            self._end(None)
            return
        memory = self.target.memory[slot * block : (slot + 1) * block]
        try:
            ticket = self.target.engine.submit(op, self.target.file, offset, memory)
        except InfinityError as error:
            self._end(error)
            return
        ticket.on_done(lambda done: self._on_done(slot, done))

    def _place(self, op: Op) -> int:
        block, both = self._point.block_bytes, self._point.load is Load.BOTH
        half = align_down(self.target.file_bytes // 2, BLOCK_MULTIPLE)
        room = half if both else self.target.file_bytes
        number = self._next[op]
        self._next[op] = number + 1
        return number % (room // block) * block + (half if both and op is Op.WRITE else 0)

    def _on_done(self, slot: int, ticket: Ticket) -> None:
        with self._lock:
            self._last = max(self._last, ticket.completed)
            if ticket.error is None:
                self._moved[ticket.op] += ticket.length
                self._latencies.append(ticket.completed - ticket.submitted)
                self._count(ticket)
        if ticket.error is not None or ticket.completed >= self._deadline or self._error is not None:
            self._end(ticket.error)
            return
        # Reads and writes alternate even if only one request is in flight.
        turn = self._point.load is Load.BOTH
        other = Op.READ if ticket.op is Op.WRITE else Op.WRITE
        following = other if turn else ticket.op
        if self._stop.is_set():
            self._end(None)
        else:
            self._submit(slot, following)

    def _count(self, ticket: Ticket) -> None:
        number = int(ticket.completed - self._began)
        self._slices.extend([0] * (number + 1 - len(self._slices)))
        self._slices[number] += ticket.length

    def _end(self, error: InfinityError | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()
