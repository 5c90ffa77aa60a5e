"""What the console scripts share: `--version`, and errors as a person gets them. Only they import it: it needs typer.

A mistake is one line on stderr and exit status 2, with no traceback. Of several ranks one says it.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from infinity.config import Config
from infinity.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    FolderBusyError,
    InfinityError,
    MissingPackageError,
    UnsupportedError,
    is_lost_connection,
)
from infinity.optional_dependencies import needs

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEFORE_WORK = (ConfigError, BudgetError, UnsupportedError, FolderBusyError, CheckpointError, MissingPackageError)
_PATIENCE = timedelta(seconds=3)  # for another rank that says it; nothing but a message waits for it
_SAID = "said"
_NAMES = 26  # columns of help in which names of options stand


def _show_version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        import infinity

        typer.echo(f"infinity {infinity.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
]
"""The option `--version` of a command, which the command itself does not look at."""

HELP = {"help_option_names": ["-h", "--help"]}
"""The `context_settings` of every command."""


class Command(TyperCommand):
    """A command whose mistakes are one line, and whose help cuts no word."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _write_help(self, ctx, formatter)

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run it; ends the process unless `standalone_mode` is off."""
        return _main(super().main, args, *rest, standalone=standalone_mode, **extra)


class Commands(TyperGroup):
    """The same for a command that has others below it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _write_help(self, ctx, formatter)
        with formatter.section("Commands"):
            for name, command in self.commands.items():
                _write_definition(formatter, name, (command.help or "").partition("\n\n")[0])

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run it and what is below it; ends the process unless `standalone_mode` is off."""
        return _main(super().main, args, *rest, standalone=standalone_mode, **extra)


def _write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write usage, description and options; typer's own tables cut names of options on a terminal of 80 columns.

    Args:
        command: whose help it is.
        context: it is asked for in.
        formatter: click's.
    """
    command.format_usage(context, formatter)
    for paragraph in (command.help or "").split("\n\n"):
        formatter.write("\n" + _wrapped(paragraph, formatter.width, "  ") + "\n")
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            for name, text in records:
                _write_definition(formatter, name, text)


def _write_definition(formatter: Any, name: str, text: str) -> None:
    """Write a name and what it is; a long name has a line of its own."""
    before, indent = " " * formatter.current_indent, " " * _NAMES
    lines = _wrapped(text, formatter.width, indent)
    if len(before + name) > len(indent) - 2:
        formatter.write(f"{before}{name}\n{lines}\n")
    else:
        formatter.write(f"{before}{name}".ljust(_NAMES) + lines.lstrip() + "\n")


def _wrapped(text: str, width: int, indent: str) -> str:
    """Return a text in lines that are broken at spaces alone: an option is not broken at its hyphens."""
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _main(run: Callable[..., Any], args: Sequence[str] | None, *rest: Any, standalone: bool, **extra: Any) -> Any:
    """Run a command, and end the process with its status where it is not part of another program."""
    if not standalone:
        return run(args, *rest, standalone_mode=False, **extra)
    words = sys.argv[1:] if args is None else args
    try:
        with failures():
            _refuse_empty(words)
            status = run(args, *rest, standalone_mode=False, **extra)
    except typer.Exit as ending:
        status = ending.exit_code
    except typer.Abort:
        typer.echo("nothing is changed", err=True)
        status = 1
    except Exception as error:  # click's ClickException, of which newer versions of typer have their own copy
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
        else:
            complain(_usage(error, words))
        status = getattr(error, "exit_code", 2)
    sys.exit(status if isinstance(status, int) else 0)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty word: it is a variable of a shell that is not set, and a path it would be that of this folder."""
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        named = name.startswith("--") and equals
        if not (value if named else word).strip():
            where = (name if named else before) or "the first word"
            raise ConfigError(f"{where} has nothing after it but an empty text; give it a value or leave it out")


def _usage(error: Any, args: Sequence[str]) -> str:
    """Return what is wrong with the words of a command line, in one line: the option, what was typed, the reason."""
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        typed = " ".join(map(repr, _typed(error.param.opts, args)))
        message = f"{max(error.param.opts, key=len)} {typed or 'value'}: {error.message}"
    elif context := getattr(error, "ctx", None):
        message = f"{error.format_message().rstrip('.')}; see `{context.command_path} -h`"
    else:
        message = error.format_message()
    return " ".join(message.split())


def _typed(names: Sequence[str], args: Sequence[str]) -> list[str]:
    """Return what a command line gives an option, as often as it names it; nothing for an argument without a name."""
    given = [value for word, value in pairwise(args) if word in names]
    return given + [word.partition("=")[2] for word in args if word.partition("=")[0] in names and "=" in word]


def setting(name: str) -> Callable[[Any], Any]:
    """Return a callback for an option that is a setting: what the setting refuses, the option refuses."""

    def check(value: Any) -> Any:
        if value is not None:
            try:
                Config().with_values(**{name: value})
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from error
        return value

    return check


def at_most(limit: float) -> Callable[[Any], Any]:
    """Return a callback that refuses what is above a limit so large that help need not show it, nan and infinity."""

    def check(value: Any) -> Any:
        if value is not None and value > limit:
            raise typer.BadParameter(f"{value} is above {limit:g}")
        return finite(value)

    return check


def finite(value: float | None) -> float | None:
    """Return a value, but refuse what no bound refuses: nan and infinity. Raises `typer.BadParameter`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


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
            sys.excepthook(type(error), error, error.__traceback__)
        complain(str(error), consequence=error.told_elsewhere)
        raise typer.Exit(2 if isinstance(error, _BEFORE_WORK) else 1) from error
    except RuntimeError as error:
        if debug or not is_lost_connection(error):
            raise
        complain("the connection to another rank was lost; its own message says why", consequence=True)
        raise typer.Exit(1) from error


def complain(message: str, *, consequence: bool = False) -> None:
    """Print an error on stderr, unless another rank prints the same, or what this is only the consequence of."""
    store = _store_of_ranks()
    if store is not None and _is_said_elsewhere(store, message, consequence):
        return
    who = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    typer.echo(typer.style(f"{who}error:", fg=typer.colors.RED, bold=True) + f" {message}", err=True)
    if store is not None:
        with suppress(RuntimeError):
            store.set(_SAID, "")


def _store_of_ranks() -> Store | None:
    """Return the store that torchrun's agent keeps for the ranks, if there is one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        return PrefixStore(f"infinity/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    except (ImportError, KeyError, ValueError, RuntimeError):
        return None


def _is_said_elsewhere(store: Store, message: str, consequence: bool) -> bool:
    try:
        if not consequence and store.add(hashlib.sha256(message.encode(errors="replace")).hexdigest(), 1) == 1:
            return False
        store.wait([_SAID], _PATIENCE)  # before this one ends: torchrun ends the others as soon as one has
        return True
    except RuntimeError:  # nobody has said anything in time, or the store is gone
        return False
