"""Checkpoints of a framework. Each consists of a folder with the framework's files and an infinity checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.held import HeldCheckpoint, Seen, held, never_complete, problems, seen_in, usable
from infinity.checkpoint.manifest import read_manifest
from infinity.checkpoint.mirror import Mirror
from infinity.config import Config
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.run_folders import (
    APART,
    before,
    finish,
    finish_export,
    make_durable,
    move_export,
    put_back,
    set_aside,
)
from infinity.optim import optimizer_clone
from infinity.ranks import Ranks
from infinity.run.optimizer import PagedOptimizer
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs
from infinity.units import MIB
from infinity.untrusted_files import read_regular

_log = logging.getLogger("infinity")
RECORD = "infinity.json"
"""File in a folder that refers to its infinity checkpoint."""
_KEY = "checkpoint"  # key in the `extra` of an infinity checkpoint for the reference to its folder


class Record(NamedTuple):
    """Reference from a folder to its infinity checkpoint."""

    run_id: str
    step: int
    token: str
    """Random string, which the infinity checkpoint also contains."""

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read the record of a folder. Raises `ConfigError` if it has none."""
        try:
            found = json.loads(read_regular(folder / RECORD, MIB))
            return cls(str(found["run_id"]), int(found["step"]), str(found["token"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{folder / RECORD} cannot be read: {reason}; pass a folder that was saved with the state on NVMe, or "
                "start from its weights (weights=folder)"
            ) from error

    @classmethod
    def of_checkpoint(cls, folder: Path, settings: Config, ranks: Ranks) -> tuple[Path, Record]:
        """Return the version of a folder whose checkpoint exists, and its record.

        The result is the folder itself, or the previous version if rewriting the folder was interrupted. No file is
        changed. All ranks must call this method together, and rank 0 reads the files.

        Raises:
            ConfigError: if there is no record.
            CheckpointError: if a later save has replaced the checkpoint.
        """
        there = ranks.on_first("reading the checkpoint", partial(_records, folder))
        belongs = [_belongs(record, settings, ranks) for _, record in there]
        for (place, record), found in zip(there, belongs, strict=True):
            if found is not None and found.get("token") == record.token:
                return place, record
        place, record = there[0]
        if belongs[0] is not None:
            other = str(belongs[0].get("folder", "")) or "no folder"
            raise CheckpointError(
                f"the checkpoint of {folder}, at step {record.step} of run {record.run_id}, was replaced by one that "
                f"belongs to {other}; pass a folder whose checkpoint still exists (nothing was changed)"
            )
        return place, record  # `infinity.offload` reports which checkpoints exist

    @classmethod
    def newest(
        cls, place: str | os.PathLike[str], prefix: str, settings: Config, ranks: Ranks, *, optional: bool = False
    ) -> tuple[Path, Record] | None:
        """Return the newest folder whose checkpoint exists, and its record, or None if there are no folders.

        A warning lists newer folders. All ranks must call this method together, with the same arguments. See
        `numbered_folders` and `of_checkpoint`.

        Args:
            place: folder that contains the folders.
            prefix: beginning of their names.
            settings: settings of the run.
            ranks: ranks of the run.
            optional: whether to return None also if the first checkpoint of every folder's run was interrupted.

        Raises:
            CheckpointError: if none of the folders has a checkpoint, or a checkpoint cannot be read.
        """
        paths = ", ".join(settings.run.resume_paths or settings.storage.paths)
        folders = ranks.on_first("looking for checkpoints", partial(numbered_folders, place, prefix))
        lacking, interrupted = "", optional
        for folder in folders:
            records = ranks.on_first("reading a checkpoint", partial(_records, folder, strict=False))
            interrupted &= bool(records)
            for version, record in records:
                found = _belongs(record, settings, ranks)
                if found is not None and found.get("token") == record.token:
                    return version, record
                _, seen, every = _held(record, settings, ranks)
                lacking = lacking or problems(every, settings.run.resume_replica)
                interrupted &= never_complete(seen, ranks.world_size)
            if ranks.rank == 0:
                _log.warning("%s is ignored, because its infinity checkpoint is not in %s", folder, paths)
        if folders and not interrupted:
            raise CheckpointError(
                f"nothing to resume: no folder in {os.fspath(place)!r} refers to a checkpoint in {paths}; set "
                f"run.resume_paths to the paths of the run, or remove the folders to start a new run{lacking}"
            )
        return None

    def resumed(self, settings: Config) -> Config:
        """Return settings that resume a run from the checkpoint."""
        return settings.with_values(**{"run.resume": self.run_id, "run.resume_step": self.step})


class Checkpoints:
    """Saves folders and checkpoints. After an interruption at any point, there is still a folder with its checkpoint.

    If a folder is saved again, its previous version is kept until the new checkpoint exists. See [Note: rewriting a
    folder].
    """

    def __init__(self, paged: PagedOptimizer, how: str) -> None:
        """Determine the folder from which the run has resumed, if any.

        Args:
            paged: optimizer of the run.
            how: instruction for resuming from a folder, for error messages. It contains ``{}`` in place of the folder.
        """
        self._paged, self._how = paged, how
        found = paged.resumed_extra.get(_KEY)
        belongs = found if isinstance(found, dict) else {}
        # Record of the folder that the run has resumed from or saved last.
        self._token, self._folder = str(belongs.get("token", "")), str(belongs.get("folder", ""))
        self._step = paged.steps  # step of that checkpoint

    def save(
        self, what: str, folder: Path | None, write: Callable[[], Path], prefer: Callable[[], Sequence[int]] = tuple
    ) -> Path:
        """Let a framework write its folder, and then save a checkpoint. All ranks must call this method together.

        Args:
            what: name of the operation, for messages.
            folder: folder to write, or None if the framework creates a new one.
            write: function that writes the files of this rank and returns the folder.
            prefer: function that returns the steps of checkpoints to keep instead of newer ones. It is called after
                `write`.

        Raises:
            InfinityError: if gradients are pending (call this method after `step`), or another rank failed.
            StorageError, OSError: if a drive reports an error. The previous checkpoint stays intact.
        """
        self._paged.check_between(what)
        ranks, run = self._paged.run.ranks, self._paged.run
        # If two folders are saved at the same step, the second checkpoint replaces the first and belongs to both.
        again = bool(self._token) and self._step == self._paged.steps
        token = self._token if again else ranks.agree(secrets.token_hex(16))
        if folder is not None:
            self._finish_rewrite(what, folder)
            ranks.on_first(what, partial(_set_aside, folder))
        folder = ranks.together(what, write)
        record = Record(run.folder.run_id, self._paged.steps, token) if ranks.rank == 0 else None
        ranks.together(what, partial(_make_durable, folder, record))
        self._paged.save_checkpoint({_KEY: {"token": token, "folder": os.path.abspath(folder)}}, prefer=prefer())
        self._token, self._folder, self._step = token, os.path.abspath(folder), self._paged.steps
        self._finish_rewrite(what, folder)
        return folder

    def remove_others(self, folders: Sequence[Path]) -> None:
        """Remove the given folders that belong to this run, but whose checkpoints no longer exist.

        The same applies to previous versions, which remain if rewriting a folder was interrupted. All ranks must call
        this method together.
        """
        run = self._paged.run

        def remove() -> None:
            for folder in folders:
                records = dict(_records(folder, strict=False))
                for place in (folder, before(folder)):
                    record = records.get(place)
                    if record is None:  # without a record, the folder belongs to no run
                        if (place / RECORD).exists():
                            _log.warning("%s is not removed, because its %s cannot be read", place, RECORD)
                    elif record.run_id == run.folder.run_id and record.step not in run.store.checkpoints:
                        shutil.rmtree(place, ignore_errors=True)

        run.ranks.on_first("removing checkpoints", remove)

    def suspend(self) -> Config:
        """Save a checkpoint of the current state and close the run. Return settings that resume it.

        All ranks must call this method together.

        Raises:
            Exception: any exception that `save_checkpoint` raises. In that case, the run stays open.
        """
        paged, again = self._paged, bool(self._token) and self._step == self._paged.steps
        # A folder of the same step keeps its checkpoint.
        paged.save_checkpoint({_KEY: {"token": self._token, "folder": self._folder}} if again else None)
        paged.suspend()
        return Record(paged.run.folder.run_id, paged.steps, "").resumed(paged.run.settings)

    def export(self, folder: Path, **named: Any) -> list[Path]:
        """Write weights with `PagedOptimizer.save_pretrained`, and replace earlier weights in the folder.

        Other files in the folder are kept. All ranks must call this method together.

        Args:
            folder: new folder, or folder with earlier weights.
            named: additional arguments for `save_pretrained`.

        Returns:
            Paths of the files, on every rank.

        Raises:
            Exception: any exception that `save_pretrained` raises. In that case, the folder is unchanged.
        """
        what, ranks, apart = "save_pretrained", self._paged.run.ranks, folder / APART
        self._finish_rewrite(what, folder)
        if not ranks.on_first(what, lambda: folder.is_dir() and any(folder.iterdir())):
            return self._paged.save_pretrained(folder, **named)
        ranks.on_first(what, partial(finish_export, folder))
        written = self._paged.save_pretrained(apart, **named)
        ranks.on_first(what, partial(move_export, folder))
        return [folder / file.name for file in written]

    def check(self, folder: Path) -> Path:
        """Check that the run is at the step of a saved folder. All ranks must call this method together.

        Returns:
            The folder to load: the folder itself, or the previous version if rewriting the folder was interrupted.

        Raises:
            ConfigError: if `save` did not write the folder.
            CheckpointError: if the run did not resume from its checkpoint, or has trained since. The message states
                the fix.
        """
        ranks = self._paged.run.ranks
        there = ranks.on_first("reading the checkpoint", partial(_records, folder))
        for place, record in there:
            if record.token == self._token and record.step == self._paged.steps:
                return place
        record = there[0][1]
        after = f", after {self._folder}" if self._folder else ""
        raise CheckpointError(
            f"{folder} belongs to step {record.step} of run {record.run_id}, but this run is at step "
            f"{self._paged.steps}{after}; weights and optimizer are only restored when a run starts: "
            f"{self._how.format(repr(str(folder)))}; to keep older folders usable, set run.retained_checkpoints"
        )

    def has_record(self, folder: Path) -> bool:
        """Return whether `save` wrote a folder. All ranks must call this method together."""
        return self._paged.run.ranks.on_first(
            "reading the checkpoint", lambda: any((place / RECORD).exists() for place in (folder, before(folder)))
        )

    def _finish_rewrite(self, what: str, folder: Path) -> None:
        """Finish an interrupted rewrite of a folder: keep the version whose checkpoint exists."""
        ranks, settings = self._paged.run.ranks, self._paged.run.settings
        if not ranks.agree(before(folder).is_dir()):
            return
        there = ranks.on_first(what, partial(_records, folder, strict=False))
        belongs = [(_belongs(record, settings, ranks) or {}).get("token") == record.token for _, record in there]
        good = [place for (place, _), found in zip(there, belongs, strict=True) if found]

        def finish_rewrite() -> None:
            lost = not folder.is_dir() or (folder not in good and bool(good))
            (put_back if lost else finish)(folder)

        ranks.on_first(what, finish_rewrite)


def numbered_folders(folder: str | os.PathLike[str], prefix: str) -> list[Path]:
    """Return the folders in `folder` that are named `prefix` and a number, the highest number first.

    This includes a folder of which only the previous version exists, because rewriting it was interrupted.
    """
    names = (child.name for child in (Path(folder).iterdir() if os.path.isdir(folder) else ()) if child.is_dir())
    found = (re.fullmatch(rf"(\.)?({prefix}(\d+))(?(1)\.before)", name) for name in names)
    numbers = {match[2]: int(match[3]) for match in found if match is not None}
    return [Path(folder, name) for name in sorted(numbers, key=lambda name: (numbers[name], name), reverse=True)]


def _records(folder: Path, *, strict: bool = True) -> list[tuple[Path, Record]]:
    """Return the records of a folder and its previous version. If `strict`, raise `ConfigError` if there are none."""
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
    """Return the folder reference in the checkpoint to which a record refers, or None without such a checkpoint.

    All ranks must call this function together, because nodes may not see each other's checkpoints.

    Raises:
        CheckpointError: if the checkpoint cannot be read.
        OSError: if a path cannot be read.
    """

    folder, seen, every = _held(record, settings, ranks)
    complete = [checkpoint.name for checkpoint in usable(every, settings.run.resume_replica)]
    if not complete:
        looking = "looking for the checkpoint in the mirror"
        return ranks.on_first(looking, partial(_in_mirror, record, settings)) if settings.run.mirror else None

    def read() -> dict[str, Any] | None:
        mine = [name for name in seen[ranks.rank].published if name.checkpoint == complete[-1]]
        if not mine or ranks.local_rank:
            return None
        found = read_manifest(folder.checkpoints / mine[0].file_name).extra.get(_KEY)
        return found if isinstance(found, dict) else {}

    told = ranks.collect(ranks.together("reading the checkpoint", read))
    return next((found for found in told if found is not None), None)


def _in_mirror(record: Record, settings: Config) -> dict[str, Any] | None:
    """Return the folder reference in the copy of a checkpoint in the mirror, or None without such a copy."""
    mirror, replica = Mirror(settings.run.mirror), settings.run.resume_replica
    copy = mirror.newest(record.step, record.run_id, replica)
    if copy is None:
        return None
    found = mirror.reader(*copy, replica).extra.get(_KEY)
    return found if isinstance(found, dict) else {}


def _held(record: Record, settings: Config, ranks: Ranks) -> tuple[RunFolder, list[Seen], list[HeldCheckpoint]]:
    """Return the folder of a record's run on this node, what each rank sees, and the run's checkpoints of that step.

    All ranks must call this function together.
    """

    def look() -> tuple[RunFolder, Seen]:
        paths = settings.run.resume_paths or settings.storage.paths
        runs, _ = look_for_runs([path for path in paths if os.path.isdir(path)])
        # checkpoints are on the first path
        found = [run.in_order for run in runs if run.run_id == record.run_id and 0 in run.roots]
        folder = RunFolder(record.run_id, found[-1] if found else ())
        return folder, seen_in(folder)

    folder, here = ranks.together("looking for the checkpoint", look)
    seen = ranks.collect(here)
    return folder, seen, [checkpoint for checkpoint in held(seen) if checkpoint.name.step == record.step]


def _set_aside(folder: Path) -> None:
    if (folder / RECORD).exists():
        set_aside(folder)


def _make_durable(folder: Path, record: Record | None) -> None:
    """Flush the files that all ranks have written to a folder, and write the record of the checkpoint that follows."""
    make_durable(folder)
    if record is not None:
        write_durably(folder / RECORD, json.dumps(record._asdict()).encode())


# Settings of param groups, which a scheduler that is created after resuming would change #


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
