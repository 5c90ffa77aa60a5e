"""`infinity store`: list, check and remove the runs on NVMe folders."""

from __future__ import annotations

import json as json_format
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.errors import ConfigError
from infinity.units import format_size
from infinity_tools.failures import failures
from infinity_tools.progress import byte_progress

if TYPE_CHECKING:
    from infinity_tools.runs import BadPage, StoredRun

app = typer.Typer(help="List, check and remove the runs on NVMe folders.", no_args_is_help=True)
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
_PATHS = Annotated[list[Path], typer.Argument(help="The folders of storage.paths, in their order.")]


@app.command()
def ls(paths: _PATHS, json: _JSON = False) -> None:
    """List runs: who has them open, their commits, ranks and bytes on disk."""
    with failures():
        from infinity_tools.runs import stored_runs

        runs = stored_runs(paths)
        if json:
            typer.echo(json_format.dumps([_described(run) for run in runs]))
            return
        console = Console(highlight=False)
        if not runs:
            console.print(f"no runs in {', '.join(map(str, paths))}")
            return
        table = Table("run", "state", "commits", "ranks", "on disk", box=None, header_style="bold", pad_edge=False)
        table.columns[0].no_wrap = table.columns[1].no_wrap = True
        for column in table.columns[3:]:
            column.justify = "right"
        for run in runs:
            state = f"[green]live[/], pid {run.owner.pid}" if run.owner else "ended"
            table.add_row(run.run_id, state, _commits(run), str(run.ranks), format_size(run.nbytes))
        console.print(table)


@app.command()
def verify(
    paths: _PATHS,
    run: Annotated[str, typer.Option(help="Only this run. [default: every run that has ended]")] = "",
    json: _JSON = False,
) -> None:
    """Read every page that a commit names and compare it with its checksum; exit status 1 if one is bad."""
    bad_pages: list[dict[str, Any]] = []
    with failures():
        from infinity_tools import runs as stored

        chosen = _choose(stored.stored_runs(paths), [run] if run else [], paths)
        if not run:
            chosen = [found for found in chosen if found.owner is None]
        console = Console(highlight=False)
        checked = 0
        for found in chosen:
            pages = stored.pages_to_verify(found)
            checked += len(pages)
            with byte_progress(f"verifying {found.run_id}", silent=json) as bar:
                task = bar.add_task("", total=sum(item[2].extent.length for item in pages))
                bad = stored.verify(found, pages, lambda nbytes, bar=bar, task=task: bar.advance(task, nbytes))  # type: ignore[misc]
            bad_pages += [{"run_id": found.run_id, **asdict(page)} for page in bad]
            if not json:
                _report(console, found, len(pages), bad)
        if json:
            typer.echo(
                json_format.dumps({"runs": [found.run_id for found in chosen], "pages": checked, "bad": bad_pages})
            )
        elif not chosen:
            console.print(f"no ended runs in {', '.join(map(str, paths))}")
    raise typer.Exit(1 if bad_pages else 0)


@app.command()
def rm(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="PATH... RUN...", help="Folders, and ids of runs on them."),
    ],
    dead: Annotated[bool, typer.Option("--dead", help="All runs that have ended.")] = False,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="All runs that have ended without a commit.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: _JSON = False,
) -> None:
    """Remove runs that have ended. A live run is refused."""
    with failures():
        from infinity_tools import runs as stored

        # By its form, not by what exists: in a folder of runs, the id of a run is a folder too.
        names = [text for text in arguments if _RUN_ID.fullmatch(text)]
        paths = [Path(text) for text in arguments if text not in names]
        if not paths:
            raise ConfigError("name the folders on which the runs are, as well as the runs")
        if not (names or dead or uncommitted):
            raise ConfigError("name the runs to remove, or --dead for all that have ended")
        found = stored.stored_runs(paths)
        chosen = _choose(found, names, paths) if names else []
        if live := [run for run in chosen if run.owner]:
            raise ConfigError(f"{live[0].owner} is running; nothing is removed")
        for run in found:
            unwanted = dead or (uncommitted and not run.commits)
            if unwanted and run.owner is None and run not in chosen:
                chosen.append(run)
        size = sum(run.nbytes for run in chosen)
        if not json:
            for run in chosen:
                typer.echo(f"{run.run_id}  {format_size(run.nbytes)}  commits: {_commits(run)}")
        if chosen and not yes:
            if json:
                raise ConfigError("--json asks nothing; add --yes")
            typer.confirm(f"remove {_counted(len(chosen), 'run')}, {format_size(size)}?", abort=True)
        for run in chosen:
            stored.remove(run)
        if json:
            typer.echo(json_format.dumps({"removed": [run.run_id for run in chosen], "bytes": size}))
        else:
            typer.echo(f"removed {_counted(len(chosen), 'run')}, {format_size(size)}")


def _choose(runs: list[StoredRun], names: list[str], paths: list[Path]) -> list[StoredRun]:
    """Return the runs of these ids, or all where none is named."""
    by_id = {run.run_id: run for run in runs}
    for name in names:
        if name not in by_id:
            known = ", ".join(by_id) or "none"
            raise ConfigError(f"there is no run {name!r} in {', '.join(map(str, paths))} (runs: {known})")
    return [by_id[name] for name in dict.fromkeys(names)] if names else runs


def _described(run: StoredRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "live": run.owner is not None,
        "owner": asdict(run.owner) if run.owner else None,
        "folders": [str(root) for root in run.folder.roots],
        "ranks": run.ranks,
        "bytes": run.nbytes,
        "commits": [
            {
                "step": commit.step,
                "created": commit.created,
                "world_size": commit.world_size,
                "problem": commit.problem or None,
            }
            for commit in run.commits
        ],
    }


def _commits(run: StoredRun) -> str:
    def text(step: int, created: float, problem: str) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
        return f"step {step}, {problem}" if problem else f"step {step}, {when}"

    return "\n".join(text(c.step, c.created, c.problem) for c in run.commits) or "none"


def _report(console: Console, run: StoredRun, pages: int, bad: list[BadPage]) -> None:
    if not run.commits:
        console.print(f"{run.run_id}: no commit, nothing to verify")
        return
    if not bad:
        console.print(f"{run.run_id}: [green]all {pages} pages are good[/]")
        return
    console.print(f"{run.run_id}: [bold red]{_counted(len(bad), 'bad page')}[/] of {pages}")
    for page in bad:
        name = "state file" if page.page is None else f"page {page.page}"
        place = f"{page.path}, offset {page.offset}, {page.length} bytes"
        console.print(
            f"  step {page.step}, rank {page.rank}, {name}: {place}: {page.reason}", soft_wrap=True, markup=False
        )


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
