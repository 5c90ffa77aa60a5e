"""Tests of latency percentiles: computed over all requests in a fixed amount of memory."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from infinity.config import StorageConfig
from infinity.io import Engine, ThreadEngine
from infinity.io.engine import Op
from infinity.io.probe import targets
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.latency import RESOLUTION, Latencies, Latency
from infinity.io.probe.points import Load, points_of
from support.fault_engine import Fault, FaultEngine, FaultKind

MIB = 1 << 20


def test_percentiles_are_accurate_to_one_bucket(subtests: pytest.Subtests) -> None:
    """They are never too low and at most one bucket too high; the maximum is exact."""
    for spread in [0.0, 0.5, 3.0]:
        for count in [1, 2, 20, 100, 10_000]:
            with subtests.test(count=count, spread=spread):
                rng = random.Random(f"{count} {spread}")
                times = sorted(2e-3 * math.exp(rng.gauss(0, spread)) for _ in range(count))
                found = Latencies(times).summary()
                for share, value in ((0.50, found.p50), (0.95, found.p95), (0.99, found.p99)):
                    true = times[math.ceil(share * count) - 1]
                    assert true * 0.999999 <= value <= true * RESOLUTION * 1.000001
                assert found.longest == times[-1]


def test_extreme_latencies_are_counted() -> None:
    """This includes latencies below a microsecond, of hours, and no latencies."""
    assert Latencies().summary() == Latency(p50=0, p95=0, p99=0, longest=0)
    assert Latencies([0.0, -1.0]).summary().longest == 0
    found = Latencies([1e-9, 1e6]).summary()
    assert found.p50 <= 1e-6
    assert found.longest == 1e6
    assert 3600 < found.p99 <= 1e6


def test_memory_does_not_grow_with_the_number_of_latencies() -> None:
    latencies = Latencies([1e-3])
    size = len(latencies._counts)
    for number in range(100_000):
        latencies.add(number * 1e-5)
    assert len(latencies._counts) == size


def test_slow_requests_appear_in_the_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth read is slow, which does not change the median."""
    engines: list[FaultEngine] = []

    def slow(settings: StorageConfig) -> Engine:
        inner = ThreadEngine(settings.queue_depth, settings.request_bytes)
        engines.append(FaultEngine(inner, 1, [Fault(kind=FaultKind.SLOW, op=Op.READ, every=5, seconds=0.2)]))
        return engines[0]

    monkeypatch.setattr(targets, "open_engine", slow)
    found = measure_paths([tmp_path], points_of([Load.READ], [4096], [1]), file_bytes=MIB, seconds=0.5)
    (one,) = found[str(tmp_path)]
    waited = [fault.detail for fault in engines[0].injected]
    assert waited
    assert one.latency.longest >= max(waited)
    assert one.latency.p50 < one.latency.longest
    assert one.latency.p50 <= one.latency.p95 <= one.latency.p99 <= one.latency.longest
