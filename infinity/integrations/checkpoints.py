"""Checkpoints of a framework: a folder with what the framework keeps, and the commit that belongs to it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infinity.access import read_regular
from infinity.checkpoint.durable import sync_file, sync_folder, write_durably
from infinity.config import Config
from infinity.errors import CommitError, ConfigError
from infinity.run.optimizer import PagedOptimizer
from infinity.units import MIB

RECORD = "infinity.json"
"""In a folder: which commit belongs to it."""
_KEY = "checkpoint"  # in the `extra` of a commit: which folder belongs to it


class Record(NamedTuple):
    """What a folder says of its commit."""

    run_id: str
    step: int
    token: str
    """Random; the commit has the same."""

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read that of a folder. Raises `ConfigError` where there is none."""
        try:
            found = json.loads(read_regular(folder / RECORD, MIB))
            return cls(str(found["run_id"]), int(found["step"]), str(found["token"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{folder / RECORD} cannot be read: {reason}; name a folder that was saved with the state on NVMe"
            ) from error

    def resumed(self, settings: Config) -> Config:
        """Return settings with which a run goes on from the commit."""
        return replace(settings, run=replace(settings.run, resume=self.run_id, resume_step=self.step))


class Checkpoints:
    """Saves folders and commits so that whenever it is cut off, the commit before and its folder are a pair still."""

    def __init__(self, paged: PagedOptimizer, how: str) -> None:
        """Find which folder the run has gone on from.

        Args:
            how: what resumes from a folder, with ``{}`` for it, for errors.
        """
        self._paged, self._how = paged, how
        found = paged.resumed_extra.get(_KEY)
        belongs = found if isinstance(found, dict) else {}
        # Of the folder whose commit the run has gone on from, or has made last.
        self._token, self._folder = str(belongs.get("token", "")), str(belongs.get("folder", ""))

    def save(self, what: str, write: Callable[[], Path]) -> Path:
        """Let a framework write its folder, and commit; all ranks together.

        Args:
            what: names the call in messages.
            write: writes the files of this rank into a folder, and returns that.

        Raises:
            InfinityError: gradients are pending (call it after `step`), or another rank failed.
            StorageError, OSError: a drive refused; the commit before is intact.
        """
        self._paged.check_between(what)
        ranks, run = self._paged.run.ranks, self._paged.run
        token = ranks.agree(secrets.token_hex(16))
        folder = write()
        record = Record(run.folder.run_id, self._paged.steps, token) if ranks.rank == 0 else None
        ranks.together(what, partial(_make_durable, folder, record))
        self._paged.commit({_KEY: {"token": token, "folder": os.path.abspath(folder)}})
        self._token, self._folder = token, os.path.abspath(folder)
        return folder

    def check(self, folder: Path) -> None:
        """Check that the run is where it was when a folder was saved.

        Raises:
            ConfigError: the folder is none of `save`.
            CommitError: the run has not gone on from its commit, or has trained since; says what to do.
        """
        record = Record.read(folder)
        if record.token != self._token or record.step != self._paged.steps:
            behind = f" behind {self._folder}" if self._folder else ""
            raise CommitError(
                f"{folder} belongs to step {record.step} of run {record.run_id}, and this one is at step "
                f"{self._paged.steps}{behind}: weights and optimizer are taken over when the run begins, "
                f"{self._how.format(repr(str(folder)))}; older folders need run.retained_commits"
            )


def _make_durable(folder: Path, record: Record | None) -> None:
    """Flush what this rank and others have written into a folder, and note the commit to come."""
    for file in folder.iterdir():
        if file.is_file():
            sync_file(file)
    if record is not None:
        write_durably(folder / RECORD, json.dumps(record._asdict()).encode())
    sync_folder(folder)
    sync_folder(folder.resolve().parent)
