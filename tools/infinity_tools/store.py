"""`infinity store`: list, verify and remove runs in NVMe folders."""

from __future__ import annotations

import json as json_format
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.cli_errors import Command, Commands, Version, failures
from infinity.errors import ConfigError
from infinity.units import format_size, parse_size
from infinity_tools.progress import byte_progress, short
from infinity_tools.shared_options import Json

if TYPE_CHECKING:
    from infinity_tools.stored_runs import BadPage, Checkpoint, StoredCopy, StoredRun, Waste

app = typer.Typer(name="store", cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
_PATHS = Annotated[list[Path], typer.Argument(help="The folders in storage.paths, in the same order.")]
_YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt for confirmation.")]
_SHOWN = 20  # bad pages of a run that are printed


@app.callback()
def _store(version: Version = False) -> None:
    """List, verify and remove runs in NVMe folders."""


@app.command(cls=Command)
def ls(paths: _PATHS, json: Json = False, version: Version = False) -> None:
    """List runs and their checkpoints, with sizes and owners.

    The column *size* covers all pages and state files of a checkpoint. The column *exclusive* covers only those that no
    other checkpoint of the run shares.
    """
    with failures():
        from infinity_tools.stored_runs import other_holders

        runs = _runs_in(paths)
        for holder in other_holders(paths, runs):
            typer.echo(holder, err=True)
        if json:
            typer.echo(json_format.dumps([_described(run) for run in runs]))
            return
        console = Console(highlight=False)
        if not runs:
            console.print(f"no runs in {', '.join(map(str, paths))}", soft_wrap=True, markup=False)
        for run in runs:
            holder = f"pid {run.owner.pid}" if run.owner and run.owner.known else f"held by {run.owner}"
            state = f"[green]live[/], {holder}" if run.owner else "ended"
            facts = [_counted(run.ranks, "rank"), *([f"{short(run.parameters)} parameters"] if run.parameters else [])]
            console.print(
                f"[bold]{run.run_id}[/]  {state}  {format_size(run.nbytes)} on disk  {', '.join(facts)}", soft_wrap=True
            )
            console.print(_table(run) if run.checkpoints else "  no checkpoint")


@app.command(cls=Command)
def verify(
    paths: _PATHS,
    run: Annotated[str, typer.Option(help="Verify only this run. [default: all runs that have ended]")] = "",
    json: Json = False,
    version: Version = False,
) -> None:
    """Verify the checksums of all checkpoint pages at full speed.

    Checks one run, or all runs that have ended, and the copies of ranks on other nodes. Live runs are skipped, and
    passing one with --run is an error. Exits with status 1 if a page or a copy is bad.
    """
    with failures():
        chosen = _choose(_runs_in(paths), [run] if run else [], paths)
        if run and chosen[0].owner:
            raise ConfigError(
                f"{chosen[0].owner} is running; verify it after it has ended, or use `infinity store scrub`"
            )
        found = _check(
            "verifying", [found for found in chosen if found.owner is None], paths, 0, _live(chosen), json=json
        )
    raise typer.Exit(1 if found else 0)


@app.command(cls=Command)
def scrub(
    paths: _PATHS,
    rate: Annotated[str, typer.Option(help="Maximum bytes per second, such as 200MiB. [default: no limit]")] = "",
    json: Json = False,
    version: Version = False,
) -> None:
    """Verify all checkpoints, including those of live runs, at a limited rate, for example from cron.

    For every bad page and copy, prints what to do. Those that a live run replaces in the meantime are skipped. Exits
    with status 1 if a page or a copy is bad.
    """
    with failures():
        limit = parse_size(rate, name="--rate") if rate else 0
        if rate and not limit:
            raise ConfigError("--rate 0 would never finish; omit --rate for no limit")
        found = _check("scrubbing", _runs_in(paths), paths, limit, [], json=json)
    raise typer.Exit(1 if found else 0)


def _check(
    doing: str, runs: list[StoredRun], paths: list[Path], rate: int, passed_over: list[str], *, json: bool
) -> bool:
    """Verify the checkpoints of the runs, report the result, and return ``True`` if a page is bad.

    Args:
        doing: Verb for the progress line.
        runs: Runs to read.
        paths: Folders of the runs.
        rate: Maximum number of bytes per second. 0 means no limit.
        passed_over: Ids of the live runs that are skipped.
        json: Whether to print JSON and nothing else.
    """
    from infinity_tools.stored_runs import Check, good_checkpoint, incomplete, without_manifest

    console = Console(highlight=False)
    pages, bad_pages, partial, elsewhere, copies, unusable = 0, [], [], [], [], False
    for run in runs:
        check = Check(run)
        pages += check.pages
        with byte_progress(f"{doing} {run.run_id}", silent=json) as bar:
            task = bar.add_task("", total=check.nbytes)
            bad = check.run(lambda nbytes, bar=bar, task=task: bar.advance(task, nbytes), rate)  # type: ignore[misc]
        advice = _advice(run, bad, good_checkpoint(run, bad), paths)
        elsewhere += [
            {"run_id": run.run_id, "step": checkpoint.step, "files": checkpoint.held.elsewhere}
            for checkpoint in run.checkpoints
            if checkpoint.held.elsewhere
        ]
        copies += [{"run_id": run.run_id, **asdict(copy)} for copy in check.copies]
        bad_pages += [{"run_id": run.run_id, **asdict(page), "advice": advice} for page in bad]
        passed = incomplete(run)
        partial += [
            {"run_id": run.run_id, "step": checkpoint.step, "problem": checkpoint.problem} for checkpoint in passed
        ]
        none_left = bool(passed) and not run.usable and run.owner is None
        unusable |= none_left
        if not json:
            _report(console, run, check.pages, bad, advice)
            helds = [checkpoint.held for checkpoint in run.checkpoints]
            damaged = {copy.step for copy in check.copies if copy.problem}
            notes = [f"step {one.step}, {one.problem}: incomplete checkpoint, ignored" for one in passed]
            notes += [f"not read: {held.elsewhere}. Run the command there, too." for held in helds if held.elsewhere]
            notes += [
                f"not read: {one.held.from_copies}, which copies on this host can replace"
                for one in run.checkpoints
                if one.held.from_copies and one.step not in damaged
            ]
            for note in dict.fromkeys(notes):
                console.print(f"  {note}", soft_wrap=True, markup=False)
            _report_copies(console, check.copies)
            for file in without_manifest(run):
                console.print(f"  {file} has no manifest: it belongs to no checkpoint", soft_wrap=True, markup=False)
            if none_left and not bad:
                console.print(f"  {advice}", style="yellow", soft_wrap=True, markup=False)
    if json:
        found = {
            "runs": [run.run_id for run in runs],
            "pages": pages,
            "bad": bad_pages,
            "copies": copies,
            "incomplete": partial,
        }
        typer.echo(json_format.dumps(found | {"passed_over": passed_over, "elsewhere": elsewhere}))
    elif passed_over:
        console.print(f"{_passed_over(passed_over)}; `infinity store scrub` also reads live runs", soft_wrap=True)
    elif not runs:
        console.print(f"nothing to do in {', '.join(map(str, paths))}", soft_wrap=True, markup=False)
    return bool(bad_pages) or any(copy["problem"] for copy in copies) or unusable


def _report_copies(console: Console, copies: Sequence[StoredCopy]) -> None:
    for copy in copies:
        step = "unknown step" if copy.step is None else f"step {copy.step}"
        what = f"  {step}: the copy of {copy.located} that rank {copy.rank} stores"
        if not copy.problem:
            console.print(f"{what} is intact", soft_wrap=True, markup=False)
            continue
        console.print(f"{what} is damaged: {copy.path}: {copy.problem}", style="bold red", soft_wrap=True, markup=False)
        lost = "one of these nodes" if " and " in copy.located else "this node"
        text = f"  if {lost} is lost, its files cannot be computed from this copy; later copies replace it"
        console.print(text, style="yellow", soft_wrap=True, markup=False)


def _advice(run: StoredRun, bad: list[BadPage], good: Checkpoint | None, paths: list[Path]) -> str:
    from infinity_tools.stored_runs import spoilt

    if good is None:
        after = " after it has ended" if run.owner else ""
        return (
            "no checkpoint of this run is intact; restore the files from a backup, or remove the run"
            f"{after}: infinity store rm {shlex.join(map(str, paths))} {run.run_id}"
        )
    step, where = good.step, " on this host" if good.held.elsewhere else ""
    if step > max((page.step for page in bad), default=step):
        return f"the newest checkpoint (step {step}) is intact{where}: resume from it, or continue training"
    ranks = spoilt(good, bad)
    if run.owner:
        kept = f"other replicas have step {step}" if ranks else f"step {step} is intact{where}"
        return f"the run is live: its next checkpoint replaces these pages; until then, {kept}"
    if ranks:
        files = shlex.join(str(good.manifests[rank]) for rank in ranks)
        others = ", if their files on other hosts are intact" if good.held.elsewhere else ""
        return f"other replicas can be resumed{others}: remove {files}, and resume with run.resume_step = {step}"
    here = f", which is intact{where}" if where else ""
    return f"resume from the checkpoint of step {step}{here}: --resume OUT/checkpoint-{step} (run.resume_step = {step})"


@app.command(cls=Command)
def gc(
    paths: _PATHS,
    yes: _YES = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the data without removing it.")] = False,
    json: Json = False,
    version: Version = False,
) -> None:
    """Remove unusable data of runs that have ended.

    Removes runs without a checkpoint, checkpoints that not all ranks have published (if all ranks are on this node),
    temporary files, state files without a checkpoint, stale locks, and files that `infinity plan`, `probe`, `tune` and
    `doctor` could not remove because they were killed. Pass all folders of the runs. Of the other folders, only those
    that are named like a run and contain its marker (`infinity.run`) are touched, as well as your own empty folders
    named like a run. No run can start in these folders until the command ends.
    """
    with failures():
        from infinity.store.folder import no_starts
        from infinity_tools.stored_runs import waste

        with nullcontext() if dry_run else no_starts(paths):
            passed: dict[Path, str] = {}
            live: list[StoredRun] = []
            found = waste(paths, passed, live)
            _say_passed(passed)
            size = sum(item.nbytes for item in found)
            if not json:
                for item in found:
                    typer.echo(f"{item.name}  {format_size(item.nbytes)}  {item.what}")
            question = f"remove {_counted(len(found), 'item')}"
            going = not dry_run and _confirmed(found, question, size, yes=yes, json=json)
            for item in found if going else ():
                item.remove()
        if json:
            listed = [_waste(item) for item in found]
            told = {"waste": listed, "bytes": size, "removed": going, "passed_over": _live(live)}
            typer.echo(json_format.dumps(told))
        else:
            done = f"{'removed' if going else 'found'} {_counted(len(found), 'item')}, {format_size(size)}"
            typer.echo(_done(done, _live(live)))


def _confirmed(found: Sequence[object], question: str, size: int, *, yes: bool, json: bool) -> bool:
    """Ask for confirmation. Declining aborts the command."""
    if found and not yes:
        if json:
            raise ConfigError("--json cannot prompt; pass --yes")
        try:
            typer.confirm(f"{question}, {format_size(size)}?", abort=True)
        except typer.Abort:  # the user declined; Abort is itself a RuntimeError
            raise
        except RuntimeError as error:  # stdin is closed
            raise ConfigError("cannot prompt: stdin is closed; pass --yes") from error
    return True


def _waste(item: Waste) -> dict[str, Any]:
    return {
        "what": item.what,
        "run_id": item.run.run_id if item.run else None,
        "paths": [str(path) for path in item.files or (item.run.folder.roots if item.run else ())],
        "bytes": item.nbytes,
    }


@app.command(cls=Command)
def rm(
    arguments: Annotated[
        list[str], typer.Argument(metavar="PATH... RUN...", help="Folders, and the ids of runs in them.")
    ],
    ended: Annotated[
        bool,
        typer.Option(
            "--ended", help="Remove all runs that no process has open, finished or interrupted, with their checkpoints."
        ),
    ] = False,
    yes: _YES = False,
    json: Json = False,
    version: Version = False,
) -> None:
    """Remove runs that have ended, with their checkpoints.

    Passing a live run is an error; --ended skips live runs. No run can start in these folders until the command ends.
    """
    with failures():
        from infinity.store.folder import no_starts
        from infinity.store.marker import is_run_id
        from infinity_tools.stored_runs import remove

        # Tell ids from folders by their form, because in a folder of runs the id of a run is also the name of a folder.
        names = [text for text in arguments if is_run_id(text)]
        paths = [Path(text) for text in arguments if text not in names]
        if strange := [str(path) for path in paths if not os.path.isdir(path)]:
            raise ConfigError(f"{strange[0]!r} is neither a folder nor a run id; `infinity store ls` lists runs")
        if not paths:
            raise ConfigError("no folders given; pass the folders that contain the runs")
        if not (names or ended):
            raise ConfigError("no runs given; pass their ids, or --ended for all runs that have ended")
        with no_starts(paths):
            found = _runs_in(paths)
            chosen = _choose(found, names, paths) if names else []
            if busy := [run for run in chosen if run.owner]:
                raise ConfigError(f"{busy[0].owner} is running; nothing was removed")
            live = _live(found) if ended else []
            chosen += [run for run in found if ended and run.owner is None and run not in chosen]
            size = sum(run.nbytes for run in chosen)
            if not json:
                for run in chosen:
                    steps = ", ".join(str(checkpoint.step) for checkpoint in run.checkpoints) or "none"
                    typer.echo(f"{run.run_id}  {format_size(run.nbytes)}  checkpoints: {steps}")
            _confirmed(chosen, f"remove {_counted(len(chosen), 'run')}", size, yes=yes, json=json)
            for run in chosen:
                remove(run)
        if json:
            told = {"removed": [run.run_id for run in chosen], "bytes": size, "passed_over": live}
            typer.echo(json_format.dumps(told))
        else:
            typer.echo(_done(f"removed {_counted(len(chosen), 'run')}, {format_size(size)}", live))


def _runs_in(paths: list[Path]) -> list[StoredRun]:
    """Return the runs in these folders. See `_say_passed`."""
    from infinity_tools.stored_runs import stored_runs

    passed: dict[Path, str] = {}
    runs = stored_runs(paths, passed)
    _say_passed(passed)
    return runs


def _say_passed(passed: dict[Path, str]) -> None:
    """Report folders that are named like runs but are not runs."""
    from infinity.store.marker import passed_over

    if passed:
        typer.echo(passed_over(passed), err=True)


def _live(runs: Sequence[StoredRun]) -> list[str]:
    return [run.run_id for run in runs if run.owner]


def _passed_over(live: list[str]) -> str:
    return f"skipped {_counted(len(live), 'live run')}: {', '.join(live)}"


def _done(what: str, live: list[str]) -> str:
    return f"{what}; {_passed_over(live)}" if live else what


def _choose(runs: list[StoredRun], names: list[str], paths: list[Path]) -> list[StoredRun]:
    by_id = {run.run_id: run for run in runs}
    for name in names:
        if name not in by_id:
            known = ", ".join(by_id) or "none"
            raise ConfigError(f"no run {name!r} in {', '.join(map(str, paths))} (runs: {known})")
    return [by_id[name] for name in dict.fromkeys(names)] if names else runs


def _described(run: StoredRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "live": run.owner is not None,
        "owner": asdict(run.owner) if run.owner else None,
        "folders": [str(root) for root in run.folder.roots],
        "ranks": run.ranks,
        "parameters": run.parameters or None,
        "bytes": run.nbytes,
        "checkpoints": [
            {
                "step": checkpoint.step,
                "created": checkpoint.created,
                "world_size": checkpoint.world_size,
                "bytes": checkpoint.nbytes,
                "own_bytes": checkpoint.own_bytes,
                "problem": checkpoint.problem or None,
                "elsewhere": checkpoint.held.elsewhere or None,
                "from_copies": checkpoint.held.from_copies or None,
            }
            for checkpoint in run.checkpoints
        ],
    }


def _table(run: StoredRun) -> Table:
    table = Table("  step", "created", "ranks", "size", "exclusive", "", box=None, header_style="dim", pad_edge=False)
    for column in (0, 2, 3, 4):
        table.columns[column].justify = "right"
        table.columns[column].no_wrap = True
    table.columns[1].no_wrap = True
    table.columns[5].overflow = "fold"
    for checkpoint in run.checkpoints:
        sizes = (format_size(checkpoint.nbytes), format_size(checkpoint.own_bytes))
        copies = f"{checkpoint.held.from_copies}: from copies" if checkpoint.held.from_copies else ""
        notes = escape("; ".join(filter(None, (checkpoint.held.elsewhere, copies))))
        problem = f"[red]{escape(checkpoint.problem)}[/]" if checkpoint.problem else notes
        when = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.created)) if checkpoint.created else "unknown"
        )
        table.add_row(str(checkpoint.step), when, str(checkpoint.world_size), *sizes, problem)
    return table


def _report(console: Console, run: StoredRun, pages: int, bad: list[BadPage], advice: str) -> None:
    if not run.checkpoints:
        console.print(f"{run.run_id}: no checkpoint, nothing to read")
        return
    if not bad:
        console.print(f"{run.run_id}: [green]all {pages} pages are intact[/]")
        return
    files = sum(page.page is None for page in bad)
    found = [_counted(files, "bad file")] * bool(files)
    found += [f"{_counted(len(bad) - files, 'bad page')} of {pages}"] * (len(bad) > files)
    console.print(f"{run.run_id}: [bold red]{', '.join(found)}[/]")
    for page in bad[:_SHOWN]:
        what = page.reason  # the reason for a whole file includes its path
        if page.page is not None:
            what = f"page {page.page}: {page.path}, offset {page.offset}, {page.length} bytes: {page.reason}"
        console.print(f"  step {page.step}, rank {page.rank}: {what}", soft_wrap=True, markup=False)
    if len(bad) > _SHOWN:
        console.print(f"  … and {len(bad) - _SHOWN} more; --json lists all", markup=False)
    console.print(f"  {advice}", style="yellow", soft_wrap=True, markup=False)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
