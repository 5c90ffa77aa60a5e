"""What every engine does the same way: its open files, the check of a request, the address of memory, its end."""

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
    """The files that an engine has open.

    A descriptor number is used again by the system as soon as it is closed, so a request or a second
    `forget` for a file that is no longer in the table is refused instead of reaching another file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards changes of `_files`; a single look-up needs no lock."""
        self._files: dict[int, DataFile] = {}
        """Open files by descriptor; any thread adds and removes."""

    def open(self, path: str, *, create: bool) -> DataFile:
        """Open or create `path`, readable and writable by its owner only.

        Raises:
            StorageError: the file cannot be opened.
        """
        try:
            opened = open_aligned(path, os.O_RDWR | (os.O_CREAT if create else 0))
        except OSError as error:
            raise StorageError("open", path, 0, 0, error.errno) from error
        file = DataFile(path, opened.fd, opened.direct, opened.alignment)
        with self._lock:
            self._files[opened.fd] = file
        return file

    def require(self, file: DataFile, op: Op | str, offset: int, length: int) -> None:
        """Check that `file` is open in this table.

        Raises:
            StorageError: it is not; it names `op`, `offset` and `length`, in bytes.
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
            StorageError: the device refused, or the file is not open.
        """
        self.require(file, "sync", 0, 0)
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            raise StorageError("sync", file.path, 0, 0, error.errno) from error

    def forget(self, file: DataFile) -> None:
        """Close `file`; nothing happens if that was done before."""
        with self._lock:
            if self._files.get(file.fd) is not file:
                return
            del self._files[file.fd]
        os.close(file.fd)

    def close(self) -> None:
        """Close every file that is still open."""
        for file in list(self._files.values()):
            self.forget(file)


class PinnedView:
    """Memory of one request: its address, and an export that keeps it from being freed.

    Life cycle: the export is held until `release`; the owner cannot resize, release or unmap the memory meanwhile.

    Raises:
        ValueError: the memory is not contiguous.
    """

    __slots__ = ("_export", "address", "length")

    def __init__(self, memory: memoryview) -> None:
        if not memory.c_contiguous:
            raise ValueError("memory of a transfer must be contiguous")
        self.length = memory.nbytes  # bytes
        # `address` is that of the first byte, 0 where there is none; `_export` keeps the memory, None after `release`.
        if memory.readonly:
            view = _PyBuffer()
            ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
            self._export: object = _ReadOnlyExport(view)
            self.address = int(view.buf or 0)
        else:
            export = ctypes.c_char.from_buffer(memory) if self.length else None
            self._export = export
            self.address = ctypes.addressof(export) if export is not None else 0

    def release(self) -> None:
        """Give up the export."""
        self._export = None


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class _ReadOnlyExport:
    """`from_buffer` refuses read-only memory, which is fine to write from."""

    __slots__ = ("_view",)

    def __init__(self, view: _PyBuffer) -> None:
        self._view = view

    def __del__(self) -> None:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._view))


def pin_request(op: Op, file: DataFile, offset: int, memory: memoryview) -> PinnedView:
    """Check a request against the contract and return its memory, pinned.

    Raises:
        ValueError: an empty request, a negative or misaligned offset, length or address, memory that is
            not contiguous, or read-only memory as the target of a read.
    """
    if offset < 0:
        raise ValueError(f"offset {offset} of a {op.value} of {file.path} is negative")
    if op is Op.READ and memory.readonly:
        raise ValueError(f"the memory for a read of {file.path} is read-only")
    pinned = PinnedView(memory)
    if not pinned.length:
        raise ValueError(f"a {op.value} of 0 bytes at offset {offset} of {file.path}")
    if file.direct and (offset | pinned.length | pinned.address) % file.alignment:
        raise ValueError(
            f"{op.value} of {pinned.length} bytes at offset {offset} of {file.path} at address "
            f"{pinned.address:#x}: offset, length and address must be multiples of {file.alignment}"
        )
    return pinned


def transfer_error(ticket: Ticket, code: int | None, at: int) -> StorageError:
    """Return the error of `ticket` that stopped `at` bytes after its start; without errno: no progress."""
    where = f"stopped at byte {ticket.offset + at}"
    if code is None:
        where += ": end of file" if ticket.op is Op.READ else ": the device takes no more bytes"
    return StorageError(ticket.op.value, ticket.path, ticket.offset, ticket.length, code, where)


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for an engine's threads, which end when nothing is in flight any more.

    Raises:
        StallError: one is still at work after `CLOSE_SECONDS`.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise StallError(
                    f"a device has not answered {CLOSE_SECONDS:.0f} s after the end of the run; its files stay open "
                    "and locked until this process ends"
                )
