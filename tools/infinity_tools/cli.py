"""Command group of the console script `infinity`."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer

from infinity.cli_errors import HELP, Command, Commands, Version, complain, write_any_text
from infinity_tools.messages import lasting_streams, open_missing_streams

# At import, matplotlib warns about the location of its cache if HOME cannot be used, which does not concern our users.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

COMMANDS: Final = {
    "plan": "infinity_tools.plan.plan_command:plan",
    "tune": "infinity_tools.tune.tune_command:tune",
    "train": "infinity_tools.train.train_command:app",
    "export": "infinity_tools.export:export",
    "store": "infinity_tools.store:app",
    "probe": "infinity_tools.probe.probe_command:probe",
    "doctor": "infinity_tools.doctor.doctor_command:doctor",
    "status": "infinity_tools.status:status",
    "top": "infinity_tools.top.top_command:top",
    "migrate": "infinity_tools.migrate.migrate_command:migrate",
}
"""Location of each command, in the order of the help: a function, or a `Typer` app for commands with special parsing.
"""


@cache
def _command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, cls=Command)(found)
        found = app
    return typer.main.get_command(found)


class _Imported(Mapping[str, Any]):
    """Commands by name. Modules are imported on first use, so that no command waits for imports of the others."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Infinity(Commands):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Imported()


app = typer.Typer(
    name="infinity",
    cls=_Infinity,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP,
)


@app.callback()
def _infinity(version: Version = False) -> None:
    """Train models whose state exceeds GPU and host memory, with PyTorch FSDP2 and NVMe."""


def main() -> None:
    """Run the command line. Closed or full standard streams do not interrupt a command."""
    open_missing_streams()
    write_any_text()
    status: int | str | None = 0
    with lasting_streams() as output:
        try:
            app(prog_name="infinity")
        except SystemExit as ending:
            status = ending.code
        except KeyboardInterrupt:  # before or after the command itself, which handles it
            status = 130
        output.flush()
        if output.error is not None and output.error.errno != errno.EPIPE:  # a reader may stop early, as `head` does
            complain(f"standard output cannot be written: {output.error.strerror}")
            status = status or 1
    sys.exit(status)
