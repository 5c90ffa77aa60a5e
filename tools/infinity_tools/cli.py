"""The console script `infinity`."""

from __future__ import annotations

import json as json_format
import platform
from typing import Annotated

import typer
from rich.console import Console

from infinity_tools import store
from infinity_tools.export import export
from infinity_tools.failures import failures
from infinity_tools.probe import probe
from infinity_tools.train import train

app = typer.Typer(
    help="Train models larger than memory: the storage tier for PyTorch FSDP2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(export)
app.command()(probe)
app.add_typer(store.app, name="store")


@app.command()
def version(
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the version, and those of what it runs on."""
    from importlib import metadata

    import torch

    import infinity

    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = "not installed"

    versions = {
        "infinity": infinity.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers,
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
    """Run the command line."""
    import sys

    try:
        with failures():
            app()
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
