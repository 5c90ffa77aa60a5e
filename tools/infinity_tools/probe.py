"""`infinity probe`: what bandwidth do these folders have, at which request size and depth?"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from infinity.command import Version, finite, setting
from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, Measurement, Progress, points_of
from infinity.node import NodeDaemon
from infinity.units import format_size, parse_size

Results = dict[str, tuple[Measurement, ...]]
"""By folder."""


def probe(
    paths: Annotated[list[Path], typer.Argument(help="Folders to measure, all at the same time.")],
    size: Annotated[str, typer.Option(help="Size of the file written into each folder.")] = "2GiB",
    block: Annotated[
        list[str] | None,
        typer.Option(help="Bytes per request; repeat or separate by commas. [default: 256KiB,1MiB,4MiB]"),
    ] = None,
    depth: Annotated[
        list[str] | None,
        typer.Option(help="Requests in flight; repeat or separate by commas. [default: 1,4,8,16,32]"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, max=3600, callback=finite, help="Length of each measurement.")
    ] = 1.0,
    engine: Annotated[
        str, typer.Option(callback=setting("storage.engine"), help="auto, io_uring or threads.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for probe.json and probe.png.")] = None,
    version: Version = False,
) -> None:
    """Measure read, write and mixed bandwidth of folders through infinity's own I/O engine."""
    file_bytes = parse_size(size, name="--size")
    blocks = [parse_size(text, name="--block") for text in _items(block or ["256KiB,1MiB,4MiB"], "--block")]
    depths = [_whole(text, "--depth") for text in _items(depth or ["1,4,8,16,32"], "--depth")]
    points = points_of(list(Load), blocks, depths)
    with ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=json,
        transient=True,
    ) as bar:
        task = bar.add_task("writing files", total=len(paths) + len(points))

        def show(progress: Progress) -> None:
            speed = sum(found.bytes_per_second for found in progress.latest.values())
            tail = f"  {speed / 1e9:.2f} GB/s" if progress.latest else ""
            bar.update(task, completed=progress.done, description=progress.label + tail)

        names = [str(path) for path in paths]
        results = measure_paths(names, points, file_bytes=file_bytes, seconds=seconds, engine=engine, on_progress=show)
    _tell_daemon(results)
    text = json_format.dumps(_document(results, file_bytes, seconds, engine), indent=2)
    if out is not None:
        _write(out, text, results)
    if json:
        typer.echo(text)
        return
    console = Console()
    for path, measurements in results.items():
        console.print(_table(path, measurements))
    if out is not None:
        console.print(f"wrote {out / 'probe.json'} and {out / 'probe.png'}", markup=False)


def _tell_daemon(results: Results) -> None:
    """Let the node's daemon, if there is one, know what the drives can do: the best of what was measured."""
    rates = {}
    for path, measurements in results.items():
        best = {"read": 0.0, "write": 0.0, "mixed": 0.0}
        for one in measurements:
            name = "mixed" if one.point.load is Load.BOTH else one.point.load.value
            best[name] = max(best[name], one.bytes_per_second)
        rates[str(Path(path).resolve())] = {name: speed for name, speed in best.items() if speed > 0}
    if all(rates.values()):
        NodeDaemon(runtime_dir(TelemetryConfig())).ask("record_bandwidth", rates=rates, source="probe")


def _items(values: list[str], name: str) -> list[str]:
    items = [item.strip() for value in values for item in value.split(",")]
    if not all(items):
        raise ConfigError(f"{name} {','.join(values)!r} has an empty place; write numbers between the commas")
    return items


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} is not a whole number")
    return int(text)


def _document(results: Results, file_bytes: int, seconds: float, engine: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "file_bytes": file_bytes,
        "seconds": seconds,
        "paths": {
            path: [
                {
                    "load": found.point.load.value,
                    "block_bytes": found.point.block_bytes,
                    "depth": found.point.depth,
                    "read_bytes_per_second": round(found.read_bytes_per_second),
                    "write_bytes_per_second": round(found.write_bytes_per_second),
                    "bytes_per_second": round(found.bytes_per_second),
                }
                for found in measurements
            ]
            for path, measurements in results.items()
        },
    }


def _write(out: Path, text: str, results: Results) -> None:
    from infinity_tools.probe_plot import figure

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "probe.json").write_text(text + "\n")
        figure(results).savefig(out / "probe.png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _table(path: str, measurements: tuple[Measurement, ...]) -> Table:
    table = Table(title=f"{path} (GB/s)")
    for heading in ("block", "in flight", *(load.value for load in Load)):
        table.add_column(heading, justify="right")
    best = {load: max(found.bytes_per_second for found in measurements if found.point.load is load) for load in Load}
    rows: dict[tuple[int, int], dict[Load, float]] = {}
    for found in measurements:
        row = rows.setdefault((found.point.block_bytes, found.point.depth), {})
        row[found.point.load] = found.bytes_per_second
    for (block, depth), speeds in rows.items():
        cells = [_cell(speeds[load], best[load]) for load in Load]
        table.add_row(format_size(block), str(depth), *cells)
    return table


def _cell(speed: float, best: float) -> str:
    text = f"{speed / 1e9:.2f}"
    return f"[bold green]{text}[/]" if speed == best else text
