"""Common interface of the sources of a run's initial values, and the source for values that a model already has.

The other sources are in the sibling modules `initialize` (the model's own initialization), `pretrained_folder`
(safetensors), `dcp` and `reshard`.
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
"""Function that returns this rank's elements of a parameter, flat, or None for zeros. Its arguments are the position of
the parameter in its FSDP module, and ``master`` or the name of an optimizer state.
"""


class FirstValues:
    """Source of the initial values of a run's pages."""

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, before any page is written, that the values belong to this model and optimizer.

        Args:
            model: sharded model.
            members: all parameters, in the order of the layout's shards.
            layout: layout of this rank's pages.
            optimizer: optimizer of the run.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: if they do not, or if this cannot be determined. The
                message describes the difference.
        """

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return a function that returns the values of one FSDP module. A master has the dtype of its parameter.

        Raises (when a value is requested):
            ConfigError, CheckpointError, StorageError, CorruptPageError, UnsupportedError: if the file that contains
                the value has changed, or the model's own code fails.
        """
        raise NotImplementedError

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the values of the buffers that the source contains, by their names in the model.

        Raises:
            ConfigError, CheckpointError: if the buffers cannot be read.
        """
        return {}

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Restore buffers and param groups, and return the progress of training.

        Returns:
            Progress of training, or None for a run that starts from step 0.
        """
        return None

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        """Load optimizer state through the `load_state_dict` of the optimizer that `infinity.offload` returns.

        Args:
            model: offloaded model.
            optimizer: optimizer that `infinity.offload` returns.

        Returns:
            Number of completed steps, or None if the source has no such state.

        Raises:
            ConfigError, CheckpointError: if the state does not match the optimizer, or cannot be read.
        """
        return None

    def close(self) -> None:
        """Release the source. All ranks must call it together."""


class OwnValues(FirstValues):
    """Source of the values that the model already has in memory."""

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            return torch_private.local_tensor(members[position].param).detach().reshape(-1).cpu()

        return value_of


def convertible(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values may be converted to a different dtype. The kind of dtype must be the same, and dtypes that
    need a scale are excluded.
    """
    if found == wanted:
        return True
    if found.is_floating_point and wanted.is_floating_point:
        return found.itemsize > 1 and wanted.itemsize > 1
    kinds = found.is_floating_point or wanted.is_floating_point or found == torch.bool or wanted == torch.bool
    return not kinds and torch.promote_types(found, wanted) == wanted  # integers, if none can be lost
