"""Tests of the steps of a probe: comparison with the defaults, space check, plot and recommendation."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.config import StorageConfig, load_config
from infinity.errors import BudgetError, ConfigError
from infinity.io.probe import targets
from infinity.io.probe.points import Load, Measurement, Point, latency_of, points_of
from infinity.io.probe.sustained import Sustained
from infinity_tools.probe.probe_plot import figure
from infinity_tools.probe.probe_report import Ask, DaemonRecord, Report
from infinity_tools.probe.recommendation import Choice, best_size, mixed_speeds, settings_block, usual_size
from infinity_tools.probe.work import _Work, check

MIB = 1 << 20
USUAL = (StorageConfig().request_bytes, StorageConfig().queue_depth)
SMALL = (MIB, 1)
POINTS = points_of(list(Load), [MIB, USUAL[0]], [1, USUAL[1]])


def measured(point: Point, read: float, write: float = 0.0) -> Measurement:
    """Return a measurement."""
    return Measurement(
        point=point,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
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


def test_best_size_prefers_defaults_then_smallest() -> None:
    """Speeds within 3 % count as equal."""
    assert usual_size() == USUAL
    for speeds, best in [
        ({USUAL: 100.0, (MIB, 1): 102.9}, USUAL),  # equal: the defaults
        ({USUAL: 100.0, (MIB, 1): 104.0}, (MIB, 1)),
        ({USUAL: 50.0, (MIB, 8): 98.0, (MIB, 32): 100.0}, (MIB, 8)),  # the smallest that is equally fast
        ({USUAL: 50.0, (MIB, 8): 96.0, (MIB, 32): 100.0}, (MIB, 32)),
        ({(4 * MIB, 2): 100.0, (MIB, 8): 100.0}, (MIB, 8)),  # equal bytes in flight: the smaller request
        ({(MIB, 1): 0.0}, (MIB, 1)),
    ]:
        assert best_size(speeds) == best, speeds


def test_mixed_speeds_sum_reads_and_writes_of_all_folders() -> None:
    both, small, read = (
        Point(load=load, block_bytes=MIB, depth=depth)
        for load, depth in ((Load.BOTH, 8), (Load.BOTH, 1), (Load.READ, 8))
    )
    a = [measured(both, 1.0, 2.0), measured(read, 50.0)]
    b = [measured(both, 3.0, 4.0), measured(small, 0.5, 0.5)]
    assert mixed_speeds([a, b]) == {(MIB, 8): 10.0, (MIB, 1): 1.0}


def choice(path: str, **values: object) -> Choice:
    """Return a choice that recommends the defaults, except for `values`."""
    usual: dict[str, object] = {
        "paths": (path,), "block_bytes": USUAL[0], "depth": USUAL[1], "engine": "auto", "bytes_per_second": 1e9,
        "usual_measured": True, "gain": None,
    }  # fmt: skip
    return Choice(**(usual | values))  # type: ignore[arg-type]


def test_recommended_settings_can_be_loaded(tmp_path: Path) -> None:
    """Folder names may contain any character; see `test_written_settings_load_unchanged`."""
    folder = tmp_path / 'qu"o\\te'
    folder.mkdir()
    text = choice(str(folder), block_bytes=3 * MIB + 4096, depth=7, engine="threads").toml()
    expected = StorageConfig(paths=(str(folder),), request_bytes=3 * MIB + 4096, queue_depth=7, engine="threads")
    assert load_config(tomllib.loads(text)).storage == expected


def test_invalid_recommendation_raises_config_error(subtests: pytest.Subtests) -> None:
    for values, says in [
        ({"block_bytes": 1 << 31}, "request_bytes"),
        ({"depth": 5000}, "queue_depth"),
        ({"paths": ("bad\udcff",)}, "TOML"),
        ({"paths": ("missing/deep/er",)}, "cannot be created"),
    ]:
        with subtests.test(says):
            invalid = choice("x", **values)
            with pytest.raises(ConfigError, match=says):
                settings_block(invalid.paths, invalid.block_bytes, invalid.depth, invalid.engine)


def test_reasons_explain_recommendation(tmp_path: Path) -> None:
    path = str(tmp_path)
    said = " ".join(choice(path).reasons())
    assert "2 MiB, 32 in flight, the defaults: " in said
    assert "3%" in said
    assert "only storage.paths" in said
    said = " ".join(choice(path, block_bytes=MIB, depth=1, gain=2.0).reasons())
    assert "1 MiB, 1 in flight: 2.00 times as fast as the defaults" in said
    assert "only storage.paths" not in said
    said = " ".join(choice(path, block_bytes=MIB, usual_measured=False).reasons())
    assert "the defaults (2 MiB, 32) were not measured" in said
