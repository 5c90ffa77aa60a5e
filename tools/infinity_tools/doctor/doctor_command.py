"""The command `infinity doctor`."""

from __future__ import annotations

import json as json_format
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.console import Group as RenderableGroup
from rich.table import Table
from rich.text import Text

from infinity.cli_errors import Version
from infinity.errors import ConfigError
from infinity_tools.doctor.accelerator import ACCELERATOR
from infinity_tools.doctor.daemon_check import NODE
from infinity_tools.doctor.finding import Finding, Group, Status, worst
from infinity_tools.doctor.memory import MEMORY
from infinity_tools.doctor.software import ENGINE, PROCESSOR, SOFTWARE
from infinity_tools.doctor.storage import STORAGE
from infinity_tools.doctor.world import World
from infinity_tools.shared_options import Json, Runtime, runtime_folder

_EXIT = {Status.OK: 0, Status.NOTE: 0, Status.WARNING: 1, Status.PROBLEM: 2}
STYLES: Final[Mapping[Status, str]] = {
    Status.OK: "green",
    Status.NOTE: "cyan",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
}
_NAMES: Final = 17  # columns; the length of the longest check name
GROUPS: Final[tuple[Group, ...]] = (SOFTWARE, PROCESSOR, MEMORY, ENGINE, STORAGE, NODE, ACCELERATOR)
"""All checks in display order. Slow checks come last."""

Part = tuple[str, list[Finding]]
"""Title of a part of the output, and its findings."""


def doctor(
    folders: Annotated[
        list[str] | None,
        typer.Argument(help="Folders in which runs store their state (storage.paths). [default: current folder]"),
    ] = None,
    runtime: Runtime = "",
    json: Json = False,
    version: Version = False,
) -> None:
    """Check whether this machine is ready for infinity, and suggest fixes.

    Checks software, processor, memory, limits, folders, node and accelerator. The status of a check is *ok*, *note*
    (worth knowing), *warning* (training works, but more slowly or not in every case) or *problem* (training does not
    work). If it is not *ok*, a fix is suggested. The checks write small temporary files to the folders and change
    nothing else.

    `infinity doctor /nvme0/run /nvme1/run`

    Exit status: 0 if there are no warnings or problems, 1 for warnings, 2 for problems or an invalid command line.
    """
    paths = folders or ["."]
    _check_paths(paths)
    world = World.of(paths, runtime_folder(runtime))
    found: list[Finding] = []
    console = Console(highlight=False)
    if not json and not folders:
        console.print("No folder was given; checking the current folder.")
    parts = look(world)
    while part := _next(parts, silent=json):
        found += part[1]
        if not json:
            console.print(shown(*part))
    if json:
        typer.echo(json_format.dumps([{**asdict(one), "folder": one.folder or None} for one in found], indent=2))
    else:
        console.print(summary(Counter(one.status for one in found)))
    raise typer.Exit(_EXIT[worst(found)])


def _check_paths(paths: Sequence[str]) -> None:
    for path in paths:
        if "\0" in path:
            raise ConfigError(f"{path!r} contains a null byte, which is not allowed in a path")
    seen: dict[Path, str] = {}
    for path in paths:
        try:
            where = Path(path).resolve()
        except (OSError, RuntimeError):  # for example, a circular link, which the check `folder` reports
            continue
        if where in seen:
            raise ConfigError(f"{seen[where]!r} and {path!r} are the same folder; pass it only once")
        seen[where] = path


def _next(parts: Iterator[Part], *, silent: bool) -> Part | None:
    """Return the next part, or None. Show a status line on a terminal until it is available."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        return next(parts, None)
    with console.status("checking"):  # the status line ends before the part is printed to stdout
        return next(parts, None)


def look(world: World) -> Iterator[Part]:
    """Run all checks, and yield each part as soon as its checks have finished."""
    for group in GROUPS:
        yield from group.look(world)


def shown(title: str, findings: Sequence[Finding]) -> RenderableGroup:
    """Return findings as lines with status, check name and observed state, each followed by a fix if there is one."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(width=max(map(len, Status)), no_wrap=True)
    lines.add_column(width=_NAMES, no_wrap=True)
    lines.add_column(overflow="fold")
    for one in findings:
        lines.add_row(
            Text(one.status, STYLES[one.status]), Text(one.check), Text(one.value)
        )  # Text does not interpret markup
        if one.fix:
            lines.add_row("", "", Text(f"fix: {one.fix}", "dim"))
    return RenderableGroup("", Text(title, "bold", overflow="fold"), lines)


def summary(counts: Mapping[Status, int]) -> RenderableGroup:
    """Return the last line of the output: the number of findings by status, and their consequence."""
    words = [
        f"{counts[status]} {status}{'s' if counts[status] > 1 else ''}"
        for status in (Status.PROBLEM, Status.WARNING, Status.NOTE)
        if counts.get(status)
    ]
    if counts.get(Status.PROBLEM):
        means, style = "training does not work until the problems are fixed", STYLES[Status.PROBLEM]
    elif counts.get(Status.WARNING):
        means, style = "training works, but more slowly or not in every case", STYLES[Status.WARNING]
    else:
        means, style = "training works", STYLES[Status.OK]
    return RenderableGroup("", Text(": ".join([*([", ".join(words)] if words else []), means]), style))
