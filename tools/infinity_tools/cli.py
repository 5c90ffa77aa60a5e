"""The console script `infinity`."""

from __future__ import annotations

import json as json_format
import platform
from typing import Annotated

import typer
from rich.console import Console

from infinity.command import HELP, Commands, Version
from infinity_tools import store
from infinity_tools.export import export
from infinity_tools.probe import probe
from infinity_tools.train import train

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


app.command()(train)
app.command()(export)
app.command()(probe)
app.add_typer(store.app, name="store")


@app.command("version")
def versions(
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    version: Version = False,
) -> None:
    """Print the version, and those of what it runs on."""
    from importlib import metadata

    import torch

    import infinity

    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = "not installed"

    found = {
        "infinity": infinity.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers,
        "kernel": platform.release(),
        "devices": str(torch.cuda.device_count()) + " CUDA" if torch.cuda.is_available() else "CPU",
    }
    if json:
        typer.echo(json_format.dumps(found))
        return
    console = Console(highlight=False)
    for name, value in found.items():
        console.print(f"{name:<14}{value}", style="bold" if name == "infinity" else None)


def main() -> None:
    """Run the command line."""
    app(prog_name="infinity")
