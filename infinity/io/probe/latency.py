"""Request latency: percentiles from a histogram whose size does not depend on the number of requests.

[Note: resolution] A bucket covers 1/32 of an octave (2.2%) and is represented by its upper end. Therefore a
percentile is never too low, and at most 2.2% too high. The maximum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

RESOLUTION: Final = 2 ** (1 / 32)
"""Upper end of a bucket relative to its lower end."""
_PER_OCTAVE: Final = 32
_LEAST: Final = 1e-6  # seconds; shorter latencies count as this value
_BUCKETS: Final = 32 * _PER_OCTAVE  # covers more than an hour


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of requests, from submission to completion, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float


class Latencies:
    """Histogram of request latencies. Not thread-safe."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts = [0] * _BUCKETS
        self._longest = 0.0
        for one in seconds:
            self.add(one)

    def add(self, seconds: float) -> None:
        """Add one request to the histogram."""
        bucket = math.ceil(_PER_OCTAVE * math.log2(max(seconds, _LEAST) / _LEAST))
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self._longest = max(self._longest, seconds)

    def summary(self) -> Latency:
        """Return the percentiles over all requests, or zeros if there are none."""
        return Latency(
            p50=self._percentile(0.50), p95=self._percentile(0.95), p99=self._percentile(0.99), longest=self._longest
        )

    def _percentile(self, share: float) -> float:
        """Return the latency that a fraction `share` of the requests did not exceed. [Note: resolution]"""
        left = math.ceil(share * sum(self._counts))
        for bucket, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return min(_LEAST * 2 ** (bucket / _PER_OCTAVE), self._longest)
        return self._longest
