"""Quick measurement of the bandwidth of folders, in about two seconds, instead of a table of loads and depths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from infinity.config import StorageConfig
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, points_of
from infinity.units import MIB

QUICK_BYTES: Final = 256 * MIB
"""File size in each folder, in bytes. Filling the file writes this number of bytes, and each load with writes writes
at most the same number again.
"""
QUICK_SECONDS: Final = 0.5
"""Duration of each load, in seconds."""


def quick_rates(
    paths: Sequence[str | os.PathLike[str]], engine: str = "auto", loads: Sequence[Load] = tuple(Load)
) -> dict[str, dict[str, float]]:
    """Measure all folders at once, with the default request size and queue depth.

    Each load takes `QUICK_SECONDS`, in addition to the time to write `QUICK_BYTES`. No files are left.

    Returns:
        Bytes per second by path and load (``read``, ``write``, ``mixed``).

    Raises the same exceptions as `open_bench`.
    """
    usual = StorageConfig()
    points = points_of(loads, [usual.request_bytes], [usual.queue_depth])
    found = measure_paths(paths, points, file_bytes=QUICK_BYTES, seconds=QUICK_SECONDS, engine=engine)
    return {  # at least 1, because callers divide by the results
        name: {one.point.load.value: max(1.0, one.bytes_per_second) for one in measurements}
        for name, measurements in found.items()
    }
