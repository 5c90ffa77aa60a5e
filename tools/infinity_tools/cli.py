"""The console script `infinity`."""

from __future__ import annotations

import errno
import json as json_format
import platform
import sys
from typing import Annotated

import typer
from rich.console import Console

from infinity.command import HELP, Commands, Version, complain
from infinity_tools import store
from infinity_tools.doctor.command import doctor
from infinity_tools.doctor.software import installed
from infinity_tools.export import export
from infinity_tools.messages import lasting_streams, open_missing_streams
from infinity_tools.migrate.command import migrate
from infinity_tools.plan.command import plan
from infinity_tools.probe.command import probe
from infinity_tools.status import status
from infinity_tools.top.command import top
from infinity_tools.train import TrainCommand, train
from infinity_tools.tune.command import tune

app = typer.Typer(
    name="infinity",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=HELP,
)


@app.callback()
def _infinity(version: Version = False) -> None:
    """Train models larger than memory: the storage tier for PyTorch FSDP2."""


app.command()(plan)
app.command()(tune)
app.command(cls=TrainCommand)(train)
app.command()(export)
app.add_typer(store.app, name="store")
app.command()(probe)
app.command()(doctor)
app.command()(status)
app.command()(top)
app.command()(migrate)


@app.command("version")
def versions(
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    version: Version = False,
) -> None:
    """Print the version, and those of what it runs on."""
    import infinity

    found = {
        "infinity": infinity.__version__,
        "python": platform.python_version(),
        "torch": installed("torch") or "not installed",
        "transformers": installed("transformers") or "not installed",
        "kernel": platform.release(),
    }
    if json:
        typer.echo(json_format.dumps(found))
        return
    console = Console(highlight=False)
    for name, value in found.items():
        console.print(f"{name:<14}{value}", style="bold" if name == "infinity" else None)


def main() -> None:
    """Run the command line; standard streams that are closed, full or read by nobody end no command."""
    open_missing_streams()
    status: int | str | None = 0
    with lasting_streams() as output:
        try:
            app(prog_name="infinity")
        except SystemExit as ending:
            status = ending.code
        output.flush()
        if output.error is not None and output.error.errno != errno.EPIPE:  # a reader that goes has what it wanted
            complain(f"standard output cannot be written: {output.error.strerror}")
            status = status or 1
    sys.exit(status)
