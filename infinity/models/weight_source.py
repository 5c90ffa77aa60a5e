"""Record where the initial weights of a model on the meta device are located, until `offload` reads them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from infinity import torch_private
from infinity.errors import ConfigError

_ATTRIBUTE = "_infinity_weights"  # attribute of the model, so that copies keep it


def note_weights(model: nn.Module, weights: Path) -> None:
    """Record the folder that contains the weights of a model."""
    setattr(model, _ATTRIBUTE, weights)


def noted_weights(model: nn.Module) -> Path | None:
    """Return the folder that `note_weights` recorded for a model, or ``None`` if no folder was recorded.

    Raises:
        ConfigError: If the folder was recorded for a submodule, because its parameter names differ from the names in
            the model.
    """
    own = torch_private.unwrapped_module(model)
    for name, module in own.named_modules():
        found: Path | None = vars(module).get(_ATTRIBUTE)
        if found is None:
            continue
        if module is own:
            return found
        raise ConfigError(
            f"{found} contains the weights of {name}, which is only a part of this model; pass weights=, a folder that "
            "contains the tensors of the whole model under its own parameter names"
        )
    return None
