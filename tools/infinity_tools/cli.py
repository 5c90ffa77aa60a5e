"""The console script `infinity`."""

from __future__ import annotations

import json as json_format
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from infinity_tools import store
from infinity_tools.export import export
from infinity_tools.failures import complain, failures
from infinity_tools.messages import lasting_streams, open_missing_streams
from infinity_tools.train import TrainCommand, train


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; refuse empty arguments, which would mean the current folder where a name was meant."""
        for before, argument in zip(["", *args], args, strict=False):
            name, _, value = argument.partition("=")
            if not (value if name.startswith("--") and "=" in argument else argument).strip():
                what = name if name.startswith("--") else before or "an argument"
                raise typer.BadParameter(f"{what} is empty: is a variable of the shell not set?", ctx=ctx)
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Train models larger than memory: the storage tier for PyTorch FSDP2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TrainCommand)(train)
app.command()(export)
try:
    from infinity_tools.probe import probe
except ImportError:
    pass
else:
    app.command()(probe)
app.add_typer(store.app, name="store")


@app.command()
def version(
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the version, and those of what it runs on."""
    import torch
    import transformers

    import infinity

    versions = {
        "infinity": infinity.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel": platform.release(),
        "devices": str(torch.cuda.device_count()) + " CUDA" if torch.cuda.is_available() else "CPU",
    }
    if json:
        typer.echo(json_format.dumps(versions))
        return
    console = Console(highlight=False)
    for name, value in versions.items():
        console.print(f"{name:<14}{value}", style="bold" if name == "infinity" else None)


def main() -> None:
    """Run the command line; standard streams that are closed, full or read by nobody end no command."""
    import errno
    import sys

    open_missing_streams()
    status: int | str | None = 0
    with lasting_streams() as output:
        try:
            with failures():
                app()
        except typer.Exit as ending:
            status = ending.exit_code
        except SystemExit as ending:
            status = ending.code
        output.flush()
        if output.error is not None and output.error.errno != errno.EPIPE:  # a reader that goes has what it wanted
            complain(f"standard output cannot be written: {output.error.strerror}")
            status = status or 1
    sys.exit(status)
