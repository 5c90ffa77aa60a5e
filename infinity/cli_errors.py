"""Shared parts of the console scripts: `--version`, help layout, and user-facing errors. Requires typer.

A usage error prints one line to stderr, without a traceback, and exits with status 2. If several ranks on a node
fail for the same reason, only one of them prints it.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import math
import os
import re
import socket
import sys
import tempfile
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
from infinity.units import format_number

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEFORE_WORK = (ConfigError, BudgetError, UnsupportedError, FolderBusyError, CheckpointError, MissingPackageError)
_PATIENCE = timedelta(seconds=3)  # for another rank to print the message; only duplicate messages wait this long
_SAID = "said"
_NAMES = 26  # width of the option column in the help


def _show_version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        import infinity

        typer.echo(f"infinity {infinity.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
]
"""Option `--version` for commands. The command ignores its value."""

HELP = {"help_option_names": ["-h", "--help"]}
"""Value of `context_settings` for every command."""


class _Shown:
    """Part of a command that prints each error on one line and does not truncate option names in its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        _write_help(self, ctx, formatter)

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command. Exits the process if `standalone_mode` is ``True``."""
        return _main(super().main, args, *rest, standalone=standalone_mode, **extra)  # type: ignore[misc]


class Command(_Shown, TyperCommand):
    """Command that prints each error on one line and does not truncate option names in its help."""


class Commands(_Shown, TyperGroup):
    """Command group with the same error handling and help layout as `Command`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        super().format_help(ctx, formatter)
        with formatter.section("Commands"):
            for name, command in self.commands.items():
                _write_definition(formatter, name, (command.help or "").partition("\n\n")[0])


def _exact_or_replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.replace_errors(error)


codecs.register_error("infinity.replace", _exact_or_replaced)


def write_any_text() -> None:
    """Replace characters that the encoding of standard output or standard error lacks, instead of raising.

    Bytes of file names that are not valid text are written unchanged, so that a printed path can be copied.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="infinity.replace")


def _write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write usage, description and options. typer's own tables truncate option names on 80 columns."""
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
                # typer shows a repeatable parameter as <list[Path]>, although each use takes one value.
                _write_definition(
                    formatter, re.sub(r"<list\[(\w+)\]>", lambda kind: f"<{kind[1].lower()}>", name), text
                )


def _write_definition(formatter: Any, name: str, text: str) -> None:
    before, indent = " " * formatter.current_indent, " " * _NAMES
    lines = _wrapped(text, formatter.width, indent)
    if len(before + name) > len(indent) - 2:
        formatter.write(f"{before}{name}\n{lines}\n")
    else:
        formatter.write(f"{before}{name}".ljust(_NAMES) + lines.lstrip() + "\n")


def _wrapped(text: str, width: int, indent: str) -> str:
    """Wrap text at spaces only, so that no option is broken at a hyphen."""
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _main(run: Callable[..., Any], args: Sequence[str] | None, *rest: Any, standalone: bool, **extra: Any) -> Any:
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
        typer.echo("aborted; no changes were made", err=True)
        status = 1
    except Exception as error:  # click's ClickException, which newer versions of typer vendor
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
        else:
            complain(_usage(error, words))
        status = getattr(error, "exit_code", 2)
    sys.exit(status if isinstance(status, int) else 0)


def _refuse_empty(words: Sequence[str]) -> None:
    """Reject an empty argument, which is usually an unset variable. An empty path would mean the current folder."""
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        named = name.startswith("--") and equals
        if not (value if named else word).strip():
            where = (name if named else before) or "the command"
            raise ConfigError(f"empty value after {where}. Pass a value or omit the argument.")


def _usage(error: Any, args: Sequence[str]) -> str:
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        typed = " ".join(map(repr, _typed(error.param.opts, args)))
        message = f"{max(error.param.opts, key=len)} {typed or 'value'}: {error.message}"
    elif context := getattr(error, "ctx", None):
        message = f"{error.format_message().rstrip('.')}; see `{context.command_path} -h`"
    else:
        message = error.format_message()
    return " ".join(message.split())


def _typed(names: Sequence[str], args: Sequence[str]) -> list[str]:
    given = [value for word, value in pairwise(args) if word in names]
    return given + [word.partition("=")[2] for word in args if word.partition("=")[0] in names and "=" in word]


def setting(name: str) -> Callable[[Any], Any]:
    """Return a callback that validates an option in the same way as the setting `name`."""

    def check(value: Any) -> Any:
        if value is not None:
            try:
                Config().with_values(**{name: value})
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from error
        return value

    return check


def at_most(limit: float) -> Callable[[Any], Any]:
    """Return a callback that rejects NaN, infinity and values above `limit`.

    Use it for limits that are too large to show in the help.
    """

    def check(value: Any) -> Any:
        if value is not None and value > limit:
            raise typer.BadParameter(f"{value} is above the maximum of {format_number(limit)}")
        return finite(value)

    return check


def finite(value: float | None) -> float | None:
    """Return the value unchanged.

    Raises:
        typer.BadParameter: if the value is NaN or infinite, which range checks do not reject.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


@contextmanager
def failures(*, debug: bool = False) -> Iterator[None]:
    """Turn expected errors into a message on stderr and an exit status.

    The status is 2 if the user must change the request, otherwise 1.

    Args:
        debug: also print the traceback.

    Raises:
        typer.Exit: with this status.
    """
    try:
        with needs("cli", "this command"):
            yield
    except InfinityError as error:
        if debug:
            sys.excepthook(type(error), error, error.__traceback__)
        complain(_with_notes(str(error), error), consequence=error.told_elsewhere)
        raise typer.Exit(2 if isinstance(error, _BEFORE_WORK) else 1) from error
    except RuntimeError as error:
        if debug or not is_lost_connection(error):
            raise
        message = "the connection to another rank was lost; see that rank's message for the reason"
        complain(_with_notes(message, error), consequence=True)
        raise typer.Exit(1) from error
    except OSError as error:  # libraries keep their caches in the home folder
        if debug or not error.filename or not _blames_home(str(error.filename)):
            raise
        complain(f"{error.filename}: {error.strerror}")
        raise typer.Exit(2) from error


def _with_notes(message: str, error: BaseException) -> str:
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _blames_home(message: str) -> bool:
    """Return whether a message names the home folder, and files cannot be written there."""
    home = os.path.expanduser("~").rstrip("/")
    if not home or home not in message:
        return False
    try:
        with tempfile.TemporaryFile(dir=home):
            return False
    except OSError:
        return True


def complain(message: str, *, consequence: bool = False) -> None:
    """Print an error to stderr, unless another rank prints the same error or the error that caused it.

    Args:
        message: text of the error.
        consequence: whether the error is a consequence of another rank's error.
    """
    if _blames_home(message):
        message += f"; HOME is {os.path.expanduser('~')!r}, which cannot be written: set HOME to a writable folder"
    store = _store_of_ranks()
    if store is not None and _is_said_elsewhere(store, message, consequence):
        return
    who = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    typer.echo(typer.style(f"{who}error:", fg=typer.colors.RED, bold=True) + f" {message}", err=True)
    if store is not None:
        with suppress(RuntimeError):
            store.set(_SAID, "")


def _store_of_ranks() -> Store | None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        # Each node may have a terminal of its own.
        return PrefixStore(f"infinity/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{socket.gethostname()}", store)
    except (ImportError, KeyError, ValueError, RuntimeError):
        return None


def _is_said_elsewhere(store: Store, message: str, consequence: bool) -> bool:
    try:
        if not consequence and store.add(hashlib.sha256(message.encode(errors="replace")).hexdigest(), 1) == 1:
            return False
        store.wait([_SAID], _PATIENCE)  # do not exit earlier, because torchrun would terminate the other ranks
        return True
    except RuntimeError:  # no rank has printed a message in time, or the store is gone
        return False
