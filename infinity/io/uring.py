"""io_uring engine: a few rings, each with one thread that submits requests and reaps completions.

`submit` only appends to a list and, if the thread sleeps, wakes it through an eventfd. The thread divides requests
into chunks and keeps at most its part of `queue_depth` chunks per file in the kernel. It submits all new chunks and
waits for completions in a single system call. Chunks of different files are submitted in alternation, so that a slow
drive does not delay the others. Only this thread accesses the ring (see `ring.py` for the reason).

Life cycle of a request: incoming (after `submit`), backlog (taken by the thread), chunks in the kernel (resubmitted
after a partial or interrupted transfer), and completion of its ticket when all chunks have ended. After the first
error, the remaining chunks are not submitted. The ticket completes with this error only when the chunks in the kernel
have ended, so that the kernel never writes to memory that the caller has reused. For a broken ring, see `_abandon`.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import logging
import os
import threading
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
"""Number of rings. With two rings, drive-limited steps took 10% less time than with one, on two cores that also
computed. Four rings were not faster.
"""
_MOST_RETRIES = 1000
_MOST_SLOTS = 4096
"""Maximum number of chunks per ring in the kernel. The limit of io_uring itself is 32768."""
_WAKE = (1 << 64) - 1
"""`data` for the read of `_wake_fd`. No slot has this number."""
_LAST_ADDRESS = (1 << 64) - 1
"""Highest end address of registered memory."""
_RETRY_ERRORS = (-errno.EAGAIN, -errno.EINTR)


@dataclass(eq=False, slots=True)
class _Request:
    """Request in progress. Changed only by the thread of its ring."""

    ticket: Ticket
    file: DataFile
    pinned: PinnedView
    cursor: int = 0  # number of bytes that have been divided into chunks; all bytes after an error
    chunks: int = 0  # number of chunks that have not ended
    error: StorageError | None = None  # first error of a chunk


@dataclass(eq=False, slots=True)
class _Chunk:
    """Bytes `start` to `stop` of a request, transferred by one kernel operation. Changed only by the ring's thread."""

    request: _Request
    start: int  # advances after a partial transfer
    stop: int
    retries: int = 0  # number of interruptions


class UringEngine(FileTable):
    """Transfers chunks of at most `request_bytes` with io_uring, at most `queue_depth` per file at a time.

    The total number of chunks in flight is limited to `queue_depth` times `paths`, because a run has one file per
    path. Each request goes to the ring with the fewest requests for its file. Each ring has its own thread
    (`RingThread`): while one thread waits for the GIL or verifies a page, the others keep the drives busy.

    Life cycle: the engine is open after construction. After `close`, it accepts no requests, submitted requests
    complete, and the threads end. A broken ring accepts no more requests, which ends the run.

    Raises:
        RingRefusedError: if io_uring is not available. The message contains the reason.
    """

    name = "io_uring"

    def __init__(self, queue_depth: int, request_bytes: int, paths: int = 1, *, rings: int = RINGS) -> None:
        super().__init__()
        try:
            self._rings = _open_rings(min(rings, queue_depth), queue_depth, request_bytes, paths)
        except RingRefusedError:  # a single ring may fit within the limits for locked memory and descriptors
            self._rings = _open_rings(1, queue_depth, request_bytes, paths)

    def register(self, memory: memoryview) -> None:
        """Pin `memory` in the kernel, so that transfers do not have to look up its pages.

        If the process lacks the permission or exceeds its locked-memory limit (EPERM, ENOMEM; each ring counts
        separately), a message is logged, and transfers use unregistered memory. The memory cannot be freed before the
        engine is closed.

        Raises:
            InfinityError: if the engine is closed.
        """
        for ring in self._rings:
            ring.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Queue a transfer. See `Engine.submit`."""
        pinned = pin_request(op, file, offset, memory)
        self.require(file, op, offset, pinned.length)
        # Read without locks, because a ring with one request more is just as good a choice.
        return min(self._rings, key=lambda ring: ring.load(file)).submit(op, file, offset, pinned)

    def close(self) -> None:
        """Complete submitted requests, then close threads, rings and files. Idempotent. Raises `StallError`."""
        for ring in self._rings:
            ring.end()
        join_threads([ring.thread for ring in self._rings])
        self.close_files()


def _open_rings(number: int, queue_depth: int, request_bytes: int, paths: int) -> list[RingThread]:
    """Return rings that share the queue depth. If one is not available, close all and raise `RingRefusedError`."""
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
    """One ring and its thread, with at most `queue_depth` chunks per file in flight.

    Life cycle: the ring is open after construction. After `end`, or if the ring is broken, it accepts no requests,
    submitted requests complete, and the thread ends.

    Raises:
        RingRefusedError: if io_uring is not available. The message contains the reason.
    """

    def __init__(self, queue_depth: int, request_bytes: int, paths: int) -> None:
        self._depth, self._request_bytes = queue_depth, request_bytes
        self._most = min(queue_depth * paths, _MOST_SLOTS)
        """Maximum number of chunks in the kernel."""
        self._lock = threading.Lock()
        """Guards the attributes from here to `_wake_fd`, which are shared with the thread."""
        self._incoming: list[_Request] = []
        """Requests that the thread has not taken yet. `submit` adds to the list."""
        self._commands: list[Callable[[], None]] = []
        """Functions for the thread to run. `register` adds to the list."""
        self._outstanding = 0
        """Number of requests whose tickets have not completed. `submit` increments it; the thread decrements it."""
        self._of_file: Counter[DataFile] = Counter()
        """Number of such requests for each file. Files without requests are not included."""
        self._asleep = False
        """``True`` if the thread waits in the kernel or is about to, so that only a write to `_wake_fd` wakes it.

        The thread sets it under the lock when it has found no work, so every later `submit` sees it. `_wake` clears
        it under the lock. The thread also clears it without the lock, but it checks `_incoming` again before it
        sleeps, and an unnecessary wake-up is harmless.
        """
        self._closed = False
        """``True`` if no more requests are accepted. Set by `end`, or by the thread if the ring is broken."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        """Eventfd that wakes the thread. The thread closes it when it ends."""
        # Only the thread uses the attributes below, except for `_start`, which runs before the thread.
        self._backlog: dict[DataFile, deque[_Request]] = {}
        """Requests that have not been completely divided into chunks, by file and in order of submission. Files
        without requests are not included.
        """
        self._in_kernel: Counter[DataFile] = Counter()
        """Number of chunks in the kernel for each file. Files without chunks are not included."""
        self._again: deque[_Chunk] = deque()
        """Chunks whose transfer was partial or interrupted. They are resubmitted before any other chunks."""
        self._slots: list[_Chunk | None] = []
        """Chunk in the kernel for each slot. The completion returns the slot number."""
        self._free: list[int] = []
        """Slots without a chunk."""
        self._wake_armed = False
        """``True`` if a read of `_wake_fd` is in the ring, so that a write to it ends the wait."""
        self._wake_count = ctypes.create_string_buffer(8)
        """Buffer for this read, eight bytes."""
        self._pieces: list[tuple[int, int]] = []
        """Registered memory as sorted pairs (address, end)."""
        self._piece_numbers: list[int] = []
        """Buffer number in the ring for each of `_pieces`."""
        self._registered: list[PinnedView] = []
        """Keeps registered memory alive. Released when the thread ends."""
        self._ring: Ring
        """Created by the thread."""
        self.thread: threading.Thread
        """Thread of the ring. Set by `_start`, before any other thread can use this object."""
        self._start()

    def register(self, memory: memoryview) -> None:
        """Pin memory. See `UringEngine.register`."""
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
        """Return the number of requests that have not completed: for a file, and in total."""
        return self._of_file.get(file, 0), self._outstanding

    def submit(self, op: Op, file: DataFile, offset: int, pinned: PinnedView) -> Ticket:
        """Queue a transfer for an open file. Raises `InfinityError` if no more requests are accepted."""
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
        """Accept no more requests, and end the thread when submitted requests have completed. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        # The caller must hold the lock, because the thread closes the descriptor and clears `_asleep` under it.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def _start(self) -> None:
        ready = threading.Event()
        errors: list[Exception] = []

        def body() -> None:
            try:
                ring = Ring(self._most + 1)
            except Exception as error:
                errors.append(error)
                return
            finally:
                ready.set()
            self._run(ring)

        self.thread = threading.Thread(target=body, name="infinity-io-uring", daemon=True)
        self.thread.start()
        ready.wait()
        if errors:
            self.thread.join()
            os.close(self._wake_fd)
            raise errors[0]

    # The methods below run on the thread.

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
                self._asleep = False  # so that `_wake` does not write to a reused descriptor number
                os.close(self._wake_fd)
            for pinned in self._registered:
                pinned.release()

    def _prepare(self) -> bool:
        """Push all chunks that fit. Return ``False`` if the thread should end."""
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
                    # If all slots are taken, no wake-up is needed, because a completion must arrive first.
                    asleep = self._asleep = bool(self._free)
                    break
            for command in commands:
                command()
        # This uses the local copy, because `_wake` may have cleared `_asleep` and written to the eventfd since the lock
        # was released. In that case the read ends at once. Without the read, no write could end the wait.
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
        backlog = self._backlog[file]
        while backlog:
            request = backlog[0]
            start, length = request.cursor, request.pinned.length
            if start < length:
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
        # All possible results are handled: complete, interrupted, failed, partial, or without progress.
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
            chunk.start += progress  # the rest of a direct transfer must start at an aligned offset again
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
        # Only when no chunk is left in the kernel, because the caller may reuse the memory as soon as the ticket
        # completes.
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
            _log.info("memory is not registered with io_uring (%s); transfers use unregistered memory", error.strerror)
            pinned.release()
            return
        self._registered.append(pinned)
        numbers = dict(zip(self._pieces, self._piece_numbers, strict=True))
        for index, at in enumerate(starts):
            numbers[at, min(at + step, end)] = number + index
        self._pieces = sorted(numbers)
        self._piece_numbers = [numbers[piece] for piece in self._pieces]

    def _abandon(self, cause: BaseException) -> None:
        """Fail all requests after the ring has broken, so that no thread waits forever.

        It is no longer possible to wait for chunks in the kernel, which may still write to the memory of a failed
        read. Therefore a caller that receives this error must not reuse the memory. The pager complies, because it
        starts no transfer after a failure.
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
