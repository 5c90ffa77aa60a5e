"""Quick measurement of the bandwidth of folders, in about two seconds, instead of a table of loads and depths."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, Measurement, default_points
from infinity.units import MIB

QUICK_BYTES: Final = 256 * MIB
"""File size in each folder, in bytes. Filling the file writes this number of bytes, and each load with writes writes
at most the same number again.
"""
QUICK_SECONDS: Final = 0.5
"""Duration of each load, in seconds."""


@dataclass(frozen=True, kw_only=True)
class QuickRates:
    """Throughput of one folder in bytes per second, while all are busy. `mixed` is the sum of reads and writes."""

    read: float
    write: float
    mixed: float


def quick_rates(
    paths: Sequence[str | os.PathLike[str]], engine: str = "auto", *, stop: threading.Event | None = None
) -> dict[str, QuickRates]:
    """Measure all folders at once, with the default request size and queue depth, and return the results by path.

    The measurement takes three times `QUICK_SECONDS` plus the time to write `QUICK_BYTES`. It writes at most three
    times `QUICK_BYTES` to each folder, and leaves no files.

    Raises:
        ProbeStoppedError: if `stop` was set.
        ConfigError: if a folder does not exist or is not writable.
        BudgetError: if there is too little free space.
        StorageError: if a transfer failed.
        StallError: if a drive did not respond.
    """
    found = _measured(paths, tuple(Load), engine, stop)
    return {name: QuickRates(**{load.value: speed for load, speed in one.items()}) for name, one in found.items()}


def quick_mixed(paths: Sequence[str | os.PathLike[str]], engine: str = "auto") -> dict[str, float]:
    """Return only the throughput of half reads and half writes, in a third of the time.

    Raises the same exceptions as `quick_rates`.
    """
    return {name: one[Load.BOTH] for name, one in _measured(paths, (Load.BOTH,), engine, None).items()}


def _measured(
    paths: Sequence[str | os.PathLike[str]], loads: Sequence[Load], engine: str, stop: threading.Event | None
) -> dict[str, dict[Load, float]]:
    found = measure_paths(
        paths,
        default_points(loads),
        file_bytes=QUICK_BYTES,
        seconds=QUICK_SECONDS,
        engine=engine,
        most_written=QUICK_BYTES,
        stop=stop,
    )
    return {name: {one.point.load: _speed(one) for one in measurements} for name, measurements in found.items()}


def _speed(one: Measurement) -> float:
    return max(1.0, one.bytes_per_second)  # callers divide by the result
