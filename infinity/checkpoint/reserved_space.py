"""Space that is held for the files of checkpoints to come, so that a full drive is refused before a run begins.

Pages have their slots from the start; manifests and state files are made anew for every checkpoint. A file beside them
has
as many bytes as they may take; it gives way just before a checkpoint is written, and grows again when an older one is
gone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.description import RunDescription
from infinity.content.format import Role
from infinity.store.folder import reserve
from infinity.units import KIB, align_up

_log = logging.getLogger("infinity")
_BLOCK = 4 * KIB
_RANDOM = 64 * KIB  # states of all generators, as text and as tensors
_EXTRA = 64 * KIB  # what the user's `extra` and the optimizer's settings may grow by
_PAGE, _SHARD, _BUFFER = 96, 512, 256  # bytes of an entry; of a shard those of its scalars


def checkpoint_bytes(described: RunDescription, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> int:
    """Return how many bytes manifest and state file of a checkpoint take at most, with 64 KiB for `extra`."""
    layout = described.layout
    text = json.dumps(json.dumps(described.plain, separators=(",", ":")))
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    pages = sum(page.role is not Role.GRAD for page in layout.pages)
    manifest = len(text) + 2 * len(repr(settings)) + pages * _PAGE + len(layout.shards) * _SHARD
    buffers = model.named_buffers(remove_duplicate=False)  # one that modules share is saved under each of its names
    state = sum(buffer.nbytes + _BUFFER for _, buffer in buffers)
    return manifest + state + _RANDOM + _EXTRA + 4 * _BLOCK  # as files end within a block, and a folder takes some


class CheckpointSpace:
    """Holds space for a number of checkpoints of one rank. Used by the training thread alone."""

    def __init__(self, file: Path, nbytes: int) -> None:
        """Hold nothing yet; `reserve` makes the file.

        Args:
            file: that takes the space.
            nbytes: of the files of one checkpoint, at most.
        """
        self._file = file
        self._each = align_up(nbytes, _BLOCK)
        """Bytes held for one checkpoint. Raised by `took`."""
        self._size = 0
        """Bytes that the file has. Changed by `reserve` and `hold`."""
        self._warned = False
        """Whether it was said that there is too little space."""

    def reserve(self, checkpoints: int) -> None:
        """Hold space for so many checkpoints.

        Raises:
            BudgetError: the file system has no room; both sizes are named.
            StorageError: the file cannot be made.
        """
        self._file.unlink(missing_ok=True)  # of a run that was killed
        reserve(self._file, checkpoints * self._each)
        self._size = checkpoints * self._each

    def hold(self, checkpoints: int) -> None:
        """Hold space for so many checkpoints from now on; where there is too little left, that is said once."""
        size = checkpoints * self._each
        if size == self._size:
            return
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if size < self._size:
                    os.ftruncate(descriptor, size)
                else:
                    try:
                        os.posix_fallocate(descriptor, 0, size)
                    except OSError:
                        os.ftruncate(descriptor, self._size)  # ext4 keeps what it got, and the drive would stay full
                        raise
            finally:
                os.close(descriptor)
            self._size = size
        except OSError as error:
            if not self._warned:
                _log.warning("no space is held for the next checkpoints: %s: %s", self._file, error.strerror)
            self._warned = True

    def took(self, nbytes: int) -> None:
        """Note what a checkpoint took: `extra` may be larger than was thought."""
        self._each = max(self._each, align_up(nbytes + _EXTRA, _BLOCK))

    def close(self) -> None:
        """Give the space back. Raises `OSError`."""
        self._file.unlink(missing_ok=True)
