"""`trials.json`, a journal of all trials that lets an interrupted search be resumed.

The file describes the workload and the machine, and lists the trials. A resumed search makes the same decisions again
and takes outcomes from the journal without delay. At the first different decision, the rest of the journal is dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.untrusted_files import read_regular, replacing
from infinity_tools.tune.outcome import Outcome, Role
from infinity_tools.tune.search_space import Candidate

_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A completed trial."""

    role: Role
    candidate: dict[str, Any]
    outcome: Outcome
    at: float
    """Seconds since the search began, without interruptions."""


def check_file(file: Path, *, resume: bool) -> None:
    """Check that a journal exists if `resume` is set, and does not exist otherwise. Raises `ConfigError`."""
    if resume and not file.exists():
        raise ConfigError(f"--resume: {file} does not exist; remove --resume to start a new search")
    if not resume and os.path.lexists(file):
        raise ConfigError(
            f"--out {file.parent} contains the trials of an earlier search; pass --resume to continue it, or choose "
            "another folder"
        )


class Journal:
    """Journal file and clock of a search. The clock stops while the search is interrupted."""

    def __init__(self, file: Path, about: Mapping[str, Any], began: float, *, resume: bool) -> None:
        """Start or read a journal. The file is written after each trial.

        Args:
            file: Path of the journal.
            about: Description of workload and machine. A journal with a different description cannot be resumed.
            began: Start of the search on the `time.monotonic` clock. A resumed search continues from its last trial.
            resume: Whether to resume the journal in `file`.

        Raises:
            ConfigError: if `resume` is set and the journal is unreadable or belongs to a different search.
        """
        self._file, self._about = file, json.loads(json.dumps(about))
        self._entries: list[Entry] = []
        self._ahead = deque(_read(file, self._about) if resume else ())
        self._offset, self._began = 0.0, began

    def clock(self) -> float:
        """Return the seconds since the search began."""
        return self._offset if self._ahead else self._offset + time.monotonic() - self._began

    def answer(self, role: Role, candidate: Candidate) -> Outcome | None:
        """Return the recorded outcome of this trial, or None if the trial must be run."""
        if not self._ahead:
            return None
        entry = self._ahead.popleft()
        self._began = time.monotonic()
        if (entry.role, entry.candidate) != (role, dict(candidate)):
            self._ahead.clear()
            return None
        self._entries.append(entry)
        self._offset = entry.at
        return entry.outcome

    def add(self, role: Role, candidate: Candidate, outcome: Outcome) -> None:
        """Record a trial. Raises `ConfigError` if the file cannot be written."""
        self._entries.append(Entry(role=role, candidate=dict(candidate), outcome=outcome, at=self.clock()))
        tree = {"search": self._about, "trials": [asdict(entry) for entry in self._entries]}
        try:
            with replacing(self._file, 0o666) as file:
                file.write((json.dumps(tree, indent=1) + "\n").encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._file}: {error.strerror}; choose another folder with --out"
            ) from error


def _read(file: Path, about: Mapping[str, Any]) -> list[Entry]:
    """Return the trials in a journal. Raises `ConfigError` if its description differs from `about`."""
    try:
        tree = json.loads(read_regular(file, _LIMIT))
        before = dict(tree["search"])
        entries = [Entry(**{**row, "outcome": Outcome(**row["outcome"])}) for row in tree["trials"]]
    except OSError as error:
        raise ConfigError(f"--resume: cannot read {file}: {error.strerror}; remove --resume") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"--resume: {file} is not a journal of `infinity tune`; remove --resume and choose another --out"
        ) from error
    if other := [
        f"{name} {about.get(name)} (was {before[name]})" for name in before if before[name] != about.get(name)
    ]:
        raise ConfigError(
            f"--resume: {file} belongs to a different search: {', '.join(other)}; use the same options, or remove "
            "--resume and choose another --out"
        )
    return entries
