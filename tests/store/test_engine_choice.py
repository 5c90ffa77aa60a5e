"""Tests of `storage.engine = "auto"`: the measurement, the choice, the stored result, and failed measurements."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.config import StorageConfig
from infinity.errors import StorageError
from infinity.io import open_engine
from infinity.io.probe import targets
from infinity.io.probe.points import Load, Point
from infinity.io.ring import Ring, RingRefusedError
from infinity.store import engine_choice
from infinity.store.engine_choice import CACHE_NAME, LEAST_STATE, ROUNDS, EngineChoice, Found, alternate, choose_engine
from support.ranks import RankPool
from support.train import Outcome, Paging, Recipe, offloaded, train

MIB = 1 << 20
POINT = Point(load=Load.BOTH, block_bytes=64 << 10, depth=4)


def measure_rounds(*ratios: float) -> tuple[Found, int]:
    """Measure rounds in which threads are `ratios` times as fast; return the result and the number of rounds."""
    speeds = iter(ratios)
    order: list[str] = []

    def threads() -> float:
        order.append("threads")
        return 100.0 * next(speeds)

    def rings() -> float:
        order.append("io_uring")
        return 100.0

    found = alternate(threads, rings)
    assert (
        order == [*["threads", "io_uring", "io_uring", "threads"] * ROUNDS][: len(order)]
    )  # each engine goes first in half of the rounds
    return found, len(order) // 2


@pytest.mark.parametrize(
    ("ratios", "threads", "measured"),
    [
        ([1.04] * 8, True, 8),
        ([1.04] * 7 + [0.5], True, 8),
        ([0.5] + [1.04] * 7, True, 8),
        ([1.5] * 6 + [1.02, 0.9], False, 8),
        ([1.02] * 8, False, 2),  # within the margin
        ([0.9, 1.5, 0.9] + [1.5] * 5, False, 3),  # the median of all rounds would be above the margin
        ([0.5] * 8, False, 2),
    ],
)
def test_threads_are_chosen_only_if_significantly_faster(ratios: list[float], threads: bool, measured: int) -> None:
    """The measurement ends as soon as the remaining rounds cannot change the result."""
    found, count = measure_rounds(*ratios)
    assert (found.threads, count) == (threads, measured)
    assert found.ratio == pytest.approx(sorted(ratios[:count])[count // 2], rel=0.4)


@pytest.mark.parametrize(("rounds", "threads"), [(1, False), (4, False), (5, True)])
def test_measurement_time_is_limited(rounds: int, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow drive gets fewer rounds, and too few rounds prove no advantage."""
    looks = iter(range(100))
    step = engine_choice._ALL_SECONDS / (rounds - 0.5)
    monkeypatch.setattr(engine_choice.time, "monotonic", lambda: max(0, next(looks) - 1) * step)
    found, measured = measure_rounds(*[1.5] * 8)
    assert (found.threads, measured) == (threads, rounds)


@pytest.fixture
def storage(tmp_path: Path) -> StorageConfig:
    """Storage settings with two folders."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return StorageConfig(paths=(str(tmp_path / "a"), str(tmp_path / "b")))


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """Runtime folder that does not exist yet."""
    return tmp_path / "runtime"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the measurement by the last item of the list, and insert each requested point at the front."""
    results: list[Any] = [Found(1.2, True)]

    def measure(storage: StorageConfig, point: Point) -> Found:
        results.insert(0, point)
        if isinstance(results[-1], Exception):
            raise results[-1]
        return results[-1]

    monkeypatch.setattr(engine_choice, "measure_engines", measure)
    return results


def choose(storage: StorageConfig, runtime: Path, state: int = LEAST_STATE) -> EngineChoice:
    """Choose the engine for a run with pages of 2 MiB."""
    return choose_engine(storage, 2 * MIB, state, runtime)


def test_measurement_is_stored_by_drive_and_request_size(
    storage: StorageConfig, runtime: Path, measured: list[Any], tmp_path: Path
) -> None:
    """Another folder on the same drives reuses the stored result."""
    first = choose(storage, runtime)
    assert first == ("threads", "threads are 1.20 times as fast as io_uring (measured now)")
    assert choose(storage, runtime) == ("threads", first.reason.replace("now", "earlier"))
    (tmp_path / "c").mkdir()
    assert choose(replace(storage, paths=(str(tmp_path / "c"), storage.paths[0])), runtime).engine == "threads"
    assert measured == [Point(load=Load.BOTH, block_bytes=2 * MIB, depth=32), Found(1.2, True)]
    measured[:] = [Found(1.01, False)]
    other = choose(replace(storage, request_bytes=MIB, queue_depth=7), runtime)
    assert other.engine == "auto"
    assert "1.01 times" in other.reason
    assert choose(replace(storage, paths=storage.paths[:1]), runtime).engine == "auto"
    assert [point.depth for point in measured[:-1]] == [32, 7]
    assert choose(storage, runtime).engine == "threads"  # the first result is still stored


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"KEY": 3}', '{"KEY": {"ratio": "x", "threads": true}}', '{"KEY": {"ratio": 2.0}}',
     '{"KEY": {"ratio": NaN, "threads": true}}', '{"KEY": {"ratio": 2.0, "threads": "no"}}', "[" * 9999,
     '{"KEY": {"ratio": -1, "threads": true}}', "x" * (1 << 17)],
)  # fmt: skip
def test_invalid_stored_results_are_measured_again(
    text: str, storage: StorageConfig, runtime: Path, measured: list[Any]
) -> None:
    key = engine_choice._key(storage, Point(load=Load.BOTH, block_bytes=2 * MIB, depth=32))
    runtime.mkdir(mode=0o700)
    (runtime / CACHE_NAME).write_text(text.replace("KEY", key))
    (runtime / CACHE_NAME).chmod(0o600)
    assert "measured now" in choose(storage, runtime).reason
    assert "measured earlier" in choose(storage, runtime).reason
    assert len(measured) == 2


def test_unwritable_runtime_folder_is_logged_and_measured_each_time(
    storage: StorageConfig, runtime: Path, measured: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    runtime.write_text("")
    assert [choose(storage, runtime).engine for _ in range(2)] == ["threads"] * 2
    assert len(measured) == 3
    assert "the faster engine" in caplog.text
    assert CACHE_NAME in caplog.text


@pytest.mark.parametrize("error", [StorageError("write", "f", 0, 1, errno.EIO), OSError(errno.ENOMEM, "no memory")])
def test_failed_measurement_selects_io_uring(
    error: Exception, storage: StorageConfig, runtime: Path, measured: list[Any]
) -> None:
    """The reason contains the error, and the next run measures again."""
    measured.append(error)
    choice = choose(storage, runtime)
    assert choice.engine == "auto"
    assert choice.reason.endswith(f"whether threads are faster ({error})")
    measured.append(Found(1.2, True))
    assert choose(storage, runtime).engine == "threads"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((targets, "free_space", lambda folder: MIB), "1 MiB free"),
        ((os, "access", lambda path, mode, effective_ids: False), "not writable"),
    ],
)
def test_full_or_read_only_drive_selects_io_uring(
    change: tuple[Any, str, Any], reason: str, storage: StorageConfig, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*change)
    choice = choose(storage, runtime)
    assert choice.engine == "auto"
    assert reason in choice.reason
    assert [os.listdir(path) for path in storage.paths] == [[], []]


def test_unavailable_io_uring_selects_threads(
    storage: StorageConfig, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written to find this out, and the reason contains the system call and its errno."""

    class UnavailableRing(Ring):
        def __init__(self, entries: int) -> None:
            raise RingRefusedError(errno.EPERM)

    monkeypatch.setattr("infinity.io.uring.Ring", UnavailableRing)
    monkeypatch.setattr(targets, "_fill", None)  # a measurement would call it
    choice = choose(storage, runtime)
    engine, reason = open_engine(replace(storage, engine=choice.engine), choice.reason)
    engine.close()
    assert engine.name == "threads"
    assert reason.startswith("io_uring ")
    assert "EPERM" in reason


def test_open_engine_returns_the_given_reason(storage: StorageConfig) -> None:
    for name in ("auto", "threads"):
        engine, reason = open_engine(replace(storage, engine=name), "it was faster")  # type: ignore[arg-type]
        engine.close()
        assert reason == "it was faster" or engine.name == "threads" != name


def test_small_state_or_explicit_engine_is_not_measured(
    storage: StorageConfig, runtime: Path, measured: list[Any]
) -> None:
    measured.append(AssertionError("the engines were measured"))
    assert choose(storage, runtime, LEAST_STATE - 1).engine == "auto"
    for name in ("io_uring", "threads"):
        assert choose(replace(storage, engine=name), runtime) == (name, "")  # type: ignore[arg-type]


def test_measurement_removes_its_files(storage: StorageConfig) -> None:
    """The measured ratio is plausible, and both folders are empty afterwards."""
    found = engine_choice.measure_engines(storage, POINT)
    assert 0.01 < found.ratio < 100
    assert [os.listdir(path) for path in storage.paths] == [[], []]


def open_and_train(folder: str, first: bool, others: bool) -> tuple[str, int]:
    """Return the engine of a run and the number of measurements on this rank. Runs on every rank."""
    import torch.distributed as dist

    threads, points = (others if dist.get_rank() else first), list[Point]()

    def measure(storage: StorageConfig, point: Point) -> Found:
        points.append(point)
        return Found(1.2, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "LEAST_STATE", 0)
        patch.setattr(engine_choice, "measure_engines", measure)
        recipe = Recipe(model="toy", steps=1)
        with offloaded(recipe, Paging(), Path(folder)) as (model, optimizer):
            train(recipe, model, optimizer, Outcome())
            return optimizer.run.stats.header.info["io_engine"], len(points)


def test_ranks_use_the_engine_that_the_first_rank_measured(pair: RankPool, tmp_path: Path) -> None:
    """Only the first rank measures, and a second run reuses its result."""
    assert pair.run(open_and_train, str(tmp_path), True, False) == [("threads", 1), ("threads", 0)]
    assert pair.run(open_and_train, str(tmp_path), False, False) == [("threads", 0), ("threads", 0)]
