"""Choice of the I/O engine for `storage.engine = "auto"`: the one that transfers a run's data faster on its drives.

Both engines are measured in alternation on all paths at once. The requests have the size that the run uses; half of
them are reads and half are writes. The result is the number of bytes divided by the sum of two times: the elapsed
time, and the CPU time divided by the number of cores. CPU time counts because compute and I/O share the CPU during a
step.

io_uring is used unless threads are proven to be more than `MARGIN` faster. The proof is a sign test over the rounds.
On a shared drive, two measurements of the same engine can differ by a third, and the test prevents a choice by
chance. Measuring stops as soon as the remaining rounds can no longer prove a difference. The result is stored in the
runtime folder by drive and request size, for later runs.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

from infinity.config import StorageConfig
from infinity.errors import InfinityError
from infinity.io.block_devices import locate
from infinity.io.probe.bench import Bench, open_bench
from infinity.io.probe.points import MARGIN, Load, Point
from infinity.store.host_records import UNUSABLE, recall, remember
from infinity.units import GIB, MIB, format_size

CACHE_NAME = "engines.json"
ROUNDS: Final = 8
"""Maximum number of rounds. Each round measures both engines."""
LEAST_STATE: Final = GIB
"""State size, in bytes, from which measuring is worthwhile: a step then transfers as many bytes as the measurement."""
_DOUBT = 0.05  # maximum probability that threads appear faster by chance
_SECONDS, _ALL_SECONDS = 0.1, 2.0  # seconds per measurement and in total
_FLIGHT_BYTES = 64 * MIB  # maximum number of bytes in flight, and written to each path per measurement
_LARGEST = 4 * MIB  # maximum request size


class EngineChoice(NamedTuple):
    """Engine for a run, and the reason. The reason is empty if the engine was set explicitly."""

    engine: Literal["auto", "io_uring", "threads"]
    """``auto`` means io_uring if the kernel supports it."""
    reason: str


class Found(NamedTuple):
    """Result of a measurement."""

    ratio: float
    """Speed of threads relative to io_uring: the median over all rounds."""
    threads: bool
    """``True`` if threads are proven to be faster."""


def choose_engine(storage: StorageConfig, page_bytes: int, state_bytes: int, runtime: Path) -> EngineChoice:
    """Return the engine for a run whose folders exist.

    If the engines cannot be measured, io_uring is used, and the reason says so. This may be slower, but never affects
    results.

    Args:
        storage: storage settings of the run.
        page_bytes: page size in bytes.
        state_bytes: size of the state of all ranks on this node, in bytes.
        runtime: folder in which the result is stored.
    """
    if storage.engine != "auto":
        return EngineChoice(storage.engine, "")
    if state_bytes < LEAST_STATE:
        return EngineChoice(
            "auto", f"io_uring is available; {format_size(state_bytes)} of state is too small for a measurement"
        )
    block = min(storage.request_bytes, page_bytes, _LARGEST)
    point = Point(load=Load.BOTH, block_bytes=block, depth=min(storage.queue_depth, _FLIGHT_BYTES // block))
    try:
        key, when = _key(storage, point), "measured earlier"
        found = _kept(key, runtime)
        if found is None:
            found, when = measure_engines(storage, point), "measured now"
            remember(runtime / CACHE_NAME, key, found._asdict(), "the faster engine")
    except (InfinityError, OSError) as error:
        return EngineChoice("auto", f"io_uring is available; could not measure whether threads are faster ({error})")
    said = f"threads are {found.ratio:.2f} times as fast as io_uring ({when})"
    if found.threads:
        return EngineChoice("threads", said)
    return EngineChoice(
        "auto", f"io_uring is available; {said}, which does not prove an advantage of more than {MARGIN:.0%}"
    )


def measure_engines(storage: StorageConfig, point: Point) -> Found:
    """Measure both engines in alternation on all paths.

    Raises:
        ConfigError: if io_uring is not available.

    Also raises the errors of `open_bench`.
    """
    with (
        open_bench(storage.paths, [point], file_bytes=2 * _FLIGHT_BYTES, engine="io_uring") as bench,
        bench.through("io_uring", point) as rings,
        bench.through("threads", point) as threads,
    ):
        return alternate(lambda: _speed(threads, point), lambda: _speed(rings, point))


def alternate(threads: Callable[[], float], rings: Callable[[], float]) -> Found:
    """Return the result of alternating measurements. The order of the two engines changes from round to round.

    Args:
        threads: function that measures threads and returns their speed.
        rings: function that measures io_uring and returns its speed.
    """
    ratios: list[float] = []
    end = time.monotonic() + _ALL_SECONDS
    won = 0
    while len(ratios) < ROUNDS and time.monotonic() < end and _proves(won + ROUNDS - len(ratios), ROUNDS):
        if len(ratios) % 2:
            second = rings()
            first = threads()
        else:
            first, second = threads(), rings()
        ratios.append(first / second)
        won += ratios[-1] > 1 + MARGIN
    return Found(median(ratios), _proves(won, len(ratios)))


def _proves(won: int, rounds: int) -> bool:
    """Return whether the probability of winning `won` of `rounds` rounds by chance is below `_DOUBT`."""
    by_luck: float = sum(comb(rounds, more) for more in range(won, rounds + 1)) / 2**rounds
    return by_luck < _DOUBT


def _speed(bench: Bench, point: Point) -> float:
    """Return bytes per second, where the time is the elapsed time plus the CPU time divided by the number of cores."""
    began, busy = time.perf_counter(), time.process_time()
    found = bench.measure(point, seconds=_SECONDS, most_written=_FLIGHT_BYTES).values()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    moved = sum(one.bytes_per_second * one.seconds for one in found)
    return moved / (seconds + busy / len(os.sched_getaffinity(0)))


def _key(storage: StorageConfig, point: Point) -> str:
    """Return a key that covers everything the result depends on. Raises `OSError` if a path cannot be inspected."""
    places = [locate(path) for path in storage.paths]
    drives = sorted(f"{place.drive.identity}:{place.file_system}" for place in places)
    return "|".join((*drives, platform.release(), f"{point.block_bytes}x{point.depth}"))


def _kept(key: str, runtime: Path) -> Found | None:
    try:
        kept = recall(runtime / CACHE_NAME)[key]
        found = Found(float(kept["ratio"]), kept["threads"])
    except UNUSABLE:
        return None
    return found if 0 < found.ratio < 1e30 and isinstance(found.threads, bool) else None
