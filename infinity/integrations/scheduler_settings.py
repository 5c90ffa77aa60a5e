"""Settings of param groups, which a scheduler that is created after resuming would change."""

from __future__ import annotations

from typing import Any

import torch

from infinity.optim import optimizer_clone


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the settings of an optimizer's param groups."""
    return [optimizer_clone.settings_of(group) for group in optimizer.param_groups]


def restore_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Undo the changes that the constructor of a scheduler has made to the param groups since `settings_of`."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)  # a scheduler changes a tensor in place
            else:
                group[name] = value
