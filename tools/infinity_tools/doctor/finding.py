"""What a check is, and what it finds."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from infinity_tools.doctor.world import Folder, World

SECONDS: Final = 10.0
"""After which a check is given up: a drive or a name server that does not answer."""


class Status(StrEnum):
    """How bad it is, the worst last."""

    OK = "ok"
    """Nothing to do."""
    NOTE = "note"
    """Worth to know."""
    WARNING = "warning"
    """Training works, but slower, or not in every case."""
    PROBLEM = "problem"
    """Training cannot work."""


class Verdict(NamedTuple):
    """What a check returns."""

    status: Status
    value: str
    """What there is, in words."""
    fix: str = ""
    """What to do about it, where it is not ok."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict of a check, with its name."""

    check: str
    """Name of the check."""
    status: Status
    """How bad it is."""
    value: str
    """What there is, in words."""
    fix: str = ""
    """What to do about it; empty where it is ok."""
    folder: str = ""
    """Which folder this is about; empty where it is about the machine."""


Of = TypeVar("Of", World, Folder)


@dataclass(frozen=True, kw_only=True)
class Check(Generic[Of]):
    """One question to a machine, or to a folder."""

    name: str
    """Of one to three words, which stays from release to release."""
    meaning: str
    """One paragraph for docs/reference/doctor.md."""
    ask: Callable[[Of], Verdict] = field(repr=False)
    """Answers it; may raise anything."""
    seconds: float = SECONDS
    """How long it may take."""

    def look(self, at: Of) -> Finding:
        """Return what it finds. If it fails, or takes too long, that is the finding, and others go on."""
        answers: list[Verdict] = []

        def body() -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what they say is in the findings
                    answers.append(self.ask(at))
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                answers.append(warning(f"could not be checked: {reason}", _REPORT))

        thread = threading.Thread(target=body, name=f"infinity-doctor-{self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        verdict = answers[0] if answers else self._late()
        found = Finding(check=self.name, **verdict._asdict())
        return replace(found, folder=at.path) if isinstance(at, Folder) else found

    def _late(self) -> Verdict:
        return warning(
            f"could not be checked: no answer within {self.seconds:.0f} s",
            "a file system, name server or driver hangs; see `dmesg`",
        )


_REPORT = "report it, with what `infinity doctor --report` prints"


def check(name: str, seconds: float = SECONDS) -> Callable[[Callable[[Of], Verdict]], Check[Of]]:
    """Make a check of a function, whose docstring says what it means."""

    def make(ask: Callable[[Of], Verdict]) -> Check[Of]:
        return Check(name=name, meaning=" ".join((ask.__doc__ or "").split()), ask=ask, seconds=seconds)

    return make


def ok(value: str) -> Verdict:
    """Nothing to do."""
    return Verdict(Status.OK, value)


def note(value: str, fix: str) -> Verdict:
    """Worth to know."""
    return Verdict(Status.NOTE, value, fix)


def warning(value: str, fix: str) -> Verdict:
    """Training works, but slower, or not in every case."""
    return Verdict(Status.WARNING, value, fix)


def problem(value: str, fix: str) -> Verdict:
    """Training cannot work."""
    return Verdict(Status.PROBLEM, value, fix)


class Group(NamedTuple):
    """Checks that are shown together."""

    title: str
    checks: Sequence[Check[World]]
    of_folders: Sequence[Check[Folder]] = ()
    """Asked of every folder, before the others; where the first is not ok, the rest mean nothing and are left out."""

    def look(self, world: World) -> Iterator[tuple[str, list[Finding]]]:
        """Yield what is found, in parts with a title each."""
        for folder in world.folders if self.of_folders else ():
            first, *others = self.of_folders
            found = [first.look(folder)]
            if found[0].status is Status.OK:
                found += [one.look(folder) for one in others]
            yield f"Folder {folder.path}", found
        yield self.title, [one.look(world) for one in self.checks]


def worst(findings: Sequence[Finding]) -> Status:
    """Return how bad the worst is."""
    order = list(Status)
    return max((found.status for found in findings), key=order.index, default=Status.OK)
