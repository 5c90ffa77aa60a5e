"""Figure `probe.png`: bandwidth and latency per folder, and sustained writes if measured."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infinity.io.probe.points import Load, Measurement
from infinity.io.probe.sustained import Sustained
from infinity.units import format_size
from infinity_tools.probe.probe_report import Report


def figure(report: Report) -> Figure:
    """Draw one row per folder, with a column for each load, for latency and, if measured, for sustained writes."""
    columns = len(Load) + 1 + bool(report.sustained)
    drawn = Figure(figsize=(4 * columns, 3.6 * len(report.together)), layout="constrained")
    grid = drawn.subplots(len(report.together), columns, squeeze=False)
    for row, (path, measurements) in zip(grid, report.together.items(), strict=True):
        for axes, load in zip(row, Load, strict=False):
            _bandwidth(axes, [one for one in measurements if one.point.load is load])
            axes.set_title(_plain(f"{path}: {load.value}"), fontsize="medium")
        highest = max(one.bytes_per_second for one in measurements) / 1e9
        for axes in row[: len(Load)]:
            axes.set_ylim(0, highest * 1.05 or 1)  # same scale for all loads
        row[0].set_ylabel("GB/s")
        row[0].legend(title="bytes per request", fontsize="small")
        _latency(row[len(Load)], [one for one in measurements if one.point.load is Load.BOTH])
        if path in report.sustained:
            _sustained(row[-1], report.sustained[path])
    return drawn


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # an unescaped "$" starts a formula


def _bandwidth(axes: Axes, found: list[Measurement]) -> None:
    for block in dict.fromkeys(one.point.block_bytes for one in found):
        line = sorted((one.point.depth, one.bytes_per_second / 1e9) for one in found if one.point.block_bytes == block)
        axes.plot(*zip(*line, strict=True), marker="o", label=format_size(block))
    _depths(axes, found)


def _latency(axes: Axes, found: list[Measurement]) -> None:
    """Draw the median as solid lines and the 99th percentile as dotted lines."""
    for block in dict.fromkeys(one.point.block_bytes for one in found):
        of = sorted((one for one in found if one.point.block_bytes == block), key=lambda one: one.point.depth)
        depths = [one.point.depth for one in of]
        (line,) = axes.plot(depths, [one.latency.p50 * 1e3 for one in of], marker="o")
        axes.plot(depths, [one.latency.p99 * 1e3 for one in of], linestyle=":", color=line.get_color())
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_title("latency of a mixed request: median, p99 (dotted)", fontsize="medium")
    _depths(axes, found)


def _depths(axes: Axes, found: list[Measurement]) -> None:
    depths = sorted({one.point.depth for one in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths], minor=False)
    axes.set_xlabel("requests in flight")
    axes.grid(alpha=0.3)


def _sustained(axes: Axes, one: Sustained) -> None:
    speeds = [size / 1e9 for size in one.slices]
    written = [sum(one.slices[: number + 1]) / 1e9 for number in range(len(speeds))]
    axes.plot(written, speeds, marker="." if len(speeds) < 100 else "")
    if (fall := one.fall) is not None:
        axes.axvline(fall.written / 1e9, color="tab:red", linestyle="--")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GB written")
    axes.set_ylabel("GB/s")
    axes.set_title("sustained writes", fontsize="medium")
    axes.grid(alpha=0.3)
