"""Definitions of measurements and their results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from infinity.errors import ConfigError, InfinityError
from infinity.units import KIB

BLOCK_MULTIPLE = 4 * KIB
"""Request sizes must be multiples of this number of bytes."""
MARGIN: Final = 0.03
"""Relative difference up to which two results count as equal. Repeated measurements differ by this much."""


class ProbeStoppedError(InfinityError):
    """The measurement was stopped."""


class Load(Enum):
    """Direction of the requests in a measurement."""

    READ = "read"
    WRITE = "write"
    BOTH = "mixed"
    """Reads and writes in alternation."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Combination to measure: direction, bytes per request, and number of requests in flight."""

    load: Load
    block_bytes: int
    depth: int

    @property
    def flight(self) -> int:
        """Number of bytes in flight."""
        return self.block_bytes * self.depth


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Percentiles of the latency of requests, from submission to completion, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float


def latency_of(seconds: Collection[float]) -> Latency:
    """Return the percentiles over all requests, or zeros if there are none."""
    ordered = sorted(seconds) or [0.0]  # without NumPy, which the daemon does not need

    def percentile(share: float) -> float:
        """Return the latency that a fraction `share` of the requests did not exceed."""
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Latency(p50=percentile(0.50), p95=percentile(0.95), p99=percentile(0.99), longest=ordered[-1])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result for one path at one point while the other paths of the measurement were busy as well."""

    point: Point
    read_bytes_per_second: float
    write_bytes_per_second: float
    seconds: float
    """Duration of the measurement."""
    latency: Latency
    """Latency over all requests, both reads and writes."""

    @property
    def bytes_per_second(self) -> float:
        """Throughput of reads and writes together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


def points_of(loads: Iterable[Load], blocks: Collection[int], depths: Collection[int]) -> tuple[Point, ...]:
    """Return all combinations of load, block size and depth, with the load varying slowest.

    Raises:
        ConfigError: if there is no combination, or if a size or depth is invalid.
    """
    for block in blocks:
        if block < BLOCK_MULTIPLE or block % BLOCK_MULTIPLE:
            raise ConfigError(f"block = {block} bytes is not a positive multiple of {BLOCK_MULTIPLE}")
    for depth in depths:
        if not 1 <= depth <= 4096:
            raise ConfigError(f"depth = {depth} is out of range; use 1 to 4096 requests in flight")
    points = tuple(
        Point(load=load, block_bytes=block, depth=depth) for load in loads for block in blocks for depth in depths
    )
    if not points:
        raise ConfigError("nothing to measure: specify at least one load, one block size and one depth")
    return points
