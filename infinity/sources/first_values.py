"""Sources of the initial values of a run's pages: the common interface, and the values that a model already has.

Other sources are the sibling modules: `initialize` (the model's own initialization), `pretrained_folder`
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
"""Maps the position of a parameter in its FSDP module and a section (``master`` or a state kind) to this rank's
elements, flat; None means zeros.
"""


class FirstValues:
    """Source of the initial values of a run's pages."""

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, before anything is written, that the values belong to this model and optimizer.

        Args:
            model: the sharded model.
            members: all parameters, in the order of the layout's shards.
            layout: layout of the pages of this rank.
            optimizer: the optimizer of the run.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: if they do not, or if this cannot be determined. The
                message names the difference.
        """

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return the values of one FSDP module: flat tensors of this rank's elements, the master in the dtype that is
        trained.

        Raises (when a value is requested):
            ConfigError, CheckpointError, StorageError, CorruptPageError, UnsupportedError: if the file that it is
                read from has changed, or the model's own code fails.
        """
        raise NotImplementedError

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the values of the buffers that the source has, by their names in the model.

        Raises:
            ConfigError, CheckpointError: if they cannot be read.
        """
        return {}

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Restore buffers and param groups, and return the progress of training.

        Returns:
            Progress, or None for a run that starts from step 0.
        """
        return None


class OwnValues(FirstValues):
    """Values that the model already has in memory."""

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            return torch_private.local_tensor(members[position].param).detach().reshape(-1).cpu()

        return value_of


def convertible(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values of one dtype may be converted to another: never across kinds, nor for dtypes that need a
    scale.
    """
    if found == wanted:
        return True
    if found.is_floating_point and wanted.is_floating_point:
        return found.itemsize > 1 and wanted.itemsize > 1
    kinds = found.is_floating_point or wanted.is_floating_point or found == torch.bool or wanted == torch.bool
    return not kinds and torch.promote_types(found, wanted) == wanted  # integers, if none can be lost
