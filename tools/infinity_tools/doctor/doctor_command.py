"""The command `infinity doctor`."""

from __future__ import annotations

import json as json_format
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version
from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity_tools.doctor.control_groups import Part, look
from infinity_tools.doctor.finding import Finding, Status, worst
from infinity_tools.doctor.show import shown, summary
from infinity_tools.doctor.world import World

_EXIT = {Status.OK: 0, Status.NOTE: 0, Status.WARNING: 1, Status.PROBLEM: 2}


def doctor(
    folders: Annotated[
        list[str] | None,
        typer.Argument(help="Folders that the state is to lie in, as in storage.paths. [default: the current folder]"),
    ] = None,
    runtime: Annotated[
        str, typer.Option("--runtime-dir", help="The daemon's runtime folder. [default: as telemetry.runtime_dir]")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print Markdown for a bug report, without names of host and user.")
    ] = False,
    version: Version = False,
) -> None:
    """Say what this machine can do for infinity, and why not more.

    Looks at software, processor, memory, limits, folders, node and accelerator. Each check says *ok*, *note* (worth to
    know), *warning* (training works, but slower or not in every case) or *problem* (training cannot work), and what to
    do about it. It writes small files into the folders, which are gone afterwards, and changes nothing.

    `infinity doctor /nvme0/run /nvme1/run`

    Exit status: 0 if nothing is worse than a note, 1 with a warning, 2 with a problem or a wrong command line.
    """
    if json and report:
        raise ConfigError("--json and --report are two forms of one answer; give one of them")
    paths = folders or ["."]
    _refuse_twice(paths)
    world = World.of(paths, runtime_dir(replace(TelemetryConfig(), runtime_dir=runtime)))
    found: list[Finding] = []
    console = Console(highlight=False)
    talk = not (json or report)
    if talk and not folders:
        console.print("Folders: the current one, as none is named.")
    parts = look(world)
    while part := _next(parts, talk):
        found += part[1]
        if talk:
            console.print(shown(*part))
    if json:
        typer.echo(json_format.dumps([{**asdict(one), "folder": one.folder or None} for one in found], indent=2))
    elif report:
        from infinity_tools.doctor.doctor_report import report_of

        typer.echo(report_of(found, world), nl=False)
    else:
        console.print(summary(Counter(one.status for one in found)))
    raise typer.Exit(_EXIT[worst(found)])


def _refuse_twice(paths: Sequence[str]) -> None:
    """Refuse what no run takes, and no check can be about."""
    for path in paths:
        if "\0" in path:
            raise ConfigError(f"{path!r} has a zero byte, which no name has")
    seen: dict[Path, str] = {}
    for path in paths:
        try:
            where = Path(path).resolve()
        except (OSError, RuntimeError):  # a link to itself: a check says so
            continue
        if where in seen:
            raise ConfigError(f"{seen[where]!r} and {path!r} are the same folder; name it once")
        seen[where] = path


def _next(parts: Iterator[Part], talk: bool) -> Part | None:
    """Return the next part, or None; a terminal shows meanwhile that there is more to come."""
    console = Console(stderr=True)
    if not (talk and console.is_terminal):
        return next(parts, None)
    with console.status("looking"):  # ends before the part is printed, which goes to the other stream
        return next(parts, None)
