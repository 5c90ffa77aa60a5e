"""Where the first content of a run's pages comes from: what all sources answer, and the values a model has already.

The others are `infinity.fsdp.initialise` (the model's own initialisation), `infinity.checkpoint.pretrained`
(safetensors), `infinity.checkpoint.dcp` and `infinity.checkpoint.reshard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.fsdp import private
from infinity.layout import MASTER, Layout

ValueOf = Callable[[int, str], torch.Tensor | None]
"""One section (``master`` or a state kind) of a unit's member, given its position: this rank's elements, flat; None for
zeros."""


@dataclass(frozen=True)
class Member:
    """One parameter of a unit: FSDP2's object, and all names that the model has for it."""

    param: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class ResumedState:
    """How far training has come, besides what is in the pages.

    `scalars` are those of the optimizer by shard, `extra` is the user's, `own` what the optimizer counts on itself.
    """

    step: int
    scalars: dict[int, dict[str, Any]]
    extra: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


class FirstValues:
    """Where the first content of a run's pages comes from."""

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, before anything is written, that the values are of this model and optimizer.

        Args:
            members: all parameters, in the order of the layout's shards.

        Raises:
            ConfigError, CommitError: they are not; what differs is named.
        """

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return the values of one unit; the master in the dtype that is trained."""
        raise NotImplementedError

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the values of those buffers of the model that the source has, by their names in the model."""
        return {}

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Put what belongs to the values into buffers and param groups; return how far training has come.

        Returns:
            None for a run that begins.
        """
        return None


def local_bounds(param: Any) -> tuple[list[int], list[int]]:
    """Return offsets and sizes of this rank's slice of a whole parameter, one per dimension."""
    sizes = list(private.full_shape(param))
    offsets = [0] * len(sizes)
    rank, size = private.shard_rank_and_size(param)
    dim = private.shard_dim(param)
    rows = -(-sizes[dim] // size)
    offsets[dim] = min(rank * rows, sizes[dim])
    sizes[dim] = min(rows, sizes[dim] - offsets[dim])
    return offsets, sizes


def local_slice(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's real elements of a whole parameter, flat."""
    rank, size = private.shard_rank_and_size(param)
    chunks = torch.chunk(whole, size, dim=private.shard_dim(param))
    return chunks[rank].reshape(-1) if rank < len(chunks) else whole.new_empty(0)


class OwnValues(FirstValues):
    """The values that a model has already."""

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return copies of the local elements."""

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            return private.local_tensor(members[position].param).detach().reshape(-1).cpu()

        return value_of
