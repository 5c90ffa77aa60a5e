"""Checkpoint folders of a Trainer. Each refers to the infinity checkpoint with its weights and optimizer state.

[Note: order of writing] A folder is complete before its infinity checkpoint is published, and is removed after that
checkpoint. If the process is killed or the host loses power, there is therefore always a folder whose checkpoint
exists: the previous one or the new one. Folders without a checkpoint are ignored, and are removed when the next
checkpoint is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.manifest import Published, complete_checkpoints, published_in
from infinity.errors import CheckpointError
from infinity.integrations.resume_points import checkpoint_folders
from infinity.ranks import Ranks
from infinity.untrusted_files import read_regular

_log = logging.getLogger("infinity")
NAME = "infinity.json"
"""File in a checkpoint folder that refers to its infinity checkpoint."""
_LIMIT = 1 << 16
_FOLDER = re.compile(r"checkpoint-(\d+)")  # naming used by the Trainer


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint folder and the infinity checkpoint to which it refers."""

    folder: Path
    run_id: str
    step: int
    """Number of optimizer steps at the checkpoint. The Trainer's own step count may differ."""

    def write(self) -> None:
        """Create the folder and atomically write the reference to the checkpoint. Raises `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.folder / NAME, (json.dumps({"run_id": self.run_id, "step": self.step}) + "\n").encode())

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read the reference in a folder.

        Raises:
            CheckpointError: if the folder does not refer to an infinity checkpoint.
        """
        file = Path(folder) / NAME
        try:
            tree: Any = json.loads(read_regular(os.path.realpath(file), _LIMIT))
            run_id, step = tree["run_id"], tree["step"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{os.fspath(folder)!r} does not contain {NAME}, so it was not written by a Trainer with infinity "
                "attached; to start from its weights, call attach(…, weights=folder)"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{str(file)!r} cannot be read: {error}") from error
        if not isinstance(run_id, str) or type(step) is not int or step < 0:
            raise CheckpointError(
                f"{str(file)!r} does not refer to a checkpoint: run_id = {run_id!r:.80}, step = {step!r:.80}"
            )
        return cls(Path(folder), run_id, step)


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoint folders in a Trainer's output folder that refer to a checkpoint, ordered by number.

    Folders whose reference is unreadable are skipped with a warning, because others may be usable. Raises `OSError`.
    """
    found = []
    for child in Path(folder).iterdir() if Path(folder).is_dir() else ():
        number = _FOLDER.fullmatch(child.name)
        if number is not None and child.is_dir() and (child / NAME).is_file():
            try:
                found.append((int(number[1]), Checkpoint.read(child)))
            except CheckpointError as error:
                _log.warning("%s is ignored, and will not be removed: %s", child, error)
    return [checkpoint for _, checkpoint in sorted(found, key=lambda pair: pair[0])]


def newest(folder: str | os.PathLike[str], paths: Sequence[str], ranks: Ranks) -> tuple[Checkpoint | None, list[Path]]:
    """Return the last checkpoint folder whose checkpoint is on the NVMe paths of all ranks, and all later folders.

    All ranks must call this function together. They get the same result, which is based on the folders on rank 0.

    Raises:
        OSError: if a path cannot be read.
    """
    there = ranks.agree(ranks.together("looking for checkpoints", partial(checkpoints_in, folder)))
    checkpointed = _checkpointed(paths, ranks)
    good = [at for at, checkpoint in enumerate(there) if (checkpoint.run_id, checkpoint.step) in checkpointed]
    last = good[-1] if good else -1
    return (there[last] if good else None), [checkpoint.folder for checkpoint in there[last + 1 :]]


def _checkpointed(paths: Sequence[str], ranks: Ranks) -> set[tuple[str, int]]:
    """Return the run and step of each checkpoint that is complete on the paths of all ranks together."""

    def seen() -> list[tuple[str, Published]]:
        return [
            (run_id, name)
            for run_id, checkpoints in checkpoint_folders(paths).items()
            for name in published_in(checkpoints)
        ]

    published: dict[str, set[Published]] = {}
    for found in ranks.collect(ranks.together("looking for runs", seen)):
        for run_id, name in found:
            published.setdefault(run_id, set()).add(name)
    return {
        (run_id, checkpoint.step) for run_id, names in published.items() for checkpoint in complete_checkpoints(names)
    }


def remove_others(folder: str | os.PathLike[str], run_id: str, kept: Collection[int]) -> None:
    """Remove the checkpoint folders of a run whose steps are not in `kept`."""
    for checkpoint in checkpoints_in(folder):
        if checkpoint.run_id == run_id and checkpoint.step not in kept:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
