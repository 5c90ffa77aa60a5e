"""Default name of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import nn

from infinity import torch_private
from infinity.config import MOST_NAME, Config


def with_name(settings: Config, model: str | nn.Module, folder: str | os.PathLike[str]) -> Config:
    """Return settings whose run has a name, by default that of the model and the last part of a folder."""
    if settings.run.name:
        return settings
    name = f"{model if isinstance(model, str) else _name_of(model)} in {Path(folder).resolve().name or '/'}"
    shown = "".join(letter for letter in name if letter.isprintable())[:MOST_NAME]
    return replace(settings, run=replace(settings.run, name=shown))


def _name_of(model: nn.Module) -> str:
    """Return the name of a transformers model's folder or repository if it has one, and otherwise its class name."""
    own = torch_private.unwrapped_module(model)
    path = getattr(getattr(own, "config", None), "name_or_path", "")
    name = os.path.basename(path.rstrip("/")) if isinstance(path, str) else ""
    return name or torch_private.original_class(own).__name__
