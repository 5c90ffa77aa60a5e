"""Disk space reserved for the files of future checkpoints, so that a full drive is reported before training starts.

Space for pages is allocated from the start, but every checkpoint writes a new manifest and a new state file. A
placeholder file in the same folder therefore occupies as many bytes as these files may need. It shrinks just before a
checkpoint is written, and grows again after an older checkpoint has been removed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.checkpoint.description import RunDescription
from infinity.content.format import Role
from infinity.store.folder import reserve
from infinity.units import KIB, align_up

_log = logging.getLogger("infinity")
_BLOCK = 4 * KIB
_RANDOM = 64 * KIB  # bytes for all random states, as text and as tensors
_EXTRA = 64 * KIB  # allowance for growth of the user's `extra` and of the optimizer's settings
_PAGE, _SHARD, _BUFFER = 96, 512, 256  # bytes per entry; the entry of a shard includes its scalars
_RANK = 128  # bytes for the part of a rank, with a host name of at most 64 characters


def checkpoint_bytes(
    described: RunDescription,
    model: nn.Module,
    module_state: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    world_size: int,
) -> int:
    """Return the maximum size of a checkpoint's manifest and state file in bytes, including 64 KiB for `extra`.

    Args:
        described: Description of the pages of this rank.
        model: Sharded model.
        module_state: Result of `packed_state`.
        groups: Parameter groups of the optimizer.
        world_size: Number of ranks.
    """
    layout = described.layout
    text = json.dumps(json.dumps(described.plain, separators=(",", ":")))
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    pages = sum(page.role is not Role.GRAD for page in layout.pages)
    manifest = len(text) + 2 * len(repr(settings)) + pages * _PAGE + len(layout.shards) * _SHARD
    manifest += world_size * _RANK
    buffers = torch_private.tensors_in_memory(model).values()  # a shared buffer is saved under each of its names
    state = sum(buffer.nbytes + _BUFFER for buffer in buffers)
    state += sum(packed.nbytes + _BUFFER for packed in module_state.values())
    return manifest + state + _RANDOM + _EXTRA + 4 * _BLOCK  # partially used blocks and directory entries


class CheckpointSpace:
    """Reserves space for one rank's future checkpoints. Only the training thread uses it."""

    def __init__(self, file: Path, nbytes: int) -> None:
        """Initialize without reserving space; `reserve` creates the file.

        Args:
            file: File that occupies the space.
            nbytes: Maximum size of the files of one checkpoint.
        """
        self._file = file
        self._each = align_up(nbytes, _BLOCK)
        """Bytes reserved per checkpoint. `took` may increase the value."""
        self._size = 0
        """Current size of the file in bytes. Changed by `reserve` and `hold`."""
        self._warned = False
        """``True`` once a lack of space has been logged."""

    def reserve(self, checkpoints: int) -> None:
        """Create the file and reserve space for the given number of checkpoints.

        Raises:
            BudgetError: if the file system has too little free space. The message states both sizes.
            StorageError: if the file cannot be created.
        """
        self._file.unlink(missing_ok=True)  # left by a run that was killed
        reserve(self._file, checkpoints * self._each, [self._file.parents[1]])
        self._size = checkpoints * self._each

    def hold(self, checkpoints: int) -> None:
        """Resize the reservation to the given number of checkpoints. A lack of space is logged only once."""
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
                        os.ftruncate(descriptor, self._size)  # ext4 keeps a partial allocation
                        raise
            finally:
                os.close(descriptor)
            self._size = size
        except OSError as error:
            if not self._warned:
                _log.warning("could not reserve space for the next checkpoints: %s: %s", self._file, error.strerror)
            self._warned = True

    def took(self, nbytes: int) -> None:
        """Account for the size of a written checkpoint, because its `extra` may exceed the allowance."""
        self._each = max(self._each, align_up(nbytes + _EXTRA, _BLOCK))

    def close(self) -> None:
        """Release the space. Raises `OSError`."""
        self._file.unlink(missing_ok=True)
