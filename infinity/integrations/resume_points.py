"""Find and resume the infinity checkpoints to which the checkpoints of other frameworks refer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from infinity.config import Config
from infinity.store.marker import look_for_runs


def checkpoint_folders(paths: Iterable[str]) -> dict[str, Path]:
    """Return the checkpoint folder of each run on this node, by run id. Raises `OSError`."""
    runs, _ = look_for_runs([path for path in paths if os.path.isdir(path)])
    # checkpoints are on the first path
    return {run.run_id: run.roots[0] / "checkpoints" for run in runs if 0 in run.roots}


def with_resume_point(settings: Config, run_id: str, step: int) -> Config:
    """Return settings that resume a run from a checkpoint."""
    return replace(settings, run=replace(settings.run, resume=run_id, resume_step=step))
