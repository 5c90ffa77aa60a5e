"""Record the location of the initial weights with a model on the meta device, until `offload` reads them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from infinity import torch_private
from infinity.errors import ConfigError

_ATTRIBUTE = "_infinity_weights"  # attribute of the model, so that copies keep it


def note_weights(model: nn.Module, weights: Path) -> None:
    """Record the folder with the weights of a model."""
    setattr(model, _ATTRIBUTE, weights)


def noted_weights(model: nn.Module) -> Path | None:
    """Return the recorded folder with the weights of a model, or ``None`` if none was recorded.

    Raises:
        ConfigError: If the folder was recorded for a submodule, whose parameter names differ from the names in the
            model.
    """
    own = torch_private.unwrapped_module(model)
    for name, module in own.named_modules():
        found: Path | None = vars(module).get(_ATTRIBUTE)
        if found is None:
            continue
        if module is own:
            return found
        raise ConfigError(
            f"{found} holds the weights of {name}, which is only a part of this model; pass weights=, a folder with "
            "the tensors of the whole model under its own names"
        )
    return None
