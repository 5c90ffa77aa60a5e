"""Errors as a person gets them: one message, an exit status, no traceback unless asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from infinity.errors import (
    BudgetError,
    CommitError,
    ConfigError,
    FolderBusyError,
    InfinityError,
    MissingPackageError,
    UnsupportedError,
    is_lost_connection,
)
from infinity.extras import needs

_BEFORE_WORK = (ConfigError, BudgetError, UnsupportedError, FolderBusyError, CommitError, MissingPackageError)


@contextmanager
def failures(*, debug: bool = False) -> Iterator[None]:
    """Turn what is raised on purpose into a message on stderr and an exit status.

    The status is 2 where something has to be asked for differently, else 1.

    Raises:
        typer.Exit: with that status.
    """
    try:
        with needs("cli", "this command"):
            yield
    except InfinityError as error:
        if debug:
            Console(stderr=True).print_exception()
        _complain(str(error))
        raise typer.Exit(2 if isinstance(error, _BEFORE_WORK) else 1) from error
    except RuntimeError as error:
        if debug or not is_lost_connection(error):
            raise
        _complain("the connection to another rank was lost; its own message says why")
        raise typer.Exit(1) from error


def _complain(message: str) -> None:
    who = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    console = Console(stderr=True)
    console.print(f"{who}error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
