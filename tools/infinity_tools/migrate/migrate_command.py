"""The `infinity migrate` command, which converts a DeepSpeed configuration into settings, code, and a table of keys."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from infinity.cli_errors import Version, failures
from infinity.errors import ConfigError
from infinity.untrusted_files import replacing
from infinity_tools.migrate.keys import NOT_IMPORTED, Status
from infinity_tools.migrate.read import read_config
from infinity_tools.migrate.translate import Migration, Row
from infinity_tools.migrate.translate import migrate as translate
from infinity_tools.shared_options import Json
from infinity_tools.tables import table

_SETTINGS = "infinity.toml"
_LONGEST = 60
_BEFORE = {Status.NOT_NEEDED: "see ", Status.NO_COUNTERPART: "instead: "}
_CHECKPOINTS = """\
  python zero_to_fp32.py CHECKPOINT FOLDER --safe_serialization
  {call}, {settings!r}, weights=FOLDER)"""


def migrate(
    config: Annotated[
        Path, typer.Argument(help="DeepSpeed configuration in JSON, such as ds_config.json.", metavar="DS_CONFIG")
    ],
    out: Annotated[Path | None, typer.Option(help="Output file for the settings. [default: print them]")] = None,
    nvme: Annotated[
        list[Path] | None, typer.Option(help="Folder for the state, instead of nvme_path; repeat for several drives.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the --out file.")] = False,
    json: Json = False,
    version: Version = False,
) -> None:
    """Translate a DeepSpeed configuration into settings and code, with an explanation of every key.

    For example: `infinity migrate ds_config.json --out infinity.toml`. The settings are accepted by `infinity train
    --config` and `infinity.offload`. The exit status is 0 if training stays the same; 1 if a key that changes training
    has no counterpart; and 2 if the file is not a DeepSpeed configuration.
    """
    with failures():
        if force and out is None:
            raise ConfigError("--force requires --out; without --out, no file is written")
        if out is not None and os.path.lexists(out) and not force:
            raise ConfigError(f"--out {str(out)!r} already exists; choose another file, or overwrite it with --force")
        found = read_config(config)
        settings_file = str(out or _SETTINGS)
        done = translate(found, str(config), settings_file, [str(path) for path in nvme or ()])
        if out is not None:
            _write(out, done.toml)
        if json:
            typer.echo(json_format.dumps(_document(done)))
        else:
            _show(done, out)
    raise typer.Exit(1 if done.refusals else 0)


def _write(out: Path, text: str) -> None:
    try:
        with replacing(out, 0o666) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write --out {str(out)!r}: {error.strerror}") from error


def _document(done: Migration) -> dict[str, Any]:
    keys = [
        {"key": row.key, "value": row.value, "status": row.status, "becomes": row.becomes, "why": row.why,
         "changes_training": row.changes} for row in done.rows
    ]  # fmt: skip
    return {
        "toml": done.toml, "settings": done.settings, "code": done.code, "trainer_code": done.trainer_code,
        "ranks": done.ranks, "keys": keys, "ok": not done.refusals,
    }  # fmt: skip


def _show(done: Migration, out: Path | None) -> None:
    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style))

    def lines(text: str) -> None:
        console.print(Text(text), soft_wrap=True)  # not wrapped, so that it can be copied

    say("Settings, for `infinity train --config` and `infinity.offload`", "bold")
    lines(f"wrote {out}\n" if out is not None else f"\n{done.toml}")
    if done.trainer_code is not None:
        say('Training code with transformers\' Trainer, which fills in "auto": keep it with `attach`', "bold")
        lines(f"\n{done.trainer_code}")
    say(f"Training code{' with your own loop' * (done.trainer_code is not None)}", "bold")
    lines(f"\n{done.code}")
    say("Continuing a DeepSpeed run", "bold")
    say(
        f"\nWeights are imported; Adam moments and step count are not, because {NOT_IMPORTED}. Convert the weights "
        "with the script in DeepSpeed's checkpoint:"
    )
    call = "infinity.offload(model, optimizer" if done.trainer_code is None else "attach(trainer"
    lines(_CHECKPOINTS.format(call=call, settings=str(out or _SETTINGS)))
    say(
        "The learning-rate schedule starts at step N, as in DeepSpeed's folder global_stepN, if you call "
        "scheduler.step() N times before training.\n"
    )
    for status in Status:
        if rows := [row for row in done.rows if row.status is status]:
            headings = ("key", "counterpart and reason")
            console.print(table(f"{status} ({len(rows)})", headings, _cells(rows)))
            console.print()
    if done.refusals:
        names = ", ".join(row.key for row in done.refusals)
        say(f"Training changes: no counterpart for {names}. See the table for replacements.", "red")
    else:
        unknown = any(row.status is Status.UNKNOWN for row in done.rows)
        but = " (the effect of unknown keys is not known)" if unknown else ""
        say(f"Training stays the same{but}.", "yellow" if unknown else "green")
    if not done.settings.get("storage", {}).get("paths"):
        say("storage.paths is not set. Set it to one folder per NVMe drive, or pass --nvme.", "yellow")


def _cells(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Yield a table row for each group of keys with the same translation."""
    answers: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        answers.setdefault((row.becomes, row.why, row.changes), []).append(row)
    for (becomes, why, changes), same in answers.items():
        lines, last = [], ""
        for row in same:
            section, _, name = row.key.rpartition(".")
            if section != last:
                lines.append(f"{section[:100]}.")
            value = json_format.dumps(row.value, ensure_ascii=False)
            shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
            lines.append(f"{'  ' if section else ''}{name[:100]} = {shown}")
            last = section
        before = ("not supported; " if changes else "") + (_BEFORE.get(same[0].status, "") if becomes else "")
        yield "\n".join(lines), "\n".join(filter(None, (f"{before}{becomes}", why)))
