"""Which engine `storage.engine = "auto"` is: the one that is measured to move a run's bytes faster on its drives.

Both move requests of the run's size in turn, half reads and half writes, on all paths at once. What counts is the bytes
in the time that they take and, as a step that computes gives way to them, the processor time over the number of cores.
io_uring is taken unless threads are proven to be faster by more than `MARGIN`: by a sign test over the rounds, so that
on a drive that others use, too, where two measurements of one engine differ by a third, luck does not choose. Measuring
ends as soon as the rounds that are left cannot prove it any more. The result is kept in the runtime folder by drive and
size of requests, so that later runs find it.
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
"""At most; each measures both engines."""
LEAST_STATE: Final = GIB
"""Bytes of a state that is worth measuring: its first step moves as many as measuring does."""
_DOUBT = 0.05  # the probability that threads which are no faster seem to be
_SECONDS, _ALL_SECONDS = 0.1, 2.0  # of one measurement, of all together
_FLIGHT_BYTES = 64 * MIB  # in flight at most, and written to each path in one measurement
_LARGEST = 4 * MIB  # request


class EngineChoice(NamedTuple):
    """What `storage.engine` is to be for a run, and why; without a reason, as the settings say."""

    engine: Literal["auto", "io_uring", "threads"]
    """With ``auto``, io_uring where the kernel has it."""
    reason: str


class Found(NamedTuple):
    """What a measurement has found."""

    ratio: float
    """Of threads to io_uring, the median of the rounds; above 1, threads are faster."""
    threads: bool
    """Whether they are proven to be."""


def choose_engine(storage: StorageConfig, page_bytes: int, state_bytes: int, runtime: Path) -> EngineChoice:
    """Return the engine to take for a run whose folders exist.

    What cannot be measured is io_uring; that may cost speed, never correctness, and the reason says it.

    Args:
        storage: of the run.
        page_bytes: of its pages.
        state_bytes: of all its ranks on this node.
        runtime: folder where the result is kept.
    """
    if storage.engine != "auto":
        return EngineChoice(storage.engine, "")
    if state_bytes < LEAST_STATE:
        return EngineChoice("auto", f"io_uring available; {format_size(state_bytes)} of state are not worth measuring")
    block = min(storage.request_bytes, page_bytes, _LARGEST)
    point = Point(load=Load.BOTH, block_bytes=block, depth=min(storage.queue_depth, _FLIGHT_BYTES // block))
    try:
        key, when = _key(storage, point), "measured before"
        found = _kept(key, runtime)
        if found is None:
            found, when = measure_engines(storage, point), "measured now"
            remember(runtime / CACHE_NAME, key, found._asdict(), "which engine is faster")
    except (InfinityError, OSError) as error:
        return EngineChoice("auto", f"io_uring available; whether threads are faster was not measured ({error})")
    said = f"threads are {found.ratio:.2f} times as fast as io_uring ({when})"
    if found.threads:
        return EngineChoice("threads", said)
    return EngineChoice("auto", f"io_uring available; {said}, which is not more than {MARGIN:.0%} beyond doubt")


def measure_engines(storage: StorageConfig, point: Point) -> Found:
    """Measure both engines in turn on all paths. Raises as `open_bench`, and `ConfigError` if io_uring is refused."""
    with (
        open_bench(storage.paths, [point], file_bytes=2 * _FLIGHT_BYTES, engine="io_uring") as bench,
        bench.through("io_uring", point) as rings,
        bench.through("threads", point) as threads,
    ):
        return in_turn(lambda: _speed(threads, point), lambda: _speed(rings, point))


def in_turn(threads: Callable[[], float], rings: Callable[[], float]) -> Found:
    """Return what rounds of two measurements prove; each returns a speed, and each is the first in every second one."""
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
    """Whether so many rounds are won by luck less often than `_DOUBT`, if each is as likely lost."""
    by_luck: float = sum(comb(rounds, more) for more in range(won, rounds + 1)) / 2**rounds
    return by_luck < _DOUBT


def _speed(bench: Bench, point: Point) -> float:
    """Return bytes per second of the time that they take, and of the processor's, spread over the cores."""
    began, busy = time.perf_counter(), time.process_time()
    found = bench.measure(point, seconds=_SECONDS, most_written=_FLIGHT_BYTES).values()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    moved = sum(one.bytes_per_second * one.seconds for one in found)
    return moved / (seconds + busy / len(os.sched_getaffinity(0)))


def _key(storage: StorageConfig, point: Point) -> str:
    """Return what the result depends on. Raises `OSError`: a path cannot be looked at."""
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
