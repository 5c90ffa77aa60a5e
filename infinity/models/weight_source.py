"""Which weights a model on the meta device is to begin with: noted with the model, until `offload` reads them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from infinity import torch_private
from infinity.errors import ConfigError

_ATTRIBUTE = "_infinity_weights"  # of the model, so that it goes along into copies


def note_weights(model: nn.Module, weights: Path) -> None:
    """Note where the weights of a model lie."""
    setattr(model, _ATTRIBUTE, weights)


def noted_weights(model: nn.Module) -> Path | None:
    """Return where the weights of a model lie, if that was noted.

    Raises:
        ConfigError: it was noted for a module inside of the model, whose names are others.
    """
    own = torch_private.unwrapped_module(model)
    for name, module in own.named_modules():
        found: Path | None = vars(module).get(_ATTRIBUTE)
        if found is None:
            continue
        if module is own:
            return found
        raise ConfigError(
            f"the weights of {found} are those of {name}, which is only a part of this model: pass weights=, a folder "
            "with the tensors of the whole model by its own names"
        )
    return None
