"""`trials.jsonl`: every trial as it ends, so that a search that was interrupted goes on where it was.

The first line says what is tuned where; every other one is a trial. A search that is resumed asks the same questions
again and gets the answers of the journal, in no time, until it asks something else: what follows then is dropped.
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
    """A trial that has ended."""

    role: Role
    candidate: dict[str, Any]
    outcome: Outcome
    at: float
    """Seconds since the search began, without interruptions."""


def check_file(file: Path, *, resume: bool) -> None:
    """Refuse to go on from what is not there, and to write over what is. Raises `ConfigError`."""
    if resume and not file.exists():
        raise ConfigError(f"--resume: there is no {file} to go on from; leave --resume out")
    if not resume and os.path.lexists(file):
        raise ConfigError(
            f"--out {file.parent} has the trials of another search; go on from them with --resume, or name another "
            "folder"
        )


class Journal:
    """The file, and the clock of the search, which stands still while nothing runs."""

    def __init__(self, file: Path, about: Mapping[str, Any], began: float, *, resume: bool) -> None:
        """Begin a journal, or read one. Nothing is written before the first trial has ended.

        Args:
            about: what is tuned where: a journal of something else is not gone on from.
            began: when all this began, of `time.monotonic`; a search that is resumed goes on from its last trial.

        Raises:
            ConfigError: there is one already and it is not to be resumed; or there is none, it cannot be read, or is
                about something else.
        """
        self._file, self._about = file, dict(about)
        check_file(file, resume=resume)
        entries = _read(file, self._about) if resume else []
        self._entries: list[Entry] = []
        self._ahead = deque(entries)
        self.found = len(entries)
        """How many trials there were."""
        self._is_whole = False  # whether the file is what `_entries` are
        self._offset, self._began = 0.0, began

    def clock(self) -> float:
        """Return the seconds since the search began."""
        return self._offset if self._ahead else self._offset + time.monotonic() - self._began

    def answer(self, role: Role, candidate: Candidate) -> Outcome | None:
        """Return what this trial showed when it was made before; None: it has to be made."""
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
        """Keep a trial that has just been made. Raises `ConfigError`: the file cannot be written."""
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
    return ConfigError(f"{file} cannot be written: {error.strerror}; name another folder with --out")


def _read(file: Path, about: Mapping[str, Any]) -> list[Entry]:
    """Return the trials of a journal about the same; a last line that a kill has cut off is none."""
    try:
        lines = read_regular(file, _LIMIT).decode().splitlines()
    except OSError as error:
        raise ConfigError(f"--resume: {file} cannot be read: {error.strerror}; leave --resume out") from error
    except ValueError as error:
        raise ConfigError(f"--resume: {file} is no journal of `infinity tune`: {error}") from error
    try:
        head = json.loads(lines[0])
    except (ValueError, LookupError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.pop("format", None) != _FORMAT:
        raise ConfigError(f"--resume: {file} is no journal of `infinity tune`: its first line is of none")
    here = json.loads(json.dumps(about))
    if other := [f"{name} {here.get(name)} (was {head[name]})" for name in head if head[name] != here.get(name)]:
        raise ConfigError(
            f"--resume: {file} is of another search: {', '.join(other)}; ask for the same, or leave --resume out and "
            "name another --out"
        )
    return _entries(lines[1:])


def _entries(lines: Sequence[str]) -> list[Entry]:
    """Return the trials up to the first line that is none."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            outcome = Outcome(**{**row["outcome"], "samples": tuple(row["outcome"]["samples"])})
            found.append(Entry(role=row["role"], candidate=row["candidate"], outcome=outcome, at=float(row["at"])))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            break
    return found
