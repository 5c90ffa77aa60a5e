"""Where the first content of a run's pages comes from: what all sources answer, and the values a model has already.

The others are the modules beside this one: `initialise` (the model's own initialisation), `pretrained` (safetensors),
`dcp` and `reshard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.checkpoint.model_state import ResumedState
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.fsdp.sharded_model import Member

ValueOf = Callable[[int, str], torch.Tensor | None]
"""One section (``master`` or a state kind) of an FSDP module's member, given its position: this rank's elements, flat;
None for
zeros."""


class FirstValues:
    """Where the first content of a run's pages comes from."""

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, before anything is written, that the values are of this model and optimizer.

        Args:
            members: all parameters, in the order of the layout's shards.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: they are not, or cannot be known; what differs is named.
        """

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return the values of one FSDP module: flat tensors of this rank's elements, the master in the dtype that is
        trained.

        Raises:
            ConfigError, CheckpointError, StorageError, CorruptPageError, UnsupportedError: when a value is asked for:
            what
                it is read from is not as it was, or the model's own code fails.
        """
        raise NotImplementedError

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the values of those buffers of the model that the source has, by their names in the model.

        Raises:
            ConfigError, CheckpointError: they cannot be read.
        """
        return {}

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Put what belongs to the values into buffers and param groups; return how far training has come.

        Returns:
            None for a run that begins.
        """
        return None


class OwnValues(FirstValues):
    """The values that a model has already."""

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return copies of the local elements."""

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            return torch_private.local_tensor(members[position].param).detach().reshape(-1).cpu()

        return value_of


def convertible(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of a dtype can be taken for those of another: not across kinds, nor those that need a scale."""
    if found == wanted:
        return True
    if found.is_floating_point and wanted.is_floating_point:
        return found.itemsize > 1 and wanted.itemsize > 1
    kinds = found.is_floating_point or wanted.is_floating_point or found == torch.bool or wanted == torch.bool
    return not kinds and torch.promote_types(found, wanted) == wanted  # integers, where none is lost
