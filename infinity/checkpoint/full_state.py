"""What exports read: the state of a run at one step as whole tensors, from a checkpoint or from a run that trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from infinity.checkpoint.description import TensorSpec
from infinity.content.format import MASTER
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder


class FullState(ABC):
    """The state of a run at one step; tensors are read one at a time."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder:
        """The run's folders."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps that were done."""

    @property
    @abstractmethod
    def extra(self) -> dict[str, Any]:
        """Plain data of the user's, as `checkpoint` takes them."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""

    @abstractmethod
    def dtype(self, index: int, name: str = MASTER) -> torch.dtype:
        """Return the dtype in which a parameter is trained, or that of one of its states."""

    @abstractmethod
    def kinds(self, index: int) -> tuple[tuple[str, str], ...]:
        """Return the optimizer's states of a parameter, as (name, dtype)."""

    @property
    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups; their `params` are indices into `tensors`."""

    @abstractmethod
    def scalars(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's scalars of every parameter that was ever updated, by index into `tensors`."""

    @abstractmethod
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers, on the CPU."""

    @abstractmethod
    def read(self, index: int, name: str = MASTER) -> torch.Tensor:
        """Return a parameter as it is trained, or one of its states, in its full shape.

        Args:
            index: into `tensors`.
            name: ``master`` or one of `kinds`.

        Raises:
            StorageError, CorruptPageError: a page cannot be read or is not what was written.
            CheckpointError: a slice of it is on no rank, or it is tensor-parallel.
        """

    def nbytes(self, index: int, dtype: torch.dtype | None = None) -> int:
        """Return the size of a whole parameter, as it is trained or, if it is floating-point, in `dtype`."""
        own = self.dtype(index)
        chosen = dtype if dtype is not None and own.is_floating_point else own
        return torch.Size(self.tensors[index].shape).numel() * chosen.itemsize


def owners_of(specs: list[TensorSpec]) -> dict[int, int]:
    """Return which rank is asked for each slice of a parameter.

    Args:
        specs: what each rank says of it, by rank.

    Raises:
        CheckpointError: a slice of it is on no rank, or it is tensor-parallel.
    """
    spec = specs[0]
    if spec.tensor_parallel:
        raise CheckpointError(f"{spec.names[0]} is tensor-parallel; whole parameters of such runs cannot be read yet")
    owners: dict[int, int] = {}
    for rank, other in enumerate(specs):
        owners.setdefault(other.shard_rank, rank)
    if len(owners) != spec.shard_size:
        raise CheckpointError(f"{spec.names[0]}: slices {sorted(owners)} of {spec.shard_size} are there")
    return owners
