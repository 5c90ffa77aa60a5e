"""Common parts of all engines: file table, validation of requests, memory addresses, and shutdown."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence

from infinity.errors import StallError, StorageError
from infinity.io.alignment import open_aligned
from infinity.io.engine import CLOSE_SECONDS, DataFile, Op, Ticket


class FileTable:
    """Files that are open in an engine, which derives from this class.

    The operating system reuses a descriptor number as soon as it is closed. Therefore a request or a second `forget`
    for a file that is no longer in the table must be rejected; otherwise it would affect a different file.
    """

    def __init__(self) -> None:
        self._table_lock = threading.Lock()
        """Guards changes to `_files`. A single lookup needs no lock."""
        self._files: dict[int, DataFile] = {}
        """Open files by descriptor. Any thread may add and remove files."""

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open `path` for reading and writing. With `create`, create it with mode 0600.

        Raises:
            StorageError: if the file cannot be opened.
        """
        try:
            file = open_aligned(path, os.O_RDWR | (os.O_CREAT if create else 0))
        except OSError as error:
            raise StorageError("open", path, 0, 0, error.errno) from error
        with self._table_lock:
            self._files[file.fd] = file
        return file

    def require(self, file: DataFile, op: Op | str, offset: int, length: int) -> None:
        """Check that `file` is open in this table.

        Raises:
            StorageError: if it is not. The error contains `op`, `offset` and `length`.
        """
        if self._files.get(file.fd) is not file:
            raise StorageError(
                op.value if isinstance(op, Op) else op,
                file.path,
                offset,
                length,
                None,
                "the file is not open in this engine",
            )

    def sync(self, file: DataFile) -> None:
        """Make completed writes to `file` durable.

        Raises:
            StorageError: if the device fails, or if the file is not open.
        """
        self.require(file, "sync", 0, 0)
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            raise StorageError("sync", file.path, 0, 0, error.errno) from error

    def forget(self, file: DataFile) -> None:
        """Close `file`, which has no requests in flight. Does nothing if it is already closed."""
        with self._table_lock:
            if self._files.get(file.fd) is not file:
                return
            del self._files[file.fd]
        os.close(file.fd)

    def close_files(self) -> None:
        """Close all open files."""
        for file in list(self._files.values()):
            self.forget(file)


class PinnedView:
    """Memory of one request: its address, and an export of its buffer that keeps it alive.

    The export is held until `release`. Until then, the owner cannot resize, release or unmap the memory.

    Raises:
        ValueError: if the memory is not contiguous.
    """

    __slots__ = ("_export", "address", "length")

    def __init__(self, memory: memoryview) -> None:
        if not memory.c_contiguous:
            raise ValueError("memory of a transfer must be contiguous")
        self.length = memory.nbytes  # in bytes
        # `address` is 0 if the memory is empty. `_export` keeps the memory alive and is ``None`` after `release`.
        self._export: object = None
        self.address = 0
        if self.length and memory.readonly:  # a write may use such memory, but `from_buffer` does not accept it
            import numpy as np

            self._export = array = np.frombuffer(memory, np.uint8)
            self.address = array.ctypes.data
        elif self.length:
            self._export = export = ctypes.c_char.from_buffer(memory)
            self.address = ctypes.addressof(export)

    def release(self) -> None:
        """Release the export."""
        self._export = None


def pin_request(op: Op, file: DataFile, offset: int, memory: memoryview) -> PinnedView:
    """Validate a request and return its memory, pinned.

    Raises:
        ValueError: if the request is empty or misaligned, if the offset is negative, if the memory is not contiguous,
            or if the memory for a read is read-only.
    """
    if offset < 0:
        raise ValueError(f"{op.value} of {file.path}: offset {offset} is negative")
    if op is Op.READ and memory.readonly:
        raise ValueError(f"read of {file.path}: the target memory is read-only")
    pinned = PinnedView(memory)
    if not pinned.length:
        raise ValueError(f"{op.value} of {file.path}: 0 bytes at offset {offset}")
    if file.direct and (offset | pinned.length | pinned.address) % file.alignment:
        raise ValueError(
            f"{op.value} of {pinned.length} bytes at offset {offset} of {file.path} at address "
            f"{pinned.address:#x}: offset, length and address must be multiples of {file.alignment}"
        )
    return pinned


def transfer_error(ticket: Ticket, code: int | None, at: int) -> StorageError:
    """Return the error of a transfer that stopped after `at` bytes. Without a `code`, the transfer made no progress."""
    where = f"stopped at byte {ticket.offset + at}"
    if code is None:
        where += ": end of file" if ticket.op is Op.READ else ": the device accepts no more bytes"
    return StorageError(ticket.op.value, ticket.path, ticket.offset, ticket.length, code, where)


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for the threads of an engine, which end when no request is in flight.

    Raises:
        StallError: if a thread is still running after `CLOSE_SECONDS`.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise StallError(
                    f"a device has not responded within {CLOSE_SECONDS:.0f} s after the end of the run. Its files stay "
                    "open and locked until this process exits."
                )
