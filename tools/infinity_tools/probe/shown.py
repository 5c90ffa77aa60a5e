"""Terminal output of `infinity probe`: announcement, progress and results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table
from rich.text import Text

from infinity.io.probe.points import Load, Measurement
from infinity.units import format_size
from infinity_tools.probe.probe_report import Ask, Report, sustained_words
from infinity_tools.probe.recommendation import usual_size
from infinity_tools.tables import table


def announce(console: Console, ask: Ask) -> None:
    """Print the maximum duration and the maximum number of bytes written."""
    plan = ask.plan
    console.print(
        f"up to {plan.measurements} measurements of {ask.seconds:g} s: {duration(plan.seconds)}, plus the time to "
        f"write {format_size(ask.file_bytes)} to each folder",
        markup=False,
    )
    if ask.sustained_bytes is not None:
        console.print(
            f"then sustained writes: up to {format_size(ask.sustained_bytes)} per folder, for up to "
            f"{duration(plan.sustained_seconds)}",
            markup=False,
        )
    for path, size in plan.written.items():
        console.print(f"writes up to {format_size(size)} to {path}, which adds to the wear of the drive", markup=False)


def duration(seconds: float) -> str:
    """Return a duration in its one or two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


class Bar:
    """Progress bar that shows the elapsed fraction of the planned duration, and the remaining time."""

    def __init__(self, bar: ProgressBar, ask: Ask) -> None:
        self._bar, self._ask = bar, ask
        self._total, self._done = ask.plan.seconds, 0.0
        self._task = bar.add_task("writing files", total=self._total, left=duration(self._total))

    def step(self, what: str, seconds: float) -> None:
        """Display an activity that has finished, and advance by its planned duration."""
        self._done = min(self._total, self._done + seconds)
        left = f"{duration(self._total - self._done)} left"
        self._bar.update(self._task, completed=self._done, description=escape(what), left=left)

    def writes_on(self, written: int, seconds: float) -> None:
        """Display the progress of sustained writes."""
        most = (self._ask.sustained_bytes or 0) * len(self._ask.paths)
        share = max(written / most, seconds / self._ask.sustained_seconds) if most else 1.0
        left = f"{duration(seconds * (1 - share) / share)} left or less" if share > 0 else ""
        what = f"sustained writes {format_size(written)}  {written / max(seconds, 1e-9) / 1e9:.2f} GB/s"
        self._bar.update(self._task, completed=share, total=1.0, description=what, left=left)


@contextmanager
def open_view(ask: Ask, *, silent: bool) -> Iterator[Bar]:
    """Display a progress bar on stderr while the context is active."""
    with ProgressBar(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(16),
        TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
        console=Console(stderr=True),
        disable=silent,
        transient=True,
    ) as bar:
        yield Bar(bar, ask)


def show(console: Console, report: Report, out: Path | None) -> None:
    """Print the results."""
    for path, measurements in report.together.items():
        busy = ", all folders busy at once" if len(report.together) > 1 else ""
        _print_table(
            console, f"{path}{busy}: throughput in GB/s, and latency of mixed requests in ms", _points(measurements)
        )
    if report.alone:
        _print_table(
            console, "GB/s with the recommended settings: each folder alone, and all folders together", _alone(report)
        )
        console.print(Text(_share_words(report)), end="\n\n")
    for path, one in report.sustained.items():
        console.print(Text(f"sustained writes, {path}: {sustained_words(one)}"))
    if report.sustained:
        console.print()
    written = ", ".join(f"{format_size(size)} to {path}" for path, size in report.written.items())
    console.print(Text(f"written: {written}"))
    console.print(Text(report.kept.says), end="\n\n")
    for reason in report.choice.reasons():
        console.print(Text(reason))
    console.print(Text("settings for `infinity train --config` or `infinity.offload`:"))
    console.print(Text(report.choice.toml(), style="bold green"), soft_wrap=True)
    if out is not None:
        console.print(Text(f"wrote {out / 'probe.json'}, {out / 'probe.toml'} and {out / 'probe.png'}"))


def _print_table(console: Console, title: str, rows: Table) -> None:
    console.print(
        Text(title, style="bold")
    )  # printed separately, because a table title is wrapped to the width of the table
    console.print(rows)
    console.print()


def _points(measurements: tuple[Measurement, ...]) -> Table:
    headings = (">block", ">depth", *(f">{load.value}" for load in Load), ">p50", ">p95", ">p99", ">max")
    made = table("", headings, ())
    best = {load: max(one.bytes_per_second for one in measurements if one.point.load is load) for load in Load}
    rows: dict[tuple[int, int], dict[Load, Measurement]] = {}
    for one in measurements:
        rows.setdefault((one.point.block_bytes, one.point.depth), {})[one.point.load] = one
    for (block, depth), found in rows.items():
        rates = {load: found[load].bytes_per_second for load in Load}
        speeds = [
            Text(f"{rate / 1e9:.2f}", style="bold green" if rate == best[load] else "") for load, rate in rates.items()
        ]
        took = found[Load.BOTH].latency
        times = [milliseconds(one) for one in (took.p50, took.p95, took.p99, took.longest)]
        style = "bold" if (block, depth) == usual_size() else ""
        made.add_row(Text(format_size(block)), Text(str(depth)), *speeds, *map(Text, times), style=style)
    if usual_size() in rows:
        made.caption = f"bold: the defaults, {format_size(usual_size()[0])} and {usual_size()[1]} in flight"
        made.caption_justify = "left"
    return made


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, with about three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _alone(report: Report) -> Table:
    headings = ("folder", *(f">{text}" for load in Load for text in (load.value, "together")))
    rows = []
    for path in report.ask.paths:
        found = (report.at_choice(of, path, load) for load in Load for of in (report.alone, report.together))
        rows.append((path, *("-" if one is None else f"{one.bytes_per_second / 1e9:.2f}" for one in found)))
    return table("", headings, rows)


def _share_words(report: Report) -> str:
    shares = ((load.value, report.share(load)) for load in Load)
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
    return f"all folders together, relative to the sum of the folders alone: {said or 'not measured'}"
