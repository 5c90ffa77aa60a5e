"""Command `infinity doctor`."""

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
        typer.Argument(help="Folders for the state, as in storage.paths. [default: the current folder]"),
    ] = None,
    runtime: Annotated[
        str,
        typer.Option("--runtime-dir", help="Runtime folder of the daemon. [default: as telemetry.runtime_dir]"),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print Markdown for a bug report, without host and user names.")
    ] = False,
    version: Version = False,
) -> None:
    """Check whether this machine is ready for infinity, and suggest fixes.

    Checks software, processor, memory, limits, folders, node and accelerator. Each check reports *ok*, *note* (worth
    knowing), *warning* (training works, but more slowly or not in every case) or *problem* (training does not work),
    with a suggested fix. The checks write small temporary files to the folders and change nothing else.

    `infinity doctor /nvme0/run /nvme1/run`

    Exit status: 0 without warnings, 1 with a warning, 2 with a problem or an invalid command line.
    """
    if json and report:
        raise ConfigError("--json and --report are mutually exclusive; pass one of them")
    paths = folders or ["."]
    _check_paths(paths)
    world = World.of(paths, runtime_dir(replace(TelemetryConfig(), runtime_dir=runtime)))
    found: list[Finding] = []
    console = Console(highlight=False)
    talk = not (json or report)
    if talk and not folders:
        console.print("Checking the current folder, because no folder was given.")
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


def _check_paths(paths: Sequence[str]) -> None:
    """Reject paths that no run accepts and no check can be about."""
    for path in paths:
        if "\0" in path:
            raise ConfigError(f"{path!r} contains a zero byte, which is not allowed in a path")
    seen: dict[Path, str] = {}
    for path in paths:
        try:
            where = Path(path).resolve()
        except (OSError, RuntimeError):  # a link to itself, which the folder check reports
            continue
        if where in seen:
            raise ConfigError(f"{seen[where]!r} and {path!r} are the same folder; name it once")
        seen[where] = path


def _next(parts: Iterator[Part], talk: bool) -> Part | None:
    """Return the next part, or None. A terminal shows a status line in the meantime."""
    console = Console(stderr=True)
    if not (talk and console.is_terminal):
        return next(parts, None)
    with console.status("checking"):  # ends before the part is printed, which goes to the other stream
        return next(parts, None)
