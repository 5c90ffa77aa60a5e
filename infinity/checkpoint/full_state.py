"""Interface for exports: the state of a run at one step as full tensors, read from a checkpoint or from a live run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from infinity.checkpoint.description import TensorSpec
from infinity.content.spans import Spans, numel, tile
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder


class FullState(ABC):
    """State of a run at one step. Tensors are read one at a time."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder:
        """Folders of the run."""

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports (see `infinity.formats.companions`)."""
        return self.folder.checkpoints

    @property
    @abstractmethod
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""

    @abstractmethod
    def dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which a parameter is trained."""

    @abstractmethod
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers, on the CPU."""

    @abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """Return a parameter in full shape, in the dtype in which it is trained.

        Raises:
            StorageError: if a page cannot be read.
            CorruptPageError: if a page does not match its checksum.
            CheckpointError: if no rank holds one of the slices.
        """

    def nbytes(self, index: int, dtype: torch.dtype | None = None) -> int:
        """Return the size of a full parameter in bytes.

        If it has a floating-point dtype, `dtype` overrides that dtype.
        """
        own = self.dtype(index)
        chosen = dtype if dtype is not None and own.is_floating_point else own
        return torch.Size(self.tensors[index].shape).numel() * chosen.itemsize


def owners_of(specs: Mapping[int, TensorSpec], run_id: str) -> dict[Spans, int]:
    """Return the rank from which to read each slice of a parameter, by the spans of the slice.

    Args:
        specs: Description of the parameter from each rank, by rank.
        run_id: Run id, for error messages.

    Raises:
        CheckpointError: if no rank holds one of the slices.
    """
    spec = next(iter(specs.values()))
    owners: dict[Spans, int] = {}
    for rank, other in specs.items():
        if other.held:
            owners.setdefault(other.spans, rank)
    if not tile(spec.shape, owners):
        held = sum(map(numel, owners))
        problem = f"hold {held} of {spec.parameters} elements" if held < spec.parameters else "overlap"
        raise CheckpointError(
            f"{spec.names[0]} of run {run_id}: the slices of ranks {sorted(owners.values())} {problem}; make the files "
            "of all ranks available"
        )
    return owners
