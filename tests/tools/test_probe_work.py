"""Tests of the steps of a probe: comparison with the defaults, space check and plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.config import StorageConfig
from infinity.errors import BudgetError
from infinity.io.probe import targets
from infinity.io.probe.points import Load, Measurement, Point, latency_of, points_of
from infinity.io.probe.sustained import Sustained
from infinity_tools.probe.probe_plot import figure
from infinity_tools.probe.probe_report import Ask, DaemonRecord, Report
from infinity_tools.probe.recommendation import Choice
from infinity_tools.probe.work import _Work, check

MIB = 1 << 20
USUAL = (StorageConfig().request_bytes, StorageConfig().queue_depth)
SMALL = (MIB, 1)
POINTS = points_of(list(Load), [MIB, USUAL[0]], [1, USUAL[1]])


def measured(point: Point, speed: float) -> Measurement:
    """Return a measurement."""
    return Measurement(
        point=point,
        read_bytes_per_second=speed,
        write_bytes_per_second=0.0,
        seconds=1.0,
        latency=latency_of([1e-3]),
    )


class FakeBench:
    """Bench with scripted speeds, by size and number of measurements."""

    def __init__(self, speed: Callable[[tuple[int, int], int], float]) -> None:
        self.speed = speed
        self.asked: Counter[tuple[int, int]] = Counter()

    def measure(self, point: Point, *, seconds: float, most_written: int, paths: Sequence[str]) -> Any:
        assert most_written >= point.flight
        size = point.block_bytes, point.depth
        if point.load is Load.BOTH:
            self.asked[size] += 1
        return {"d": measured(point, self.speed(size, self.asked[size]))}


def ask_for(**values: object) -> Ask:
    """Return the parameters of a probe of one folder."""
    usual: dict[str, object] = {
        "paths": ("d",), "file_bytes": MIB, "points": POINTS, "seconds": 1.0, "engine": "auto",
        "sustained_bytes": None, "sustained_seconds": 1.0, "runtime": Path("none"),
    }  # fmt: skip
    return Ask(**(usual | values))  # type: ignore[arg-type]


def chosen(bench: FakeBench, **values: object) -> Choice:
    """Return the choice after all measurements on `bench`."""
    ask = ask_for(**values)
    view = SimpleNamespace(step=lambda what, seconds: None)
    work = _Work(ask, view, bench)  # type: ignore[arg-type]
    return work.choice(work.measured(ask.points))


def test_defaults_are_kept_if_nothing_is_faster() -> None:
    bench = FakeBench(lambda size, time: 100.0)
    choice = chosen(bench)
    assert (choice.block_bytes, choice.depth, choice.engine) == (*USUAL, "auto")
    assert choice.is_usual
    assert choice.gain is None
    assert set(bench.asked.values()) == {1}


def test_single_fast_measurement_is_not_recommended() -> None:
    choice = chosen(FakeBench(lambda size, time: 200.0 if size == SMALL and time == 1 else 100.0))
    assert choice.is_usual
    assert choice.gain is None


def test_confirmed_faster_size_is_recommended() -> None:
    """The reported gain comes from the confirmation rounds."""
    choice = chosen(FakeBench(lambda size, time: (200.0 if time == 1 else 150.0) if size == SMALL else 100.0))
    assert (choice.block_bytes, choice.depth) == SMALL
    assert choice.gain == pytest.approx(1.5)


def test_unmeasured_defaults_are_not_recommended() -> None:
    choice = chosen(FakeBench(lambda size, time: 100.0), points=points_of(list(Load), [MIB], [1, 4]))
    assert (choice.block_bytes, choice.depth) == SMALL
    assert not choice.usual_measured
    assert choice.gain is None


def test_space_check_counts_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may free the first file only after the second one has been created."""
    monkeypatch.setattr(targets, "free_space", lambda folder: 100 * MIB)
    ask = ask_for(paths=(str(tmp_path),), points=points_of([Load.BOTH], [MIB], [1]), file_bytes=40 * MIB)
    check(ask)
    check(replace(ask, sustained_bytes=40 * MIB))
    with pytest.raises(BudgetError, match=r"--sustained-bytes: .*100 MiB free, 106 MiB needed"):
        check(replace(ask, sustained_bytes=50 * MIB))


def report(sustained: dict[str, Sustained]) -> Report:
    """Return a report of two folders."""
    found = {path: tuple(measured(point, 1e9) for point in POINTS) for path in ("a $x$ y", "b")}
    choice = chosen(FakeBench(lambda size, time: 100.0))
    return Report(
        ask=ask_for(paths=tuple(found)), engine="io_uring", together=found, alone={}, choice=choice,
        sustained=sustained, written={}, kept=DaemonRecord(done=False, says=""),
    )  # fmt: skip


def test_plot_has_panel_for_each_measurement() -> None:
    """Sustained writes have a panel only if they were measured, with a line where the rate drops."""
    assert [len(axes.lines) for axes in figure(report({})).axes] == [2, 2, 2, 4] * 2
    for falls in (True, False):
        slices = (100,) * 20 + ((10,) * 20 if falls else ())
        one = Sustained(written=sum(slices), measurement=measured(POINTS[0], 1.0), slices=slices)
        drawn = figure(report({"a $x$ y": one, "b": one}))
        assert [len(axes.lines) for axes in drawn.axes] == [2, 2, 2, 4, 1 + falls] * 2
        drawn.canvas.draw()
