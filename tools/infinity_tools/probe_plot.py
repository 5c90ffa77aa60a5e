"""`probe.png`: the bandwidth of folders."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from infinity.io.probe.points import Load, Measurement
from infinity.units import format_size


def figure(results: dict[str, tuple[Measurement, ...]]) -> Figure:
    """Draw bandwidth against requests in flight: a row for each folder, a column for each load."""
    drawn = Figure(figsize=(12, 3.6 * len(results)), layout="constrained")
    FigureCanvasAgg(drawn)
    grid = drawn.subplots(len(results), len(Load), sharex=True, sharey="row", squeeze=False)
    for row, (path, measurements) in zip(grid, results.items(), strict=True):
        for axes, load in zip(row, Load, strict=True):
            _panel(axes, [found for found in measurements if found.point.load is load])
            axes.set_title(f"{path}: {load.value}")
        row[0].set_ylabel("GB/s")
        row[0].set_ylim(bottom=0)  # after all lines of the row, which share the scale
        row[0].legend(title="bytes per request")
    for axes in grid[-1]:
        axes.set_xlabel("requests in flight")
    return drawn


def _panel(axes: Axes, found: list[Measurement]) -> None:
    for block in dict.fromkeys(item.point.block_bytes for item in found):
        line = sorted(
            (item.point.depth, item.bytes_per_second / 1e9) for item in found if item.point.block_bytes == block
        )
        axes.plot(*zip(*line, strict=True), marker="o", label=format_size(block))
    depths = sorted({item.point.depth for item in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths], minor=False)
    axes.grid(alpha=0.3)
