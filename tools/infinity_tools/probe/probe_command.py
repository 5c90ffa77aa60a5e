"""The command `infinity probe`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite, setting
from infinity.errors import ConfigError
from infinity.io.probe.points import Load, points_of
from infinity.io.probe.sustained import MOST_BYTES, bytes_to_sustain
from infinity.units import KIB, MIB, format_size, parse_size
from infinity_tools.output import check_out, write_out
from infinity_tools.probe.probe_report import Ask
from infinity_tools.probe.recommendation import usual_size
from infinity_tools.probe.shown import announce, open_view, show
from infinity_tools.probe.work import check, probe_all
from infinity_tools.shared_options import Json, Runtime, runtime_folder

_PAGE_BYTES = 8 * MIB  # usual page size, transferred in one request
_BLOCKS = sorted({256 * KIB, MIB, usual_size()[0], _PAGE_BYTES})
_DEPTHS = sorted({1, 8, usual_size()[1]})
_BLOCK_NAMES = ", ".join(format_size(block).replace(" ", "") for block in _BLOCKS)
_DEPTH_NAMES = ", ".join(map(str, _DEPTHS))


def probe(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Folders whose drives are measured, one folder per drive.")
    ] = None,
    interconnect: Annotated[
        bool,
        typer.Option(
            "--interconnect",
            help="Instead of drives, measure the collectives of FSDP2 between the ranks that torchrun has started.",
        ),
    ] = False,
    size: Annotated[str, typer.Option(help="Size of the test file in each folder.")] = "2GiB",
    block: Annotated[
        list[str] | None, typer.Option(help=f"Request sizes, separated by commas. [default: {_BLOCK_NAMES}]")
    ] = None,
    depth: Annotated[
        list[str] | None,
        typer.Option(help=f"Numbers of requests in flight, separated by commas. [default: {_DEPTH_NAMES}]"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=3600,
            callback=finite,
            help="Duration of each measurement. Writes stop earlier if --size bytes have been written.",
        ),
    ] = 1.0,
    engine: Annotated[
        str, typer.Option(callback=setting("storage.engine"), help="I/O engine: auto, io_uring or threads.")
    ] = "auto",
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained",
            help="Also write continuously until the throughput drops because the drive's write cache is full.",
        ),
    ] = False,
    sustained_bytes: Annotated[
        str | None,
        typer.Option(
            help="Maximum size of sustained writes per folder. "
            f"[default: {format_size(MOST_BYTES)}, or half of the free space if less]"
        ),
    ] = None,
    sustained_seconds: Annotated[
        float, typer.Option(min=0.001, max=86400, callback=finite, help="Maximum duration of sustained writes.")
    ] = 600.0,
    runtime: Runtime = "",
    json: Json = False,
    out: Annotated[Path | None, typer.Option(help="Write probe.json, probe.toml and probe.png to this folder.")] = None,
    version: Version = False,
) -> None:
    """Measure the bandwidth of drives with infinity's I/O engine, and recommend settings.

    Measures direct reads, direct writes and a mix of both, first on all folders at the same time and then on each
    folder alone, with the recommended settings. Prints bandwidth, latency and recommended settings in TOML. If
    infinityd is running, it stores the result. Test files have no names, so they disappear even if the process is
    killed. The amount of data to be written is printed before the measurements start.

    With --interconnect, no drives are measured. Start the command on all nodes with torchrun. Rank 0 prints the time of
    each collective, and with --out writes interconnect.json for `infinity plan --interconnect`.

    Exit status: 0 on success, 1 if a drive fails, 2 if an option is invalid, 130 if interrupted.

    Example: `infinity probe /nvme0 /nvme1 --sustained --out probed`
    """
    if interconnect:
        _check_interconnect(paths, sustained=sustained)
        from infinity_tools.probe.interconnect import probe_interconnect

        probe_interconnect(seconds, out, json=json)
        return
    if not paths:
        raise ConfigError("no folder given; pass a folder on each drive, or --interconnect")
    if sustained_bytes is not None and not sustained:
        raise ConfigError(f"--sustained-bytes {sustained_bytes} requires --sustained")
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
        sustained_bytes=bytes_to_sustain(names, asked) if sustained else None,
        sustained_seconds=sustained_seconds,
        runtime=runtime_folder(runtime),
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


def _check_interconnect(paths: list[Path] | None, *, sustained: bool) -> None:
    for name, given in ((f"folder {str(paths[0])!r}" if paths else "", paths), ("--sustained", sustained)):
        if given:
            raise ConfigError(f"{name} cannot be combined with --interconnect; measure drives separately")


def _items(values: list[str], name: str) -> list[str]:
    items = [item.strip() for value in values for item in value.split(",")]
    if not all(items):
        raise ConfigError(f"{name} {','.join(values)!r} contains an empty item; write a value between commas")
    return items


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} is not a whole number")
    return int(text)
