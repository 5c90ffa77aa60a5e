"""Measurements of `infinity probe`: all folders together, each folder alone, and comparisons of settings."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from infinity.daemon_client import NodeDaemon
from infinity.errors import BudgetError, ConfigError
from infinity.io.probe.bench import Bench, label_of, open_bench
from infinity.io.probe.points import MARGIN, Load, Measurement, Point, points_of
from infinity.io.probe.sustained import Sustained, sustain
from infinity.io.probe.targets import Target, check_targets
from infinity.units import format_size
from infinity_tools.probe.probe_report import Ask, DaemonRecord, Found, Report
from infinity_tools.probe.recommendation import (
    ROUNDS,
    Choice,
    Size,
    absolute,
    best_size,
    mixed_speeds,
    settings_block,
    usual_size,
)
from infinity_tools.probe.shown import Bar


def check(ask: Ask) -> None:
    """Check that all requested points can be measured and recommended, without creating a file.

    Raises:
        ConfigError: if a folder, size or duration is invalid.
        BudgetError: if there is not enough free space on a drive.
    """
    check_targets(ask.paths, ask.points, ask.file_bytes, ask.engine)
    for point in ask.points:
        settings_block(absolute(ask.paths), point.block_bytes, point.depth, ask.engine)
    if ask.sustained_bytes is not None:
        largest = max(ask.points, key=lambda point: point.flight)
        try:
            check_targets(ask.paths, [largest], ask.sustained_bytes, ask.engine)
            # The first file has been deleted by then, but file systems may release its space with a delay.
            check_targets(ask.paths, [largest], ask.sustained_bytes + ask.file_bytes, ask.engine)
        except (ConfigError, BudgetError) as error:
            raise type(error)(f"--sustained-bytes: {error}") from error


def probe_all(ask: Ask, view: Bar) -> Report:
    """Run all measurements, report the results to the node's daemon, and return them.

    Raises the same exceptions as `infinity.io.probe.bench.measure_paths`.
    """

    def filled(target: Target) -> None:
        view.step(f"{target.path}: wrote {format_size(target.file_bytes)}", 0.0)

    daemon = NodeDaemon(ask.runtime)
    # The daemon stops its own measurements of drives whose profiles are requested.
    daemon.ask("bandwidth", paths=[str(Path(path).resolve()) for path in ask.paths])
    with open_bench(ask.paths, ask.points, file_bytes=ask.file_bytes, engine=ask.engine, on_filled=filled) as bench:
        work = _Work(ask, view, bench)
        together = work.measured(ask.points)
        choice = work.choice(together)
        chosen = points_of(list(Load), [choice.block_bytes], [choice.depth])
        alone = {path: work.measured(chosen, path)[path] for path in ask.paths} if ask.alone_points else {}
        engine, written = next(iter(bench.targets.values())).engine.name, dict(bench.written)
    sustained = _sustained(ask, view, choice)
    return Report(
        ask=ask,
        engine=engine,
        together=together,
        alone=alone,
        choice=choice,
        sustained=sustained,
        written={path: size + (sustained[path].written if sustained else 0) for path, size in written.items()},
        kept=_tell_daemon(daemon, together, alone),
    )


class _Work:
    """Measurements with the same test files. Each measurement updates the view."""

    def __init__(self, ask: Ask, view: Bar, bench: Bench) -> None:
        self._ask, self._view, self._bench = ask, view, bench

    def measured(self, points: tuple[Point, ...], *paths: str) -> dict[str, tuple[Measurement, ...]]:
        """Measure the given folders (by default all folders) together at the given points."""
        found: dict[str, list[Measurement]] = {path: [] for path in paths or self._ask.paths}
        for point in points:
            for path, one in self._once(point, *paths).items():
                found[path].append(one)
        return {path: tuple(measurements) for path, measurements in found.items()}

    def choice(self, together: dict[str, tuple[Measurement, ...]]) -> Choice:
        """Return the settings to recommend, after comparing the candidate with the defaults in alternating rounds."""
        speeds, usual = mixed_speeds(together.values()), usual_size()
        size, gain = best_size(speeds), None
        if size != usual and usual in speeds:
            # The order (A, B, A, B) makes other load on the drive affect both equally.
            rounds = [(self._mixed(size), self._mixed(usual)) for _ in range(ROUNDS)]
            candidate, default = (median(column) for column in zip(*rounds, strict=True))
            if candidate > (1 + MARGIN) * default > 0:
                gain = candidate / default
            else:
                size = usual
        return Choice(
            paths=absolute(self._ask.paths),
            block_bytes=size[0],
            depth=size[1],
            engine=self._ask.engine,
            bytes_per_second=speeds[size],
            usual_measured=usual in speeds,
            gain=gain,
        )

    def _mixed(self, size: Size) -> float:
        point = Point(load=Load.BOTH, block_bytes=size[0], depth=size[1])
        return sum(one.bytes_per_second for one in self._once(point).values())

    def _once(self, point: Point, *paths: str) -> dict[str, Measurement]:
        """Measure once. Writes are limited to the size of the test file, as announced to the user."""
        found = self._bench.measure(
            point, seconds=self._ask.seconds, most_written=max(point.flight, self._ask.file_bytes), paths=paths
        )
        speed = sum(one.bytes_per_second for one in found.values())
        self._view.step(f"{label_of(point)}  {speed / 1e9:.2f} GB/s", self._ask.seconds)
        return found


def _sustained(ask: Ask, view: Bar, choice: Choice) -> dict[str, Sustained]:
    if ask.sustained_bytes is None:
        return {}
    return sustain(
        ask.paths,
        choice.block_bytes,
        choice.depth,
        most_bytes=ask.sustained_bytes,
        most_seconds=ask.sustained_seconds,
        engine=choice.engine,
        on_progress=lambda written, seconds: view.writes_on(sum(written.values()), seconds),
    )


def _tell_daemon(daemon: NodeDaemon, together: Found, alone: Found) -> DaemonRecord:
    """Report to the daemon the best result for each I/O workload. Return whether it stored all of them."""
    asked = [_best_rates(together), *(_best_rates({path: found}) for path, found in alone.items())]
    answers = [daemon.ask("record_bandwidth", rates=rates, source="probe") for rates in asked if all(rates.values())]
    if answers and all(answers):
        return DaemonRecord(done=True, says="infinityd stored the result for use by runs and `infinity status`")
    if daemon.ask("state") is None:
        return DaemonRecord(
            done=False,
            says="the result was not stored, because no infinityd of this user or root is running on this node",
        )
    return DaemonRecord(done=False, says="infinityd did not store the result; see its log for the reason")


def _best_rates(found: Found) -> dict[str, dict[str, float]]:
    """Return the best throughput for each load in bytes per second, by folder."""
    rates: dict[str, dict[str, float]] = {}
    for path, measurements in found.items():
        best = rates.setdefault(str(Path(path).resolve()), {})
        for one in measurements:
            if one.bytes_per_second > 0:
                load = one.point.load.value
                best[load] = max(best.get(load, 0.0), one.bytes_per_second)
    return rates
