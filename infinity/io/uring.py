"""The engine of io_uring: a few rings, each with one thread that submits and reaps.

`submit` only appends to a list and, if a thread sleeps, wakes it through an eventfd; the thread cuts requests into
chunks, keeps at most its share of `queue_depth` of each file in the kernel, and hands over all new ones and waits for
completions in a single system call. Files take turns, so that a slow drive does not hold up the others.
Nothing but that thread touches the ring (`ring.py` says why).

Life cycle of a request: incoming (from `submit` on) -> backlog (taken by the thread) -> chunks in the kernel, again
where one was short or interrupted -> its ticket completes, when all chunks have ended. After the first error the chunks
that are left are not sent; the ticket completes with that error when those in the kernel have ended, so that its memory
is not given back under them. If the ring itself breaks: see `_abandon`.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from infinity.errors import InfinityError, StorageError
from infinity.io import ring as uapi
from infinity.io.engine import DataFile, Op, Ticket
from infinity.io.files import FileTable, PinnedView, join_threads, pin_request, transfer_error
from infinity.io.ring import Ring, RingRefusedError
from infinity.units import align_down

_log = logging.getLogger(__name__)

RINGS = 2
"""With two, a step that the drive bounds took a tenth less time than with one, on two cores that compute; four were no
better."""
_MOST_RETRIES = 1000
_MOST_SLOTS = 4096
"""Chunks of a ring in the kernel at most; it has a limit of its own, of 32768."""
_WAKE = (1 << 64) - 1
"""`data` of the read of `_wake_fd`; no slot has this number."""
_LAST_ADDRESS = (1 << 64) - 1
"""No piece of registered memory ends behind this address."""
_RETRY_ERRORS = (-errno.EAGAIN, -errno.EINTR)


@dataclass(eq=False, slots=True)
class _Request:
    """One transfer that was asked for; changed by the thread of its ring only."""

    ticket: Ticket
    file: DataFile
    pinned: PinnedView
    cursor: int = 0  # bytes already cut into chunks; all of them after an error
    chunks: int = 0  # chunks cut and not ended
    error: StorageError | None = None  # the first one of a chunk


@dataclass(eq=False, slots=True)
class _Chunk:
    """Bytes `start` to `stop` of a request: one operation of the kernel; changed by the thread of its ring only."""

    request: _Request
    start: int  # moves on when the kernel has moved a part
    stop: int
    retries: int = 0  # how often it was interrupted


class UringEngine:
    """Moves chunks of at most `request_bytes` with io_uring, at most `queue_depth` of each file in flight.

    And no more than that for each of `paths` in all: a run has one file on each of its paths. Each request goes to the
    ring that has fewest of its file. Rings have a thread each (`RingThread`): while one waits for the interpreter, or
    verifies what it has read, the others keep the drives busy.

    Life cycle: open from the start; after `close` nothing more is taken, what was submitted completes, and the threads
    end. A ring that breaks takes nothing more, which ends the run.

    Raises:
        RingRefusedError: io_uring is not allowed here; the message says why.
    """

    name = "io_uring"

    def __init__(self, queue_depth: int, request_bytes: int, paths: int = 1, *, rings: int = RINGS) -> None:
        self._files = FileTable()
        try:
            self._rings = _open_rings(min(rings, queue_depth), queue_depth, request_bytes, paths)
        except RingRefusedError:  # there may be room for one: of locked memory, or descriptors
            self._rings = _open_rings(1, queue_depth, request_bytes, paths)

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open (or create, mode 0600) a file. Raises as `Engine.open`."""
        return self._files.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        """Pin `memory` in the kernel, so that transfers skip looking up its pages.

        Without the right or the locked-memory limit for it (EPERM, ENOMEM; each ring counts), a message is logged and
        transfers go on unregistered. The memory cannot be freed before the engine is closed.

        Raises:
            InfinityError: the engine is closed.
        """
        for ring in self._rings:
            ring.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Queue a transfer. Raises as `Engine.submit`."""
        pinned = pin_request(op, file, offset, memory)
        self._files.require(file, op, offset, pinned.length)
        # Looked at without their locks: a ring that has a request more than another one is as good.
        return min(self._rings, key=lambda ring: ring.load(file)).submit(op, file, offset, pinned)

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable. Raises `StorageError`."""
        self._files.sync(file)

    def forget(self, file: DataFile) -> None:
        """Close a file that has no request in flight."""
        self._files.forget(file)

    def close(self) -> None:
        """Complete what was submitted, then end threads, rings and files. Idempotent. Raises `StallError`."""
        for ring in self._rings:
            ring.end()
        join_threads([ring.thread for ring in self._rings])
        self._files.close()


def _open_rings(number: int, queue_depth: int, request_bytes: int, paths: int) -> list[RingThread]:
    """Return rings that share the depth. Raises `RingRefusedError`, and leaves none open then."""
    rings: list[RingThread] = []
    try:
        for index in range(number):
            rings.append(RingThread(queue_depth // number + (index < queue_depth % number), request_bytes, paths))
    except BaseException:
        for ring in rings:
            ring.end()
        join_threads([ring.thread for ring in rings])
        raise
    return rings


class RingThread:
    """One ring, and the thread that submits to it and reaps; at most `queue_depth` chunks of each file in flight.

    Life cycle: open from the start; after `end`, or when the ring is broken, nothing more is taken, what was submitted
    completes, and the thread ends.

    Raises:
        RingRefusedError: io_uring is not allowed here; the message says why.
    """

    def __init__(self, queue_depth: int, request_bytes: int, paths: int) -> None:
        self._depth, self._request_bytes = queue_depth, request_bytes
        self._most = min(queue_depth * paths, _MOST_SLOTS)
        """How many chunks may be in the kernel."""
        self._lock = threading.Lock()
        """Guards what follows, up to `_wake_fd`: what is shared with the thread."""
        self._incoming: list[_Request] = []
        """Requests that the thread has not taken; `submit` adds."""
        self._commands: list[Callable[[], None]] = []
        """What else the thread is to do with the ring; `register` adds."""
        self._outstanding = 0
        """Requests whose tickets have not completed; `submit` adds, the thread subtracts."""
        self._of_file: Counter[DataFile] = Counter()
        """Of these, by file; a file without any is not there."""
        self._asleep = False
        """Whether the thread waits in the kernel, or is about to, and a write to `_wake_fd` is needed to wake it. The
        thread sets it under the lock, when nothing was left to take, so whoever adds after that sees it. `_wake` clears
        it under the lock; so does the thread without it, and looks at `_incoming` again before it sleeps: a wake-up too
        many is harmless."""
        self._closed = False
        """Whether nothing more is taken; set by `end`, or by the thread when the ring is broken."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        """Its reads end when something is written to it; closed by the thread at its end."""
        # Only the thread touches what follows (and `_start`, before there is one).
        self._backlog: dict[DataFile, deque[_Request]] = {}
        """By file, requests of which something is still to be cut into chunks, in order; a file without any is not
        there."""
        self._in_kernel: Counter[DataFile] = Counter()
        """By file, chunks in the kernel; a file without any is not there."""
        self._again: deque[_Chunk] = deque()
        """Chunks that were short or interrupted, to be sent again before any others."""
        self._slots: list[_Chunk | None] = []
        """The chunk in the kernel by slot; its number comes back with the completion."""
        self._free: list[int] = []
        """Slots without a chunk."""
        self._wake_armed = False
        """Whether a read of `_wake_fd` is in the ring, so that a write ends the wait."""
        self._wake_count = ctypes.create_string_buffer(8)
        """Where that read puts its eight bytes."""
        self._pieces: list[tuple[int, int]] = []
        """(address, end) of registered memory, sorted."""
        self._piece_numbers: list[int] = []
        """Under which number the ring knows each of `_pieces`."""
        self._registered: list[PinnedView] = []
        """What keeps registered memory from being freed; released at the thread's end."""
        self._ring: Ring
        """Made by the thread, and set at its start."""
        self.thread: threading.Thread
        """Does all of that; set by `_start`, before anybody has this object."""
        self._start()

    def register(self, memory: memoryview) -> None:
        """Pin memory as `UringEngine.register`."""
        pinned = PinnedView(memory)
        done = threading.Event()

        def command() -> None:
            try:
                self._register(pinned)
            finally:
                done.set()

        with self._lock:
            if self._closed:
                raise InfinityError("register: the I/O engine is closed")
            self._commands.append(command)
            self._wake()
        if threading.current_thread() is not self.thread:
            done.wait()

    def load(self, file: DataFile) -> tuple[int, int]:
        """Return how many requests have not completed: of a file, and in all."""
        return self._of_file.get(file, 0), self._outstanding

    def submit(self, op: Op, file: DataFile, offset: int, pinned: PinnedView) -> Ticket:
        """Queue a transfer of an open file. Raises `InfinityError`: nothing is taken any more."""
        ticket = Ticket(op, file.path, offset, pinned.length)
        request = _Request(ticket, file, pinned)
        with self._lock:
            if self._closed:
                raise InfinityError(f"{op.value} of {file.path}: the I/O engine is closed")
            self._outstanding += 1
            self._of_file[file] += 1
            self._incoming.append(request)
            self._wake()
        return ticket

    def end(self) -> None:
        """Take nothing more, and end the thread when what was submitted has completed. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        # Under the lock, under which the thread closes the descriptor and ends `_asleep`.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def _start(self) -> None:
        ready = threading.Event()
        refused: list[Exception] = []

        def body() -> None:
            try:
                ring = Ring(self._most + 1)
            except Exception as error:
                refused.append(error)
                return
            finally:
                ready.set()
            self._run(ring)

        self.thread = threading.Thread(target=body, name="infinity-io-uring", daemon=True)
        self.thread.start()
        ready.wait()
        if refused:
            self.thread.join()
            os.close(self._wake_fd)
            raise refused[0]

    # What follows runs in the thread.

    def _run(self, ring: Ring) -> None:
        self._ring = ring
        most = min(self._most, ring.entries - 1)
        self._slots, self._free = [None] * most, list(range(most))
        try:
            while self._prepare():
                ring.enter(1)
                self._asleep = False
                for data, result in ring.reap():
                    if data == _WAKE:
                        self._wake_armed = False
                    else:
                        self._on_completion(data, result)
        except BaseException as error:
            _log.exception("the io_uring thread failed")
            self._abandon(error)
        finally:
            ring.close()
            with self._lock:
                self._asleep = False  # so that `_wake` does not write to a number that is used again
                os.close(self._wake_fd)
            for pinned in self._registered:
                pinned.release()

    def _prepare(self) -> bool:
        """Push all that fits, and return whether there is anything to wait for."""
        while True:
            self._push_chunks()
            with self._lock:
                commands, self._commands = self._commands, []
                if self._free and self._incoming:
                    for request in self._incoming:
                        self._backlog.setdefault(request.file, deque()).append(request)
                    self._incoming.clear()
                elif not commands:
                    if self._closed and not self._outstanding:
                        return False
                    # With every slot taken, a completion comes first anyway: no wake-up needed.
                    asleep = self._asleep = bool(self._free)
                    break
            for command in commands:
                command()
        # The thread's own copy: `_wake` may have cleared `_asleep`, and written, since the lock was given back. If the
        # read is pushed all the same it ends at once; without it, nothing would end the wait.
        if asleep and not self._wake_armed:
            self._ring.push(uapi.READ, self._wake_fd, ctypes.addressof(self._wake_count), 8, 0, _WAKE)
            self._wake_armed = True
        return True

    def _push_chunks(self) -> None:
        while self._free and self._again:
            self._push(self._again.popleft())
        files = deque(self._backlog)
        while self._free and files:
            file = files.popleft()
            chunk = self._next_chunk(file) if self._in_kernel[file] < self._depth else None
            if chunk is not None:
                self._push(chunk)
                files.append(file)

    def _next_chunk(self, file: DataFile) -> _Chunk | None:
        """Cut the next chunk from the requests of a file; None if there is nothing left of them."""
        backlog = self._backlog[file]
        while backlog:
            request = backlog[0]
            start, length = request.cursor, request.pinned.length
            if start < length:
                if start == 0:
                    request.ticket.started = time.perf_counter()
                request.cursor = stop = min(start + self._request_bytes, length)
                request.chunks += 1
                return _Chunk(request, start, stop)
            backlog.popleft()
        del self._backlog[file]
        return None

    def _push(self, chunk: _Chunk) -> None:
        request, start = chunk.request, chunk.start
        if request.error is not None:
            self._end_chunk(request)
            return
        ticket = request.ticket
        reading = ticket.op is Op.READ
        address, length = request.pinned.address + start, chunk.stop - start
        slot = self._free.pop()
        self._slots[slot] = chunk
        self._in_kernel[request.file] += 1
        piece = self._piece_of(address, length)
        if piece is None:
            opcode, piece = uapi.READ if reading else uapi.WRITE, 0
        else:
            opcode = uapi.READ_FIXED if reading else uapi.WRITE_FIXED
        self._ring.push(opcode, request.file.fd, address, length, ticket.offset + start, slot, piece)

    def _piece_of(self, address: int, length: int) -> int | None:
        """Return under which number the ring knows registered memory that has all of this; None if none has."""
        at = bisect.bisect_right(self._pieces, (address, _LAST_ADDRESS)) - 1
        if at < 0 or address + length > self._pieces[at][1]:
            return None
        return self._piece_numbers[at]

    def _on_completion(self, slot: int, result: int) -> None:
        chunk = self._slots[slot]
        if chunk is None:
            raise RuntimeError(f"completion of unknown slot {slot}")
        self._slots[slot] = None
        self._free.append(slot)
        request = chunk.request
        self._in_kernel[request.file] -= 1
        if not self._in_kernel[request.file]:
            del self._in_kernel[request.file]
        if result == chunk.stop - chunk.start:
            self._end_chunk(request)
        elif result in _RETRY_ERRORS and chunk.retries < _MOST_RETRIES:
            chunk.retries += 1
            request.ticket.retries += 1
            self._again.append(chunk)
        elif result < 0:
            self._fail(request, transfer_error(request.ticket, -result, chunk.start))
        elif progress := align_down(result, request.file.alignment):
            request.ticket.retries += 1
            chunk.start += progress  # the rest of a direct transfer must start aligned again
            self._again.append(chunk)
        else:
            self._fail(request, transfer_error(request.ticket, None, chunk.start))

    def _fail(self, request: _Request, error: StorageError) -> None:
        if request.error is None:
            request.error = error
            request.cursor = request.pinned.length
        self._end_chunk(request)

    def _end_chunk(self, request: _Request) -> None:
        request.chunks -= 1
        if request.chunks == 0 and request.cursor == request.pinned.length:
            self._end_request(request, request.error)

    def _end_request(self, request: _Request, error: InfinityError | None) -> None:
        with self._lock:
            self._outstanding -= 1
            self._of_file[request.file] -= 1
            if not self._of_file[request.file]:
                del self._of_file[request.file]
        request.pinned.release()
        try:
            request.ticket.complete(error)
        except Exception:
            _log.exception("a callback of %s failed", request.ticket)

    def _register(self, pinned: PinnedView) -> None:
        start, end = pinned.address, pinned.address + pinned.length
        if any(first < end and start < last for first, last in self._pieces):
            pinned.release()
            return
        step = uapi.FIXED_PIECE_BYTES
        starts = range(start, end, step)
        number = len(self._pieces)
        try:
            if number + len(starts) > uapi.FIXED_PIECES:
                raise OSError(errno.ENOSPC, "too many pieces of registered memory")
            self._ring.register(number, [(at, min(step, end - at)) for at in starts])
        except OSError as error:
            _log.info("memory is not registered with io_uring (%s); transfers go on without", error.strerror)
            pinned.release()
            return
        self._registered.append(pinned)
        numbers = dict(zip(self._pieces, self._piece_numbers, strict=True))
        for index, at in enumerate(starts):
            numbers[at, min(at + step, end)] = number + index
        self._pieces = sorted(numbers)
        self._piece_numbers = [numbers[piece] for piece in self._pieces]

    def _abandon(self, cause: BaseException) -> None:
        """Fail every request after the ring broke, so that nobody waits for ever.

        Chunks in the kernel cannot be waited for any more: it may still write to the memory of a read that has failed.
        So whoever gets such an error must not use that memory again. The pager does not: after a failure it starts
        nothing.
        """
        with self._lock:
            self._closed = True
            waiting = [*itertools.chain(*self._backlog.values()), *self._incoming]
            self._incoming.clear()
            commands, self._commands = self._commands, []
        waiting += [chunk.request for chunk in (*self._slots, *self._again) if chunk is not None]
        for request in dict.fromkeys(waiting):
            ticket = request.ticket
            if not ticket.done:
                where = (ticket.op.value, ticket.path, ticket.offset, ticket.length)
                self._end_request(request, StorageError(*where, None, f"io_uring failed: {cause!r}"))
        for command in commands:
            command()
