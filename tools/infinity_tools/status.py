"""`infinity status`: ranks, drives, reserved space and stale runs of this node, as known to infinityd."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.cli_errors import Version
from infinity.daemon_client import NodeDaemon
from infinity.errors import ConfigError
from infinity.units import format_size
from infinity_tools.shared_options import Json, Runtime, runtime_folder
from infinity_tools.tables import age, show_whole, table


def status(
    runtime: Runtime = "",
    json: Json = False,
    version: Version = False,
) -> None:
    """Show the ranks, drives, reserved space and stale runs of this node, as known to infinityd."""
    folder = runtime_folder(runtime)
    found = NodeDaemon(folder).ask("state")
    if found is None:
        raise ConfigError(
            f"no infinityd of this user or root is running for {str(folder)!r}; start it, or pass --runtime-dir"
        )
    if json:
        typer.echo(json_format.dumps(found))
        return
    console = Console(highlight=False)
    node = found["node"]
    failing = [name for name, well in node["collectors"].items() if not well]
    console.print(
        f"[bold]infinityd {node['version']}[/], process {node['pid']}, up for {age(node['started'])}, "
        f"metrics on port {node['metrics_port']}"
        + (f", [red]failed to collect {', '.join(failing)}[/]" if failing else ""),
        soft_wrap=True,
    )
    for one in _tables(found):
        if one.row_count:
            show_whole(console, one)
        else:
            console.print(f"no {one.title}")
    if omitted := found["omitted_runs"]:
        console.print(f"{omitted} more run{'s' if omitted > 1 else ''} not shown")


def _tables(found: Mapping[str, Any]) -> tuple[Table, ...]:
    return _ranks(found), _drives(found), _reservations(found), _stale(found)


def _ranks(found: Mapping[str, Any]) -> Table:
    rows = (
        (
            run["id"],
            run["name"],
            run["user"],
            f"{rank['rank']} of {run['world_size']}",
            rank["status"],
            f"{rank['steps']:.0f}",
            str(rank["pid"]),
        )
        for run in found["runs"]
        for rank in run["ranks"]
    )
    return table("ranks", ("run", "name", "user", "rank", "", ">steps", ">process"), rows)


def _drives(found: Mapping[str, Any]) -> Table:
    headings = ("drive", ">free", ">read GB/s", ">write", ">mixed", ">measured", ">worn", ">days left", "folders")
    return table("drives", headings, (row for one in found["drives"] for row in _drive(one)))


def _drive(one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    if "error" in one:
        yield "?", *[""] * 7, f"{one['name']}: {one['error']}"
        return
    profile, wear = one.get("profile", {}), one.get("wear", {})
    speeds = (f"{profile[load] / 1e9:.2f}" if profile.get(load) else "-" for load in ("read", "write", "mixed"))
    measured = f"{age(profile['measured'])} ago" if profile else "never"
    worn = f"{100 * wear['ratio']:.0f} %" if "ratio" in wear else "-"
    days = f"{wear['days']:.0f}" if "days" in wear else "-"
    first, *others = one["paths"]
    yield one["name"], format_size(one["free"]), *speeds, measured, worn, days, first
    yield from ((*[""] * 8, folder) for folder in others)


def _reservations(found: Mapping[str, Any]) -> Table:
    rows = (
        (one["run_id"], one["user"], one["device"], format_size(one["bytes"]), str(one["pid"]), one["path"])
        for one in found["reservations"]
    )
    return table("reservations", ("run", "user", "drive", ">bytes", ">process", "folder"), rows)


def _stale(found: Mapping[str, Any]) -> Table:
    rows = (row for one in found["stale_runs"] for row in _stale_run(one))
    return table("stale runs", ("run", ">bytes", "", ">changed", "folders"), rows)


def _stale_run(one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    state = "may have checkpoints" if one["checkpointed"] else "no checkpoint"
    if not one["complete"]:
        state += ", has folders elsewhere"
    first, *others = one["folders"]
    yield one["id"], format_size(one["bytes"]), state, f"{age(one['changed'])} ago", first
    yield from (("", "", "", "", folder) for folder in others)
