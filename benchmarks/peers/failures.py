"""Failures that are injected into a training system. Each function returns a one-line description of the outcome."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.live import SAVES, Live, SystemFailedError, clear

Start = Callable[..., Any]
"""Function that starts the system with a number of ranks and `resume=`; returns a context that yields a `Live`."""
SAVED, END = 3, 6
"""Number of steps before the save, and at the end of the comparison."""
_SHOWN = 300
_PLACES = 64


def killed(start: Start, work: Path, tokens: int, seq: int) -> str:
    """Kill the system after a save and resume."""
    wanted = _undisturbed(start, tokens, seq)
    return _again(lambda: start(resume=True), wanted, tokens, seq)


def flipped(start: Start, work: Path, tokens: int, seq: int) -> str:
    """Overwrite 4 KiB at each of 64 evenly spaced offsets in the files of the state during training."""
    wanted = _undisturbed(start, tokens, seq)

    def damage(system: Live) -> None:
        files = sorted(file for file in work.rglob("*") if file.is_file() and SAVES not in file.parts)
        sizes = [file.stat().st_size for file in files]
        for number in range(_PLACES):
            at = number * sum(sizes) // _PLACES
            for file, size in zip(files, sizes, strict=True):
                if at < size:
                    with file.open("r+b") as opened:
                        opened.seek(at)
                        opened.write(os.urandom(min(4096, size - at)))
                        os.fsync(opened.fileno())
                    break
                at -= size

    return _disturbed(start, work, damage, wanted, tokens, seq)


def cut_short(start: Start, work: Path, tokens: int, seq: int) -> str:
    """Limit file sizes to 1 MiB, so that writes beyond it fail as with a quota."""
    wanted = _undisturbed(start, tokens, seq)

    def limit(system: Live) -> None:
        for pid in system.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    return _disturbed(start, work, limit, wanted, tokens, seq)


def second_job(start: Start, work: Path, tokens: int, seq: int) -> str:
    """Start a second job on the same folder while the first one trains."""
    wanted = _undisturbed(start, tokens, seq)
    found = []

    def begin_another(system: Live) -> None:
        try:
            with start() as other:
                other.steps(0, 1, tokens, seq)
            found.append("the second job trains")
        except SystemFailedError as error:
            found.append(f"the second job fails: {_short(error)}")

    first = _disturbed(start, work, begin_another, wanted, tokens, seq)
    return "; ".join([*found, f"the first job {first}"])


def other_ranks(start: Start, work: Path, tokens: int, seq: int) -> str:
    """Resume a save of one rank on two ranks."""
    _undisturbed(start, tokens, seq)
    try:
        with start(2, resume=True) as system:
            system.steps(SAVED, END - SAVED, tokens, seq)
    except SystemFailedError as error:
        return f"fails: {_short(error)}"
    return "continues"


def _undisturbed(start: Start, tokens: int, seq: int) -> list[float]:
    """Train, save, continue, and kill the system; return the losses after the save."""
    with start() as system:
        system.steps(0, SAVED, tokens, seq)
        system.save()
        return _losses(system, tokens, seq)


def _disturbed(
    start: Start, work: Path, disturb: Callable[[Live], None], wanted: list[float], tokens: int, seq: int
) -> str:
    """Repeat the undisturbed run in an empty folder, with a failure after the save; return the outcome."""
    clear(work)
    try:
        with start() as system:
            system.steps(0, SAVED, tokens, seq)
            system.save()
            disturb(system)
            found = _losses(system, tokens, seq)
    except SystemFailedError as error:
        return f"fails: {_short(error)}"
    return _compared(found, wanted)


def _again(start: Callable[[], Any], wanted: list[float], tokens: int, seq: int) -> str:
    try:
        with start() as system:
            found = _losses(system, tokens, seq)
    except SystemFailedError as error:
        return f"fails: {_short(error)}"
    return _compared(found, wanted)


def _losses(system: Live, tokens: int, seq: int) -> list[float]:
    return [step["loss"] for step in system.steps(SAVED, END - SAVED, tokens, seq)["steps"]]


def _compared(found: list[float], wanted: list[float]) -> str:
    if found == wanted:
        return "continues with the same losses"
    return f"continues without an error, with other losses: {found[-1]:.6g} instead of {wanted[-1]:.6g}"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN]


FAILURES: dict[str, Callable[[Start, Path, int, int], str]] = {
    "killed with -9, started again": killed,
    "64 places of its files overwritten": flipped,
    "writes cut short": cut_short,
    "a second job on the folder": second_job,
    "another number of ranks": other_ranks,
}
