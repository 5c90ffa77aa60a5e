"""Measurements of `infinity probe`: all folders together, each folder alone, and comparisons of settings."""

from __future__ import annotations

from typing import Protocol

from infinity.config import StorageConfig
from infinity.daemon_client import NodeDaemon
from infinity.errors import BudgetError, ConfigError
from infinity.io.probe.bench import Bench, label_of, open_bench
from infinity.io.probe.points import Load, Measurement, Point, points_of
from infinity.io.probe.sustained import Sustained, sustain
from infinity.io.probe.targets import Target, check_targets
from infinity.units import format_size
from infinity_tools.probe.fio import FioError, run_fio
from infinity_tools.probe.probe_report import FIO_START_SECONDS, Ask, Report
from infinity_tools.probe.recommendation import (
    Choice,
    Size,
    absolute,
    best_size,
    mixed_speeds,
    settings_block,
    usual_size,
)
from infinity_tools.probe.rounds import AlternatingRounds, alternate
from infinity_tools.probe.stored_results import end_measuring, tell_daemon


class View(Protocol):
    """Display of the progress of measurements."""

    def step(self, what: str, seconds: float) -> None:
        """Display an activity that has finished, and advance by its planned duration."""

    def writes_on(self, written: int, seconds: float) -> None:
        """Display the bytes written to all folders by sustained writes, and the seconds since they started."""


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


def probe_all(ask: Ask, view: View) -> Report:
    """Run all measurements, report the results to the node's daemon, and return them.

    Raises the same exceptions as `infinity.io.probe.bench.measure_paths`.
    """

    def filled(target: Target) -> None:
        view.step(f"{target.path}: wrote {format_size(target.file_bytes)}", 0.0)

    daemon = NodeDaemon(ask.runtime)
    end_measuring(daemon, ask.paths)
    with open_bench(ask.paths, ask.points, file_bytes=ask.file_bytes, engine=ask.engine, on_filled=filled) as bench:
        work = _Work(ask, view, bench)
        together = work.measured(ask.points)
        choice = work.choice(together)
        points = ask.points if ask.alone == "all" else _at(choice)
        alone = {path: work.measured(points, path)[path] for path in ask.paths} if ask.alone_points else {}
        fio, fio_error = work.against_fio(choice)
        engine, written = next(iter(bench.targets.values())).engine.name, dict(bench.written)
    sustained = _sustained(ask, view, choice)
    return Report(
        ask=ask,
        engine=engine,
        together=together,
        alone=alone,
        choice=choice,
        fio=fio,
        fio_error=fio_error,
        sustained=sustained,
        written={path: size + (sustained[path].written if sustained else 0) for path, size in written.items()},
        kept=tell_daemon(daemon, together, alone),
    )


def _at(choice: Choice) -> tuple[Point, ...]:
    return points_of(list(Load), [choice.block_bytes], [choice.depth])


class _Work:
    """Measurements with the same test files. Each measurement updates the view."""

    def __init__(self, ask: Ask, view: View, bench: Bench) -> None:
        self._ask, self._view, self._bench = ask, view, bench

    def measured(self, points: tuple[Point, ...], *paths: str) -> dict[str, tuple[Measurement, ...]]:
        """Measure the given folders (by default all folders) together at the given points."""
        found: dict[str, list[Measurement]] = {path: [] for path in paths or self._ask.paths}
        for point in points:
            for path, one in self._once(self._bench, point, *paths).items():
                found[path].append(one)
        return {path: tuple(measurements) for path, measurements in found.items()}

    def choice(self, together: dict[str, tuple[Measurement, ...]]) -> Choice:
        """Return the settings to recommend, after comparing the candidate with the defaults in alternating rounds."""
        speeds, usual = mixed_speeds(together.values()), usual_size()
        size, sizes = best_size(speeds), None
        if size != usual and usual in speeds:
            sizes = alternate(lambda: self._mixed(self._bench, size), lambda: self._mixed(self._bench, usual))
            if not sizes.is_first_faster():
                size, sizes = usual, None
        engines = self._engines(size)
        return Choice(
            paths=absolute(self._ask.paths),
            block_bytes=size[0],
            depth=size[1],
            engine="threads" if engines is not None and engines.is_first_faster() else self._ask.engine,
            bytes_per_second=speeds[size],
            usual_measured=usual in speeds,
            sizes=sizes,
            engines=engines,
        )

    def _engines(self, size: Size) -> AlternatingRounds | None:
        """Compare the threads engine with io_uring in alternating rounds. Return None if the engine is not to be
        chosen."""
        used = {target.engine.name for target in self._bench.targets.values()}
        if self._ask.engine != StorageConfig().engine or used != {"io_uring"}:
            return None
        with self._bench.through("threads", _mixed_point(size)) as threads:
            return alternate(lambda: self._mixed(threads, size), lambda: self._mixed(self._bench, size))

    def against_fio(self, choice: Choice) -> tuple[dict[Load, AlternatingRounds], str]:
        """Compare infinity with fio in alternating rounds on the first folder. Return the results, or a reason if that
        failed."""
        found: dict[Load, AlternatingRounds] = {}
        if (program := self._ask.fio) is None:
            return found, ""
        path, seconds = self._ask.paths[0], self._ask.seconds
        target, most = self._bench.targets[path], self._ask.file_bytes

        def by_fio(point: Point) -> float:
            self._view.step(f"fio, {label_of(point)}", 0.0)
            done = run_fio(program, target, point, seconds, most)
            self._bench.written[path] += done.written
            self._view.step(f"fio, {label_of(point)}", seconds + FIO_START_SECONDS)
            return done.bytes_per_second

        try:
            for point in _at(choice):
                found[point.load] = alternate(
                    lambda point=point: self._once(self._bench, point, path)[path].bytes_per_second,  # type: ignore[misc]
                    lambda point=point: by_fio(point),  # type: ignore[misc]
                )
        except FioError as error:
            return {}, str(error)
        return found, ""

    def _mixed(self, bench: Bench, size: Size) -> float:
        return sum(one.bytes_per_second for one in self._once(bench, _mixed_point(size)).values())

    def _once(self, bench: Bench, point: Point, *paths: str) -> dict[str, Measurement]:
        """Measure once. Writes are limited to the size of the test file, as announced to the user."""
        found = bench.measure(
            point, seconds=self._ask.seconds, most_written=max(point.flight, self._ask.file_bytes), paths=paths
        )
        speed = sum(one.bytes_per_second for one in found.values())
        self._view.step(f"{label_of(point)}  {speed / 1e9:.2f} GB/s", self._ask.seconds)
        return found


def _mixed_point(size: Size) -> Point:
    return Point(load=Load.BOTH, block_bytes=size[0], depth=size[1])


def _sustained(ask: Ask, view: View, choice: Choice) -> dict[str, Sustained]:
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
