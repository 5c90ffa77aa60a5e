"""Every error that `infinity` raises on purpose.

Each message names the offending value and what to change. `ValueError`-like mistakes derive from
`ConfigError`; nothing here is ever raised through `assert`.
"""

from __future__ import annotations

import errno as _errno
import os


class InfinityError(RuntimeError):
    """Base of all errors raised by this package."""

    told_elsewhere = False
    """Whether this repeats what another rank says itself."""


class ConfigError(InfinityError, ValueError):
    """A setting is unknown, malformed or contradicts another one."""


class BudgetError(InfinityError):
    """The model does not fit the host cache or the space on the NVMe paths."""


class UnsupportedError(InfinityError):
    """A model or an optimizer that cannot be paged; the message gives the reason."""


class MissingPackageError(InfinityError):
    """A package that only a part of `infinity` needs is not installed; the message names the extra that brings it."""


class FolderBusyError(InfinityError):
    """Another live run owns the folder; the message says which."""


class CheckpointError(InfinityError):
    """A checkpoint is missing, malformed or belongs to another model."""


class StorageError(InfinityError):
    """A transfer failed.

    Carries everything needed to find the place: operation, path, offset, length and errno.
    """

    def __init__(self, op: str, path: str, offset: int, length: int, errno: int | None, detail: str = "") -> None:
        self.op, self.path, self.offset, self.length, self.errno = op, path, offset, length, errno
        code = f"{_errno.errorcode.get(errno, errno)} ({os.strerror(errno)})" if errno else "I/O error"
        self.reason = detail or code
        tail = f": {detail}" if detail else ""
        super().__init__(f"{op} of {length} bytes at offset {offset} of {path} failed: {code}{tail}")


class CorruptPageError(StorageError):
    """A page's content does not match its checksum."""

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
    """A transfer or a cache slot was waited for longer than the time limit."""


class LostRankError(InfinityError):
    """Another rank failed or has ended; the message says which and why, as far as it is known."""

    told_elsewhere = True


_LOST_CONNECTION = ("gloo", "NCCL", "TCPStore", "Connection closed by peer", "Connection reset")


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective failed since another rank has ended. torch says so in words only."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_CONNECTION)
