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
"""Default time limit of a check. A check may hang on a drive or a name server that does not answer."""


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


class Verdict(NamedTuple):
    """Result of a check."""

    status: Status
    value: str
    """Observed state, in words."""
    fix: str = ""
    """Suggested fix if the status is not ok."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a named check."""

    check: str
    """Name of the check."""
    status: Status
    """Severity."""
    value: str
    """Observed state, in words."""
    fix: str = ""
    """Suggested fix; empty if the status is ok."""
    folder: str = ""
    """Checked folder; empty for a check of the machine."""


Of = TypeVar("Of", World, Folder)


@dataclass(frozen=True, kw_only=True)
class Check(Generic[Of]):
    """A check of a machine or of a folder."""

    name: str
    """Name of one to three words; stable across releases."""
    meaning: str
    """Description for docs/reference/doctor.md, in one paragraph."""
    ask: Callable[[Of], Verdict] = field(repr=False)
    """Function that runs the check; may raise any exception."""
    seconds: float = SECONDS
    """Time limit in seconds."""

    def look(self, at: Of) -> Finding:
        """Run the check and return its finding. A failure or a timeout is reported as the finding."""
        answers: list[Verdict] = []

        def body() -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the findings report the same facts
                    answers.append(self.ask(at))
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                answers.append(warning(f"the check failed: {reason}", _REPORT))

        thread = threading.Thread(target=body, name=f"infinity-doctor-{self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        verdict = answers[0] if answers else self._late()
        found = Finding(check=self.name, **verdict._asdict())
        return replace(found, folder=at.path) if isinstance(at, Folder) else found

    def _late(self) -> Verdict:
        return warning(
            f"the check timed out after {self.seconds:.0f} s",
            "a file system, name server or driver may hang; see `dmesg`",
        )


_REPORT = "report this with the output of `infinity doctor --report`"


def check(name: str, seconds: float = SECONDS) -> Callable[[Callable[[Of], Verdict]], Check[Of]]:
    """Turn a function into a check that is described by the function's docstring."""

    def make(ask: Callable[[Of], Verdict]) -> Check[Of]:
        return Check(name=name, meaning=" ".join((ask.__doc__ or "").split()), ask=ask, seconds=seconds)

    return make


def ok(value: str) -> Verdict:
    """Return a verdict that needs no action."""
    return Verdict(Status.OK, value)


def note(value: str, fix: str) -> Verdict:
    """Return a verdict that is worth knowing."""
    return Verdict(Status.NOTE, value, fix)


def warning(value: str, fix: str) -> Verdict:
    """Return a verdict for a state in which training works, but more slowly or not in every case."""
    return Verdict(Status.WARNING, value, fix)


def problem(value: str, fix: str) -> Verdict:
    """Return a verdict for a state in which training does not work."""
    return Verdict(Status.PROBLEM, value, fix)


class Group(NamedTuple):
    """Checks that are shown together."""

    title: str
    checks: Sequence[Check[World]]
    of_folders: Sequence[Check[Folder]] = ()
    """Checks of every folder, run before the others. If the first is not ok, the rest is skipped."""

    def look(self, world: World) -> Iterator[tuple[str, list[Finding]]]:
        """Yield the findings in titled parts."""
        for folder in world.folders if self.of_folders else ():
            first, *others = self.of_folders
            found = [first.look(folder)]
            if found[0].status is Status.OK:
                found += [one.look(folder) for one in others]
            yield f"Folder {folder.path}", found
        yield self.title, [one.look(world) for one in self.checks]


def worst(findings: Sequence[Finding]) -> Status:
    """Return the highest severity."""
    order = list(Status)
    return max((found.status for found in findings), key=order.index, default=Status.OK)
