"""Percentiles of request latencies."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of requests, from submission to completion, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float


def latency_of(seconds: Collection[float]) -> Latency:
    """Return the percentiles over all requests, or zeros if there are none."""
    ordered = sorted(seconds) or [0.0]

    def percentile(share: float) -> float:
        """Return the latency that a fraction `share` of the requests did not exceed."""
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Latency(p50=percentile(0.50), p95=percentile(0.95), p99=percentile(0.99), longest=ordered[-1])
