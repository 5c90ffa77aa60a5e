"""`infinity version`: versions of infinity and of the software that it runs on."""

from __future__ import annotations

import json as json_format
import platform
from typing import Annotated

import typer
from rich.console import Console

import infinity
from infinity.cli_errors import Version
from infinity_tools.doctor.software import installed


def version(
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    version: Version = False,
) -> None:
    """Print the versions of infinity, Python, PyTorch, transformers and the kernel."""
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
