"""Checkpoints that a run could be resumed from."""

from __future__ import annotations

from pathlib import Path

from infinity.checkpoint.held import held, seen_in, usable
from infinity.checkpoint.manifest import CheckpointName
from infinity.store.folder import RunFolder


def complete_checkpoints(root: Path) -> list[CheckpointName]:
    """Return the usable checkpoints in the first folder of a run, in order."""
    return [checkpoint.name for checkpoint in usable(held([seen_in(RunFolder(root.name, (root,)))]))]


def root_of(folder: Path) -> Path:
    """Return the folder of the only run on the path `nvme0` of a test's folder."""
    (found,) = (entry for entry in (folder / "nvme0").iterdir() if entry.is_dir())
    return found


def flip(file: Path, offset: int | None = None) -> None:
    """Invert one bit of a file, by default in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    file.write_bytes(content)
