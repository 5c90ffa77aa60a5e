"""O_DIRECT: open files with it where possible, and determine the alignment that it requires."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import warnings

from infinity.io.engine import DataFile

DEFAULT_ALIGNMENT = 4096
"""Alignment, in bytes, that suffices for every drive and file system that does not report its own."""

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_FIELDS = 152  # offset of stx_dio_mem_align and stx_dio_offset_align in struct statx

_libc = ctypes.CDLL(None, use_errno=True)


def open_aligned(path: str, flags: int, mode: int = 0o600) -> DataFile:
    """Open `path` with O_DIRECT if its file system supports it. Otherwise open it buffered and emit a warning.

    Raises:
        OSError: if the file cannot be opened either way.
    """
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return _open_buffered(path, flags, mode)
    alignment = direct_alignment(fd)
    if alignment == 0:
        os.close(fd)
        return _open_buffered(path, flags, mode)
    return DataFile(path, fd, True, alignment)


def direct_alignment(fd: int) -> int:
    """Return the alignment of O_DIRECT transfers on `fd` in bytes, or 0 if O_DIRECT is not supported.

    The alignment applies to the memory address, the file offset and the length. For kernels before 6.1, and for file
    systems that do not report an alignment, the result is `DEFAULT_ALIGNMENT`.
    """
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return DEFAULT_ALIGNMENT
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), answer) != 0:
        return DEFAULT_ALIGNMENT
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_DIOALIGN:
        return DEFAULT_ALIGNMENT
    memory, offset = struct.unpack_from("=II", answer, _DIO_FIELDS)
    return int(max(memory, offset))


def _open_buffered(path: str, flags: int, mode: int) -> DataFile:
    warnings.warn(
        f"{path}: the file system does not support O_DIRECT, so transfers use the page cache, which needs memory and "
        "is slower. Set storage.paths to folders on a local drive with ext4 or XFS.",
        RuntimeWarning,
        stacklevel=4,
    )
    return DataFile(path, os.open(path, flags | os.O_CLOEXEC, mode), False, 1)
