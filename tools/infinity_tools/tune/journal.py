"""`trials.jsonl`, a journal of all trials that lets an interrupted search be resumed.

The first line describes the workload and the machine; every other line is a trial. A resumed search makes the same
decisions again and takes outcomes from the journal without delay. At the first different decision, the rest of the
journal is dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.untrusted_files import read_regular, replacing
from infinity_tools.tune.outcome import Outcome, Role
from infinity_tools.tune.search_space import Candidate

_FORMAT = 1
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
        """Start or read a journal. The file is written after the first trial.

        Args:
            file: Path of the journal.
            about: Description of workload and machine. A journal with a different description cannot be resumed.
            began: Start of the search on the `time.monotonic` clock. A resumed search continues from its last trial.
            resume: Whether to resume the journal in `file`.

        Raises:
            ConfigError: if a journal exists and `resume` is not set; or if `resume` is set and the journal is missing,
                unreadable or belongs to a different search.
        """
        self._file, self._about = file, dict(about)
        check_file(file, resume=resume)
        entries = _read(file, self._about) if resume else []
        self._entries: list[Entry] = []
        self._ahead = deque(entries)
        self.found = len(entries)
        """Number of trials in the journal that was read."""
        self._is_whole = False  # whether the file matches `_entries`
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
            self._write()
            return None
        self._entries.append(entry)
        self._offset = entry.at
        return entry.outcome

    def add(self, role: Role, candidate: Candidate, outcome: Outcome) -> None:
        """Record a trial. Raises `ConfigError` if the file cannot be written."""
        self._entries.append(Entry(role=role, candidate=dict(candidate), outcome=outcome, at=self.clock()))
        if not self._is_whole:
            self._write()
            return
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(_line(self._entries[-1]))
        except OSError as error:
            raise _unwritable(self._file, error) from error

    def _write(self) -> None:
        try:
            with replacing(self._file, 0o666) as file:
                file.write((json.dumps({"format": _FORMAT, **self._about}) + "\n").encode())
                for entry in self._entries:
                    file.write(_line(entry).encode())
            self._is_whole = True
        except OSError as error:
            raise _unwritable(self._file, error) from error


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {file}: {error.strerror}; choose another folder with --out")


def _read(file: Path, about: Mapping[str, Any]) -> list[Entry]:
    """Return the trials in a journal. Raises `ConfigError` if its description differs from `about`."""
    try:
        lines = read_regular(file, _LIMIT).decode().splitlines()
    except OSError as error:
        raise ConfigError(f"--resume: cannot read {file}: {error.strerror}; remove --resume") from error
    except ValueError as error:
        raise ConfigError(f"--resume: {file} is not a journal of `infinity tune`: {error}") from error
    try:
        head = json.loads(lines[0])
    except (ValueError, LookupError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.pop("format", None) != _FORMAT:
        raise ConfigError(f"--resume: {file} is not a journal of `infinity tune`: its first line is not a header")
    here = json.loads(json.dumps(about))
    if other := [f"{name} {here.get(name)} (was {head[name]})" for name in head if head[name] != here.get(name)]:
        raise ConfigError(
            f"--resume: {file} belongs to a different search: {', '.join(other)}; use the same options, or remove "
            "--resume and choose another --out"
        )
    return _entries(lines[1:])


def _entries(lines: Sequence[str]) -> list[Entry]:
    """Return the trials up to the first invalid or truncated line."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            outcome = Outcome(**{**row["outcome"], "samples": tuple(row["outcome"]["samples"])})
            found.append(Entry(role=row["role"], candidate=row["candidate"], outcome=outcome, at=float(row["at"])))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            break
    return found
