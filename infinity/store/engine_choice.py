"""Choice of an engine for `storage.engine = "auto"`: the one that moves a run's bytes faster on its drives.

Both engines are measured in turn on all paths at once, with requests of the run's size, half reads and half writes. The
result is the number of bytes divided by the sum of two times: the elapsed time and, because compute and I/O share the
processor during a step, the processor time divided by the number of cores.

io_uring is used unless threads are proven to be faster by more than `MARGIN`. The proof is a sign test over the rounds.
On a shared drive, two measurements of the same engine can differ by a third, and the test prevents a choice by chance.
Measuring stops as soon as the remaining rounds can no longer prove a difference. The result is stored in the runtime
folder by drive and request size, for later runs.
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
"""State size in bytes from which measuring pays off: a step then moves as many bytes as the measurement."""
_DOUBT = 0.05  # maximum probability that threads appear faster by chance
_SECONDS, _ALL_SECONDS = 0.1, 2.0  # per measurement and in total
_FLIGHT_BYTES = 64 * MIB  # maximum in flight, and maximum written to each path per measurement
_LARGEST = 4 * MIB  # request size


class EngineChoice(NamedTuple):
    """Engine for a run, and the reason. The reason is empty if the engine was set explicitly."""

    engine: Literal["auto", "io_uring", "threads"]
    """With ``auto``, io_uring is used if the kernel supports it."""
    reason: str


class Found(NamedTuple):
    """Result of a measurement."""

    ratio: float
    """Speed of threads relative to io_uring, as the median of the rounds."""
    threads: bool
    """``True`` if threads are proven to be faster."""


def choose_engine(storage: StorageConfig, page_bytes: int, state_bytes: int, runtime: Path) -> EngineChoice:
    """Return the engine for a run whose folders exist.

    If the engines cannot be measured, io_uring is used. That may reduce speed, but never affects results. The reason
    states it.

    Args:
        storage: Storage settings of the run.
        page_bytes: Page size in bytes.
        state_bytes: Size of the state of all ranks on this node, in bytes.
        runtime: Folder where the result is stored.
    """
    if storage.engine != "auto":
        return EngineChoice(storage.engine, "")
    if state_bytes < LEAST_STATE:
        return EngineChoice("auto", f"io_uring available; {format_size(state_bytes)} of state is too little to measure")
    block = min(storage.request_bytes, page_bytes, _LARGEST)
    point = Point(load=Load.BOTH, block_bytes=block, depth=min(storage.queue_depth, _FLIGHT_BYTES // block))
    try:
        key, when = _key(storage, point), "measured before"
        found = _kept(key, runtime)
        if found is None:
            found, when = measure_engines(storage, point), "measured now"
            remember(runtime / CACHE_NAME, key, found._asdict(), "the faster engine")
    except (InfinityError, OSError) as error:
        return EngineChoice("auto", f"io_uring available; could not measure whether threads are faster ({error})")
    said = f"threads are {found.ratio:.2f} times as fast as io_uring ({when})"
    if found.threads:
        return EngineChoice("threads", said)
    return EngineChoice("auto", f"io_uring available; {said}, which does not prove an advantage of {MARGIN:.0%}")


def measure_engines(storage: StorageConfig, point: Point) -> Found:
    """Measure both engines in turn on all paths.

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
    """Return the result of alternating measurements.

    The order of the two measurements alternates between rounds.

    Args:
        threads: Measures threads and returns their speed.
        rings: Measures io_uring and returns its speed.
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
    """Return whether winning `won` of `rounds` rounds by chance is less likely than `_DOUBT`."""
    by_luck: float = sum(comb(rounds, more) for more in range(won, rounds + 1)) / 2**rounds
    return by_luck < _DOUBT


def _speed(bench: Bench, point: Point) -> float:
    """Return the throughput in bytes per second of elapsed time plus processor time divided by the number of cores."""
    began, busy = time.perf_counter(), time.process_time()
    found = bench.measure(point, seconds=_SECONDS, most_written=_FLIGHT_BYTES).values()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    moved = sum(one.bytes_per_second * one.seconds for one in found)
    return moved / (seconds + busy / len(os.sched_getaffinity(0)))


def _key(storage: StorageConfig, point: Point) -> str:
    """Return a key for everything that the result depends on. Raises `OSError` if a path cannot be inspected."""
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
