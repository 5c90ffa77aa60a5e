"""Checkpoints that a run could be resumed from."""

from __future__ import annotations

from pathlib import Path

from infinity.checkpoint.held import held, seen_in, usable
from infinity.checkpoint.manifest import CheckpointName
from infinity.store.folder import RunFolder


def complete_checkpoints(root: Path) -> list[CheckpointName]:
    """Return the usable checkpoints in the first folder of a run, in order."""
    return [checkpoint.name for checkpoint in usable(held([seen_in(RunFolder(root.name, (root,)))]))]
