"""`summary.png`: loss, and time per step by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infinity.untrusted_files import replacing
from infinity_tools.progress import short

_PARTS = (
    ("compute", "compute_seconds", "#4477aa"),
    ("update", "update_seconds", "#228833"),
    ("copy", "copy_seconds", "#66ccee"),
    ("collective", "collective_seconds", "#aa3377"),
    ("python", "python_seconds", "#bbbbbb"),
    ("read stall", "read_stall_seconds", "#ee6677"),
    ("write stall", "write_stall_seconds", "#ccbb44"),
    ("host cache stall", "host_cache_stall_seconds", "#ee8833"),
)

_BARS = 100
"""Maximum number of steps drawn as bars. Each bar is a separate object, so plotting thousands would take a minute."""


def write_picture(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.png` from the content of `summary.json`, atomically. Raises `OSError`."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    records = summary["step_records"]
    _loss(left, summary["losses"], summary["eval_losses"])
    _time(right, [record["step"] for record in records], records)  # a long run only has records of its last steps
    figure.suptitle(f"{summary['model']} · {short(summary['parameters'])} parameters · run {summary['run_id']}")
    with replacing(out / "summary.png", 0o666) as file:
        figure.savefig(file, format="png", dpi=120)


def _loss(axes: Axes, losses: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> None:
    mark = "o" if len(losses) <= 50 else ""
    if losses:
        axes.plot(*zip(*losses, strict=True), color="#4477aa", marker=mark, markersize=4, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#ee6677", marker="s", markersize=4, label="evaluation")
        axes.legend(frameon=False)
    axes.set_title("loss")
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _time(axes: Axes, steps: list[int], records: list[dict[str, Any]]) -> None:
    base = [0.0] * len(steps)
    for name, key, color in _PARTS:
        heights = [record[key] for record in records]
        tops = [low + height for low, height in zip(base, heights, strict=True)]
        if len(steps) <= _BARS:
            axes.bar(steps, heights, bottom=base, color=color, label=name)
        else:
            axes.fill_between(steps, base, tops, step="mid", linewidth=0, color=color, label=name)
        base = tops
    axes.set_title("seconds per step")
    axes.set_ylim(0, 1.3 * max(base, default=1.0))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.legend(ncols=4, loc="upper center", frameon=False, fontsize="small", columnspacing=1.2)
