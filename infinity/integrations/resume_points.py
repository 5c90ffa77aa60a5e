"""Find and resume the infinity checkpoints to which the checkpoints of other frameworks refer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.config import Config
from infinity.optim import optimizer_clone
from infinity.store.marker import look_for_runs


def checkpoint_folders(paths: Iterable[str]) -> dict[str, Path]:
    """Return the checkpoint folder of each run on this node, by run id. Raises `OSError`."""
    runs, _ = look_for_runs([path for path in paths if os.path.isdir(path)])
    # checkpoints are on the first path
    return {run.run_id: run.roots[0] / "checkpoints" for run in runs if 0 in run.roots}


def with_resume_point(settings: Config, run_id: str, step: int) -> Config:
    """Return settings that resume a run from a checkpoint."""
    return replace(settings, run=replace(settings.run, resume=run_id, resume_step=step))


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
