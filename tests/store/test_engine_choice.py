"""`storage.engine = "auto"`: what is measured, when threads are taken, what is kept, and what no measurement means."""

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


def rounds_of(*ratios: float) -> tuple[Found, int]:
    """Return what rounds prove in which threads are so many times as fast, and how many of them were measured."""
    speeds = iter(ratios)
    order: list[str] = []

    def threads() -> float:
        order.append("threads")
        return 100.0 * next(speeds)

    def rings() -> float:
        order.append("io_uring")
        return 100.0

    found = alternate(threads, rings)
    assert order == [*["threads", "io_uring", "io_uring", "threads"] * ROUNDS][: len(order)]  # neither is always first
    return found, len(order) // 2


@pytest.mark.parametrize(
    ("ratios", "threads", "measured"),
    [
        ([1.04] * 8, True, 8),
        ([1.04] * 7 + [0.5], True, 8),
        ([0.5] + [1.04] * 7, True, 8),
        ([1.5] * 6 + [1.02, 0.9], False, 8),
        ([1.02] * 8, False, 2),  # a tie
        ([0.9, 1.5, 0.9] + [1.5] * 5, False, 3),  # its median is above
        ([0.5] * 8, False, 2),
    ],
)
def test_threads_are_taken_if_they_are_proven_to_be_faster(ratios: list[float], threads: bool, measured: int) -> None:
    """It ends when no round that is left could prove it."""
    found, count = rounds_of(*ratios)
    assert (found.threads, count) == (threads, measured)
    assert found.ratio == pytest.approx(sorted(ratios[:count])[count // 2], rel=0.4)


@pytest.mark.parametrize(("rounds", "threads"), [(1, False), (4, False), (5, True)])
def test_time_is_bounded(rounds: int, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow drive there are fewer rounds; too few of them prove nothing."""
    looks = iter(range(100))
    step = engine_choice._ALL_SECONDS / (rounds - 0.5)
    monkeypatch.setattr(engine_choice.time, "monotonic", lambda: max(0, next(looks) - 1) * step)
    found, measured = rounds_of(*[1.5] * 8)
    assert (found.threads, measured) == (threads, rounds)


@pytest.fixture
def storage(tmp_path: Path) -> StorageConfig:
    """Two folders."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return StorageConfig(paths=(str(tmp_path / "a"), str(tmp_path / "b")))


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A runtime folder that is not there yet."""
    return tmp_path / "runtime"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Say instead of measuring: the last one of the list; what is asked is put before it."""
    said: list[Any] = [Found(1.2, True)]

    def measure(storage: StorageConfig, point: Point) -> Found:
        said.insert(0, point)
        if isinstance(said[-1], Exception):
            raise said[-1]
        return said[-1]

    monkeypatch.setattr(engine_choice, "measure_engines", measure)
    return said


def choose(storage: StorageConfig, runtime: Path, state: int = LEAST_STATE) -> EngineChoice:
    """Choose for a run with pages of 2 MiB."""
    return choose_engine(storage, 2 * MIB, state, runtime)


def test_what_is_measured_is_kept(storage: StorageConfig, runtime: Path, measured: list[Any], tmp_path: Path) -> None:
    """By drives and size of requests: another folder there does not pay for it again."""
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
    assert choose(storage, runtime).engine == "threads"  # what was kept before is there still


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"KEY": 3}', '{"KEY": {"ratio": "x", "threads": true}}', '{"KEY": {"ratio": 2.0}}',
     '{"KEY": {"ratio": NaN, "threads": true}}', '{"KEY": {"ratio": 2.0, "threads": "no"}}', "[" * 9999,
     '{"KEY": {"ratio": -1, "threads": true}}', "x" * (1 << 17)],
)  # fmt: skip
def test_what_is_kept_is_checked(text: str, storage: StorageConfig, runtime: Path, measured: list[Any]) -> None:
    """It is measured anew, and kept."""
    key = engine_choice._key(storage, Point(load=Load.BOTH, block_bytes=2 * MIB, depth=32))
    runtime.mkdir(mode=0o700)
    (runtime / CACHE_NAME).write_text(text.replace("KEY", key))
    (runtime / CACHE_NAME).chmod(0o600)
    assert "measured now" in choose(storage, runtime).reason
    assert "measured earlier" in choose(storage, runtime).reason
    assert len(measured) == 2


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    storage: StorageConfig, runtime: Path, measured: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """That is said."""
    runtime.write_text("")
    assert [choose(storage, runtime).engine for _ in range(2)] == ["threads"] * 2
    assert len(measured) == 3
    assert "the faster engine" in caplog.text
    assert CACHE_NAME in caplog.text


@pytest.mark.parametrize("error", [StorageError("write", "f", 0, 1, errno.EIO), OSError(errno.ENOMEM, "no memory")])
def test_io_uring_where_measuring_fails(
    error: Exception, storage: StorageConfig, runtime: Path, measured: list[Any]
) -> None:
    """The reason says why; the next run tries again."""
    measured.append(error)
    choice = choose(storage, runtime)
    assert choice.engine == "auto"
    assert "threads" in choice.reason
    assert str(error) in choice.reason
    measured.append(Found(1.2, True))
    assert choose(storage, runtime).engine == "threads"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((targets, "free_space", lambda folder: MIB), "1 MiB free"),
        ((os, "access", lambda path, mode, effective_ids: False), "not writable"),
    ],
)
def test_io_uring_on_a_full_or_read_only_drive(
    change: tuple[Any, str, Any], says: str, storage: StorageConfig, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with what is really measured."""
    monkeypatch.setattr(*change)
    choice = choose(storage, runtime)
    assert choice.engine == "auto"
    assert says in choice.reason
    assert [os.listdir(path) for path in storage.paths] == [[], []]


def test_threads_where_io_uring_is_refused(
    storage: StorageConfig, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to find that out, and the reason is the kernel's."""

    class Refused(Ring):
        def __init__(self, entries: int) -> None:
            raise RingRefusedError(errno.EPERM)

    monkeypatch.setattr("infinity.io.uring.Ring", Refused)
    monkeypatch.setattr(targets, "_fill", None)  # would be called
    choice = choose(storage, runtime)
    engine, reason = open_engine(replace(storage, engine=choice.engine), choice.reason)
    engine.close()
    assert engine.name == "threads"
    assert reason.startswith("io_uring ")
    assert "EPERM" in reason


def test_the_reason_goes_with_the_engine(storage: StorageConfig) -> None:
    """Of either; what the settings name needs none."""
    for name in ("auto", "threads"):
        engine, reason = open_engine(replace(storage, engine=name), "it was faster")  # type: ignore[arg-type]
        engine.close()
        assert reason == "it was faster" or engine.name == "threads" != name


def test_nothing_is_measured_where_it_is_not_worth_it(
    storage: StorageConfig, runtime: Path, measured: list[Any]
) -> None:
    """A small state, or an engine that the settings name."""
    measured.append(AssertionError("nothing is to be measured"))
    assert choose(storage, runtime, LEAST_STATE - 1).engine == "auto"
    for name in ("io_uring", "threads"):
        assert choose(replace(storage, engine=name), runtime) == (name, "")  # type: ignore[arg-type]


def test_measuring_leaves_nothing(storage: StorageConfig) -> None:
    """And finds a ratio that can be."""
    found = engine_choice.measure_engines(storage, POINT)
    assert 0.01 < found.ratio < 100
    assert [os.listdir(path) for path in storage.paths] == [[], []]


def opened(folder: str, first: bool, others: bool) -> tuple[str, int]:
    """Return the engine of a run, and how often this rank measured; what it says is by rank. Runs on every rank."""
    import torch.distributed as dist

    says, asked = (others if dist.get_rank() else first), list[Point]()

    def measure(storage: StorageConfig, point: Point) -> Found:
        asked.append(point)
        return Found(1.2, says)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "LEAST_STATE", 0)
        patch.setattr(engine_choice, "measure_engines", measure)
        recipe = Recipe(model="toy", steps=1)
        with offloaded(recipe, Paging(), Path(folder)) as (model, optimizer):
            train(recipe, model, optimizer, Outcome())
            return optimizer.run.stats.header.info["io_engine"], len(asked)


def test_all_ranks_of_a_node_take_what_the_first_one_has_measured(pair: RankPool, tmp_path: Path) -> None:
    """The others measure nothing, and a second run neither."""
    assert pair.run(opened, str(tmp_path), True, False) == [("threads", 1), ("threads", 0)]
    assert pair.run(opened, str(tmp_path), False, False) == [("threads", 0), ("threads", 0)]
