"""Checks and their findings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from infinity_tools.doctor.world import Folder, World

SECONDS: Final = 10.0
"""Default time limit of a check, because a drive or a name server may not respond."""


class Status(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    """No action needed."""
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """Training works, but more slowly or not in every case."""
    PROBLEM = "problem"
    """Training does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check."""

    check: str = ""
    """Name of the check, which `Check.look` sets."""
    status: Status
    value: str
    """Description of the observed state."""
    fix: str = ""
    """Suggested fix; empty if the status is ok."""
    folder: str = ""
    """Checked folder; empty if the check is not about a folder."""


def ok(value: str) -> Finding:
    """Return a finding with the status *ok*."""
    return Finding(status=Status.OK, value=value)


def note(value: str, fix: str) -> Finding:
    """Return a finding with the status *note*."""
    return Finding(status=Status.NOTE, value=value, fix=fix)


def warning(value: str, fix: str) -> Finding:
    """Return a finding with the status *warning*."""
    return Finding(status=Status.WARNING, value=value, fix=fix)


def problem(value: str, fix: str) -> Finding:
    """Return a finding with the status *problem*."""
    return Finding(status=Status.PROBLEM, value=value, fix=fix)


Of = TypeVar("Of", World, Folder)


@dataclass(frozen=True, kw_only=True)
class Check(Generic[Of]):
    """Check of the machine or of a folder."""

    name: str
    """Name, one to three words long; stable across releases."""
    meaning: str
    """One-paragraph description for docs/reference/doctor.md."""
    ask: Callable[[Of], Finding] = field(repr=False)
    """Function that runs the check. It may raise any exception."""
    seconds: float = SECONDS
    """Time limit in seconds."""

    def look(self, at: Of) -> Finding:
        """Run the check and return its finding. A failure or timeout of the check is reported as a warning."""
        answers: list[Finding] = []

        def body() -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the findings contain the same information
                    answers.append(self.ask(at))
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                answers.append(warning(f"the check failed: {reason}", _REPORT))

        thread = threading.Thread(target=body, name=f"infinity-doctor-{self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        late = f"the check timed out after {self.seconds:.0f} s"
        found = answers[0] if answers else warning(late, _SLOW)
        return replace(found, check=self.name, folder=at.path if isinstance(at, Folder) else "")


_SLOW = "a file system, a name server or a driver may not be responding; see `dmesg`"
_REPORT = "report this as a bug, with the output of `infinity doctor --json`"


def check(name: str, seconds: float = SECONDS) -> Callable[[Callable[[Of], Finding]], Check[Of]]:
    """Return a decorator that turns a function into a check. The function's docstring is the description of the
    check."""

    def make(ask: Callable[[Of], Finding]) -> Check[Of]:
        return Check(name=name, meaning=" ".join((ask.__doc__ or "").split()), ask=ask, seconds=seconds)

    return make


class Group(NamedTuple):
    """Checks that are displayed together."""

    title: str
    checks: Sequence[Check[World]]
    of_folders: Sequence[Check[Folder]] = ()
    """Checks of each folder, which run first. If the first of them is not ok, the others are skipped for this
    folder."""

    def look(self, world: World) -> Iterator[tuple[str, list[Finding]]]:
        """Run the checks, and yield titles and findings: a part for each folder, then a part for the other checks."""
        for folder in world.folders if self.of_folders else ():
            first, *others = self.of_folders
            found = [first.look(folder)]
            if found[0].status is Status.OK:
                found += [one.look(folder) for one in others]
            yield f"Folder {folder.path}", found
        yield self.title, [one.look(world) for one in self.checks]


def worst(findings: Sequence[Finding]) -> Status:
    """Return the most severe status."""
    return max((found.status for found in findings), key=list(Status).index, default=Status.OK)
