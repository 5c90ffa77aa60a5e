"""Thread engine: transfers data with `preadv` and `pwritev`, which release the GIL. Works on all systems.

It is the fallback if io_uring is not available, and the reference implementation of the interface.

Life cycle of a request: `submit` divides it into chunks, which wait in one queue. Each chunk is transferred by one
thread, in as many calls as necessary. The thread that ends the last chunk completes the ticket. After the first
error, the remaining chunks are counted but not transferred.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from dataclasses import dataclass

from infinity.errors import InfinityError, StorageError
from infinity.io.engine import DataFile, Op, Ticket
from infinity.io.files import FileTable, PinnedView, join_threads, pin_request, transfer_error

_log = logging.getLogger(__name__)

_MOST_THREADS = 32
_MOST_RETRIES = 1000


@dataclass(eq=False, slots=True)
class _Request:
    ticket: Ticket
    file: DataFile
    pinned: PinnedView
    memory: memoryview
    chunks_left: int  # number of chunks that have not ended; changed under the engine's lock by any of its threads
    # Error of a chunk. Threads may set it concurrently without the lock; each of the values is valid. A thread that
    # does not see it yet transfers one chunk too many, which is harmless. The thread that reads it has ended the last
    # chunk under the lock, so all other threads have set their values before.
    error: InfinityError | None = None


@dataclass(eq=False, slots=True)
class _Chunk:
    """Bytes `start` to `stop` of a request. Immutable."""

    request: _Request
    start: int
    stop: int


class ThreadEngine(FileTable):
    """Transfers chunks of at most `request_bytes` on `queue_depth` threads (at most 32), in order of submission.

    The number of threads is also the maximum number of chunks in flight. Life cycle: the engine is open after
    construction. After `close`, it accepts no requests, submitted requests complete, and the threads end.
    """

    name = "threads"

    def __init__(self, queue_depth: int, request_bytes: int) -> None:
        super().__init__()
        self._request_bytes = request_bytes
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        """Chunks that no thread has taken yet, in order of submission. ``None`` ends one thread."""
        self._lock = threading.Lock()
        """Guards `_closed`, and `chunks_left` of every request, so that no chunk is queued after the end markers."""
        self._closed = False
        """``True`` if no more requests are accepted. Set by `close`."""
        self._threads = [
            threading.Thread(target=self._run, name=f"infinity-io-{index}", daemon=True)
            for index in range(min(queue_depth, _MOST_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def register(self, memory: memoryview) -> None:
        """Do nothing, because `preadv` and `pwritev` do not use registered memory."""

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Queue a transfer. See `Engine.submit`."""
        pinned = pin_request(op, file, offset, memory)
        length, step = pinned.length, self._request_bytes
        self.require(file, op, offset, length)
        ticket = Ticket(op, file.path, offset, length)
        request = _Request(ticket, file, pinned, memory.cast("B"), -(-length // step))
        with self._lock:
            if self._closed:
                raise InfinityError(f"{op.value} of {file.path}: the I/O engine is closed")
            for start in range(0, length, step):
                self._chunks.put(_Chunk(request, start, min(start + step, length)))
        return ticket

    def close(self) -> None:
        """Complete submitted requests, then end the threads and close the files. Idempotent. Raises `StallError`."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                for _ in self._threads:
                    self._chunks.put(None)
        join_threads(self._threads)
        self.close_files()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            request = chunk.request
            if request.error is None:
                try:
                    _move(chunk)
                except InfinityError as error:
                    request.error = error
                except Exception as error:
                    ticket = request.ticket
                    request.error = StorageError(
                        ticket.op.value, ticket.path, ticket.offset, ticket.length, None, repr(error)
                    )
            self._end_chunk(request)
            del chunk, request  # an idle thread must not keep the memory of its last request alive

    def _end_chunk(self, request: _Request) -> None:
        with self._lock:
            request.chunks_left -= 1
            if request.chunks_left:
                return
        request.memory.release()
        request.pinned.release()
        try:
            request.ticket.complete(request.error)
        except Exception:
            _log.exception("a callback of %s failed", request.ticket)


def _move(chunk: _Chunk) -> None:
    request, file = chunk.request, chunk.request.file
    ticket = request.ticket
    transfer = os.preadv if ticket.op is Op.READ else os.pwritev
    at, retries = chunk.start, 0
    while at < chunk.stop:
        try:
            with request.memory[at : chunk.stop] as part:
                moved = transfer(file.fd, [part], ticket.offset + at)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR) and retries < _MOST_RETRIES:
                retries += 1
                ticket.retries += 1
                continue
            raise transfer_error(ticket, error.errno or errno.EIO, at) from error
        # The rest of a direct transfer must start at an aligned offset again.
        progress = moved - moved % file.alignment
        if progress == 0:
            raise transfer_error(ticket, None, at)
        at += progress
        ticket.retries += at < chunk.stop
