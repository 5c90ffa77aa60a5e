"""How long requests take: percentiles from a histogram of a fixed size, however many requests there were.

[Note: resolution] A bucket is a thirty-second of an octave, 2.2 % wide, and stands for its upper end: a percentile is
never too low, and too high by 2.2 % at most. The maximum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

RESOLUTION: Final = 2 ** (1 / 32)
"""Upper end of a bucket, relative to its lower one."""
_PER_OCTAVE: Final = 32
_LEAST: Final = 1e-6  # seconds; what is faster counts as this
_BUCKETS: Final = 32 * _PER_OCTAVE  # up to more than an hour


@dataclass(frozen=True, kw_only=True)
class Latency:
    """How long requests took from when they were submitted until they completed, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float


class Latencies:
    """Counts requests by how long they took. Whoever adds from several threads holds a lock of its own."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts = [0] * _BUCKETS
        self._longest = 0.0
        for one in seconds:
            self.add(one)

    def add(self, seconds: float) -> None:
        """Count one request."""
        bucket = math.ceil(_PER_OCTAVE * math.log2(max(seconds, _LEAST) / _LEAST))
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self._longest = max(self._longest, seconds)

    def summary(self) -> Latency:
        """Return the percentiles of all that was counted; zeros if nothing was."""
        return Latency(
            p50=self._percentile(0.50), p95=self._percentile(0.95), p99=self._percentile(0.99), longest=self._longest
        )

    def _percentile(self, share: float) -> float:
        """Return the time that `share` of the requests did not exceed. [Note: resolution]"""
        left = math.ceil(share * sum(self._counts))
        for bucket, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return min(_LEAST * 2 ** (bucket / _PER_OCTAVE), self._longest)
        return self._longest
