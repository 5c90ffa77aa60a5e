"""`infinity probe`: what can the drives under these folders do, and which settings suit them?"""

from __future__ import annotations

import json as json_format
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite, setting
from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity.io.probe.points import Load, points_of
from infinity.io.probe.sustained import MOST_BYTES, bytes_to_sustain
from infinity.units import KIB, MIB, format_size, parse_size
from infinity_tools.output import check_out, write_out
from infinity_tools.probe.probe_report import Ask
from infinity_tools.probe.recommendation import usual_size
from infinity_tools.probe.shown import announce, open_view, show
from infinity_tools.probe.work import check, probe_all

_PAGE_BYTES = 8 * MIB  # how large pages usually become: a block that is moved in one request
_BLOCKS = sorted({256 * KIB, MIB, usual_size()[0], _PAGE_BYTES})
_DEPTHS = sorted({1, 8, usual_size()[1]})
_BLOCK_NAMES = ", ".join(format_size(block).replace(" ", "") for block in _BLOCKS)
_DEPTH_NAMES = ", ".join(map(str, _DEPTHS))
_ALONE = ("point", "all", "no")


def probe(
    paths: Annotated[list[Path], typer.Argument(help="Folders to measure, one on each drive.")],
    size: Annotated[
        str,
        typer.Option(help="Size of the file in each folder."),
    ] = "2GiB",
    block: Annotated[
        list[str] | None,
        typer.Option(help=f"Bytes per request; repeat or separate by commas. [default: {_BLOCK_NAMES}]"),
    ] = None,
    depth: Annotated[
        list[str] | None,
        typer.Option(help=f"Requests in flight; repeat or separate by commas. [default: {_DEPTH_NAMES}]"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=3600,
            callback=finite,
            help="Length of each measurement; one that writes ends as soon as --size is written.",
        ),
    ] = 1.0,
    engine: Annotated[
        str, typer.Option(callback=setting("storage.engine"), help="auto, io_uring or threads.")
    ] = "auto",
    alone: Annotated[
        str,
        typer.Option(
            help="Where each of several folders is measured alone, too: at the recommended `point`, `all`, `no`."
        ),
    ] = "point",
    sustained: Annotated[
        bool,
        typer.Option("--sustained", help="Then write on until the drives become slower: their write cache is full."),
    ] = False,
    sustained_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of sustained writes to each folder, at most. "
            f"[default: {format_size(MOST_BYTES)}, or half of the free space if that is less]"
        ),
    ] = None,
    sustained_seconds: Annotated[
        float, typer.Option(min=0.001, max=86400, callback=finite, help="Length of sustained writes, at most.")
    ] = 600.0,
    fio: Annotated[
        bool | None,
        typer.Option("--fio/--no-fio", help="Compare with fio on the same file. [default: if fio is installed]"),
    ] = None,
    runtime: Annotated[
        str, typer.Option("--runtime-dir", help="The daemon's runtime folder. [default: as telemetry.runtime_dir]")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for probe.json, probe.toml and probe.png.")] = None,
    version: Version = False,
) -> None:
    """Measure what drives can do through infinity's own I/O engine, and recommend settings.

    Reads, writes and both mixed, past the page cache, with all folders busy at once and each alone. Prints bandwidth,
    latency and the block of settings to paste; infinityd keeps the result. The files have no names: nothing is left,
    whatever happens. Measuring writes to the drives, how much is said before.

    Exit status: 0 measured, 1 a drive failed, 2 something cannot be measured as asked, 130 interrupted.

    Example: `infinity probe /nvme0 /nvme1 --sustained --out probed`
    """
    if alone not in _ALONE:
        raise ConfigError(f"--alone {alone!r} is none of {', '.join(_ALONE)}")
    if sustained_bytes is not None and not sustained:
        raise ConfigError(f"--sustained-bytes {sustained_bytes} needs --sustained")
    names = tuple(map(str, paths))
    asked = None if sustained_bytes is None else parse_size(sustained_bytes, name="--sustained-bytes")
    ask = Ask(
        paths=names,
        file_bytes=parse_size(size, name="--size"),
        points=points_of(
            list(Load),
            dict.fromkeys(parse_size(text, name="--block") for text in _items(block or [_BLOCK_NAMES], "--block")),
            dict.fromkeys(_whole(text, "--depth") for text in _items(depth or [_DEPTH_NAMES], "--depth")),
        ),
        seconds=seconds,
        engine=engine,
        alone=cast("Literal['point', 'all', 'no']", alone),
        sustained_bytes=bytes_to_sustain(names, asked) if sustained else None,
        sustained_seconds=sustained_seconds,
        fio=_program(fio),
        runtime=runtime_dir(replace(TelemetryConfig(), runtime_dir=runtime)),
    )
    check(ask)
    if out is not None:
        check_out(out)
    if not json:
        announce(Console(stderr=True, highlight=False), ask)
    with open_view(ask, silent=json) as view:
        report = probe_all(ask, view)
    if out is not None:
        from infinity_tools.probe.probe_plot import figure

        texts = {
            "probe.json": json_format.dumps(report.document(), indent=2) + "\n",
            "probe.toml": report.choice.toml(),
        }
        write_out(out, texts, {"probe.png": figure(report)})
    if json:
        typer.echo(json_format.dumps(report.document(), indent=2))
    else:
        show(Console(highlight=False), report, out)


def _items(values: list[str], name: str) -> list[str]:
    items = [item.strip() for value in values for item in value.split(",")]
    if not all(items):
        raise ConfigError(f"{name} {','.join(values)!r} has an empty place; write numbers between the commas")
    return items


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} is not a whole number")
    return int(text)


def _program(wanted: bool | None) -> str | None:
    """Return fio, if it is to be used."""
    found = shutil.which("fio")
    if wanted and found is None:
        raise ConfigError("--fio: fio is not installed; install it (`apt-get install fio`) or leave --fio out")
    return None if wanted is False else found
