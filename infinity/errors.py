"""Errors that `infinity` raises deliberately.

Each message contains the offending value and the fix. Invalid values raise `ConfigError`, which is also a
`ValueError`. No error is raised through `assert`.
"""

from __future__ import annotations

import errno as _errno
import os


class InfinityError(RuntimeError):
    """Base class of all errors raised by this package."""

    told_elsewhere = False
    """``True`` if another rank reports the same error."""


class ConfigError(InfinityError, ValueError):
    """A setting is unknown, malformed or contradicts another setting."""


class BudgetError(InfinityError):
    """The model does not fit in the host cache, or its state does not fit on the NVMe paths."""


class UnsupportedError(InfinityError):
    """`infinity` does not support a model, optimizer or call. The message contains the reason."""


class MissingPackageError(InfinityError):
    """An optional part of `infinity` requires a package that is not installed.

    The message contains the extra that installs it.
    """


class FolderBusyError(InfinityError):
    """The folder is in use by another live run. The message identifies that run."""


class CheckpointError(InfinityError):
    """A checkpoint is missing, malformed or belongs to a different model."""


class StorageError(InfinityError):
    """A transfer failed. The message contains the operation, path, offset, length and errno."""

    def __init__(self, op: str, path: str, offset: int, length: int, errno: int | None, detail: str = "") -> None:
        self.op, self.path, self.offset, self.length, self.errno = op, path, offset, length, errno
        code = f"{_errno.errorcode.get(errno, errno)} ({os.strerror(errno)})" if errno else "I/O error"
        self.reason = detail or code
        tail = f": {detail}" if detail else ""
        super().__init__(f"{op} of {length} bytes at offset {offset} of {path} failed: {code}{tail}")


class CorruptPageError(StorageError):
    """The content of a page does not match its checksum."""

    def __init__(self, page: str, path: str, offset: int, length: int, expected: int, found: int) -> None:
        super().__init__(
            "read",
            path,
            offset,
            length,
            None,
            f"page {page} is corrupt: checksum {found:016x}, expected {expected:016x}; "
            "resume from an earlier checkpoint or restore the file",
        )
        self.page = page
        self.reason = f"checksum {found:016x}, expected {expected:016x}"


class StallError(InfinityError):
    """A transfer did not complete, or no cache slot became free, within the time limit."""


class LostRankError(InfinityError):
    """Another rank failed or exited. The message contains its rank and, if known, the reason."""

    told_elsewhere = True


_LOST_CONNECTION = ("gloo", "NCCL", "TCPStore", "Connection closed by peer", "Connection reset")


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether a collective failed because another rank exited. PyTorch reports this only in the message."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_CONNECTION)
