"""What is measured, and what is found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from infinity.config import StorageConfig
from infinity.errors import ConfigError, InfinityError
from infinity.io.probe.latency import Latency
from infinity.units import KIB

BLOCK_MULTIPLE = 4 * KIB
"""Request sizes are multiples of this many bytes."""
MARGIN: Final = 0.03
"""What differs by less is the same: two measurements of one thing do, too."""


class ProbeStoppedError(InfinityError):
    """A measurement was told to stop."""


class Load(Enum):
    """What the requests of a measurement do."""

    READ = "read"
    WRITE = "write"
    BOTH = "mixed"
    """Every second request writes."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination to measure: bytes per request, requests in flight."""

    load: Load
    block_bytes: int
    depth: int

    @property
    def flight(self) -> int:
        """Bytes in flight."""
        return self.block_bytes * self.depth


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one path did at one point while the other paths of the measurement were busy, too; bytes per second."""

    point: Point
    read_bytes_per_second: float
    write_bytes_per_second: float
    seconds: float
    """Length of the measurement."""
    latency: Latency
    """Of all its requests, reads and writes together."""

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a probe has come; `latest` is empty while the files are being written."""

    done: int
    total: int
    label: str
    latest: dict[str, Measurement]


def points_of(loads: Iterable[Load], blocks: Collection[int], depths: Collection[int]) -> tuple[Point, ...]:
    """Return every combination, loads outermost.

    Raises:
        ConfigError: nothing to measure, or a size or depth that cannot be.
    """
    for block in blocks:
        if block < BLOCK_MULTIPLE or block % BLOCK_MULTIPLE:
            raise ConfigError(f"block = {block} bytes must be a multiple of {BLOCK_MULTIPLE}")
    for depth in depths:
        if not 1 <= depth <= 4096:
            raise ConfigError(f"depth = {depth} must be from 1 to 4096 requests in flight")
    points = tuple(
        Point(load=load, block_bytes=block, depth=depth) for load in loads for block in blocks for depth in depths
    )
    if not points:
        raise ConfigError("nothing to measure: give at least one load, block and depth")
    return points


def default_points(loads: Sequence[Load] = tuple(Load)) -> tuple[Point, ...]:
    """Return what infinity does unless it is told otherwise, for each load."""
    usual = StorageConfig()
    return points_of(loads, [usual.request_bytes], [usual.queue_depth])
