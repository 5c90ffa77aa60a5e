"""Checkpoints of a framework: a folder with the framework's files, and the infinity checkpoint that belongs to it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.manifest import Published, complete_checkpoints, published_in, read_manifest
from infinity.config import Config
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.resume_points import checkpoint_folders, going_on
from infinity.integrations.run_folders import (
    before,
    exchange,
    finish,
    made_beside,
    make_durable,
    put_back,
    remove,
    set_aside,
)
from infinity.ranks import Ranks
from infinity.run.optimizer import PagedOptimizer
from infinity.units import MIB
from infinity.untrusted_files import read_regular

RECORD = "infinity.json"
"""File in a folder that names its infinity checkpoint."""
_KEY = "checkpoint"  # key in the `extra` of a checkpoint that names its folder


class Record(NamedTuple):
    """Reference from a folder to its infinity checkpoint."""

    run_id: str
    step: int
    token: str
    """Random; the checkpoint contains the same token."""

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read the record of a folder. Raises `ConfigError` if it has none."""
        try:
            found = json.loads(read_regular(folder / RECORD, MIB))
            return cls(str(found["run_id"]), int(found["step"]), str(found["token"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{folder / RECORD} cannot be read: {reason}; pass a folder that was saved with the state on NVMe"
            ) from error

    @classmethod
    def of_checkpoint(cls, folder: Path, settings: Config, ranks: Ranks) -> tuple[Path, Record]:
        """Return the folder whose checkpoint exists, and its record. All ranks call it together, and rank 0 reads.

        The result is the folder itself, or the copy that was set aside while the folder is written again. Nothing is
        changed.

        Raises:
            ConfigError: if there is no record.
            CheckpointError: if another save has replaced the checkpoint since.
        """
        there = ranks.on_first("reading the checkpoint", partial(_records, folder))
        belongs = [_belongs(record, settings, ranks) for _, record in there]
        for (place, record), found in zip(there, belongs, strict=True):
            if found is not None and found.get("token") == record.token:
                return place, record
        place, record = there[0]
        if belongs[0] is not None:
            other = str(belongs[0].get("folder", "")) or "another one, without a folder"
            raise CheckpointError(
                f"{folder} belongs to a checkpoint of step {record.step} of run {record.run_id} that was replaced: "
                f"the checkpoint of this step belongs to {other}; nothing was changed, pass a folder whose checkpoint "
                "exists"
            )
        return place, record  # `infinity.offload` reports which checkpoints exist

    @classmethod
    def newest(cls, folders: Sequence[Path], settings: Config, ranks: Ranks) -> tuple[Path, Record] | None:
        """Return the first of several folders whose checkpoint exists, as `of_checkpoint`. All ranks call it together
        with the same arguments.

        Raises:
            CheckpointError: if a checkpoint cannot be read.
        """
        for folder in folders:
            for place, record in ranks.on_first("reading a checkpoint", partial(_records, folder, strict=False)):
                found = _belongs(record, settings, ranks)
                if found is not None and found.get("token") == record.token:
                    return place, record
        return None

    def resumed(self, settings: Config) -> Config:
        """Return settings that resume a run from the checkpoint."""
        return going_on(settings, self.run_id, self.step)


class Checkpoints:
    """Saves folders and checkpoints so that after an interruption at any point one folder and its checkpoint still
    match.

    If a folder is saved again, its previous version is kept until the new checkpoint exists. [Note: a folder that is
    written again]
    """

    def __init__(self, paged: PagedOptimizer, how: str) -> None:
        """Determine the folder that the run has resumed from.

        Args:
            paged: optimizer of the run.
            how: call that resumes from a folder, with ``{}`` for the folder, for errors.
        """
        self._paged, self._how = paged, how
        found = paged.resumed_extra.get(_KEY)
        belongs = found if isinstance(found, dict) else {}
        # Record of the folder that the run has resumed from or saved last.
        self._token, self._folder = str(belongs.get("token", "")), str(belongs.get("folder", ""))
        self._step = paged.steps  # step of that checkpoint

    def save(self, what: str, folder: Path | None, write: Callable[[], Path]) -> Path:
        """Let a framework write its folder, then save a checkpoint. All ranks call it together.

        Args:
            what: name of the call in messages.
            folder: folder to write; None if the framework creates a new one.
            write: function that writes the files of this rank and returns the folder.

        Raises:
            InfinityError: if gradients are pending (call it after `step`), or another rank failed.
            StorageError, OSError: if a drive reports an error. The previous checkpoint stays intact.
        """
        self._paged.check_between(what)
        ranks, run = self._paged.run.ranks, self._paged.run
        # If two folders are saved at one step, the second checkpoint replaces the first and belongs to both folders.
        again = bool(self._token) and self._step == self._paged.steps
        token = self._token if again else ranks.agree(secrets.token_hex(16))
        if folder is not None:
            self._flush_updates(what, folder)
            ranks.on_first(what, partial(_set_aside, folder))
        folder = ranks.together(what, write)
        record = Record(run.folder.run_id, self._paged.steps, token) if ranks.rank == 0 else None
        ranks.together(what, partial(_make_durable, folder, record))
        self._paged.save_checkpoint({_KEY: {"token": token, "folder": os.path.abspath(folder)}})
        self._token, self._folder, self._step = token, os.path.abspath(folder), self._paged.steps
        self._flush_updates(what, folder)
        return folder

    def export(self, folder: Path, **named: Any) -> list[Path]:
        """Write weights with `PagedOptimizer.save_pretrained`, replacing weights in the folder. All ranks call it
        together.

        Other files of the folder stay.

        Args:
            folder: new folder, or folder with earlier weights.
            named: further arguments of `save_pretrained`.

        Returns:
            The files, on every rank.

        Raises:
            Exception: any error of `save_pretrained`; the folder is then unchanged.
        """
        what, ranks = "save_pretrained", self._paged.run.ranks
        self._flush_updates(what, folder)
        if not ranks.on_first(what, lambda: folder.is_dir() and any(folder.iterdir())):
            return self._paged.save_pretrained(folder, **named)
        beside = ranks.agree(made_beside(folder))
        ranks.on_first(what, partial(remove, beside))  # left by an interrupted export
        written = self._paged.save_pretrained(beside, **named)
        ranks.on_first(what, partial(exchange, folder, beside))
        return [folder / file.name for file in written]

    def check(self, folder: Path) -> Path:
        """Check that the run is at the step of a saved folder. All ranks call it together.

        Returns:
            The folder to load: the folder itself, or the copy that was set aside while it is written again.

        Raises:
            ConfigError: if `save` did not write the folder.
            CheckpointError: if the run did not resume from its checkpoint, or has trained since. The message names
                the fix.
        """
        ranks = self._paged.run.ranks
        there = ranks.on_first("reading the checkpoint", partial(_records, folder))
        for place, record in there:
            if record.token == self._token and record.step == self._paged.steps:
                return place
        record = there[0][1]
        behind = f" behind {self._folder}" if self._folder else ""
        raise CheckpointError(
            f"{folder} belongs to step {record.step} of run {record.run_id}, and this one is at step "
            f"{self._paged.steps}{behind}: weights and optimizer are restored when the run starts; "
            f"{self._how.format(repr(str(folder)))}; older folders need run.retained_checkpoints"
        )

    def _flush_updates(self, what: str, folder: Path) -> None:
        """Finish an interrupted rewrite of a folder: keep the version whose checkpoint exists."""
        ranks, settings = self._paged.run.ranks, self._paged.run.settings
        if not ranks.agree(before(folder).is_dir()):
            return
        there = ranks.on_first(what, partial(_records, folder, strict=False))
        belongs = [(_belongs(record, settings, ranks) or {}).get("token") == record.token for _, record in there]
        good = [place for (place, _), found in zip(there, belongs, strict=True) if found]

        def flush_updates() -> None:
            lost = not folder.is_dir() or (folder not in good and bool(good))
            (put_back if lost else finish)(folder)

        ranks.on_first(what, flush_updates)


def _records(folder: Path, *, strict: bool = True) -> list[tuple[Path, Record]]:
    """Return the records of a folder and of its copy that was set aside. Raises `ConfigError` if `strict`."""
    found, wrong = [], None
    for place in (folder, before(folder)):
        try:
            found.append((place, Record.read(place)))
        except ConfigError as error:
            wrong = wrong or error
    if strict and not found and wrong is not None:
        raise wrong
    return found


def _belongs(record: Record, settings: Config, ranks: Ranks) -> dict[str, Any] | None:
    """Return the reference to a folder in the checkpoint of a record's run and step; None if there is no such
    checkpoint.

    All ranks call it together, because nodes may not see each other's checkpoints.

    Raises:
        CheckpointError: if the checkpoint cannot be read.
        OSError: if a path cannot be read.
    """

    def look() -> tuple[Path | None, list[Published]]:
        paths = settings.run.resume_paths or settings.storage.paths
        checkpoints = checkpoint_folders(paths).get(record.run_id)
        found = [] if checkpoints is None else [name for name in published_in(checkpoints) if name.step == record.step]
        return checkpoints, found

    checkpoints, here = ranks.together("looking for the checkpoint", look)
    complete = complete_checkpoints(set[Published]().union(*ranks.collect(here)))
    if not complete:
        return None

    def read() -> dict[str, Any] | None:
        mine = [name for name in here if name.checkpoint == complete[-1]]
        if checkpoints is None or not mine or ranks.local_rank:
            return None
        found = read_manifest(checkpoints / mine[0].file_name).extra.get(_KEY)
        return found if isinstance(found, dict) else {}

    told = ranks.collect(ranks.together("reading the checkpoint", read))
    return next((found for found in told if found is not None), None)


def _set_aside(folder: Path) -> None:
    if (folder / RECORD).exists():
        set_aside(folder)


def _make_durable(folder: Path, record: Record | None) -> None:
    """Flush the files that all ranks have written into a folder, and record the coming checkpoint."""
    make_durable(folder)
    if record is not None:
        write_durably(folder / RECORD, json.dumps(record._asdict()).encode())
