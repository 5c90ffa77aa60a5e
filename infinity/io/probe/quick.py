"""What folders can do, in about two seconds: for whoever needs a number and no table."""

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
"""Size of the file in each folder. Filling it and each load that writes write so much, at most."""
QUICK_SECONDS: Final = 0.5
"""Length of each of the loads."""


@dataclass(frozen=True, kw_only=True)
class QuickRates:
    """Bytes per second of one folder while all were busy; `mixed` is of both directions together."""

    read: float
    write: float
    mixed: float


def quick_rates(
    paths: Sequence[str | os.PathLike[str]], engine: str = "auto", *, stop: threading.Event | None = None
) -> dict[str, QuickRates]:
    """Return what folders do, all at once, with requests of the default size, as many in flight as by default.

    Takes three times `QUICK_SECONDS` and the time that writing `QUICK_BYTES` takes; writes three times `QUICK_BYTES` to
    each folder at most, and leaves nothing.

    Raises:
        ProbeStoppedError: `stop` was set.
        ConfigError: a folder that does not exist or cannot be written.
        BudgetError: not enough free space.
        StorageError: a transfer failed.
        StallError: a drive did not answer.
    """
    found = _measured(paths, tuple(Load), engine, stop)
    return {name: QuickRates(**{load.value: speed for load, speed in one.items()}) for name, one in found.items()}


def quick_mixed(paths: Sequence[str | os.PathLike[str]], engine: str = "auto") -> dict[str, float]:
    """Return only the bytes per second of half reads and half writes, in a third of the time. Raises alike."""
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
    return max(1.0, one.bytes_per_second)  # nobody divides by zero
