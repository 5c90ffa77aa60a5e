"""Tests of latency percentiles, which are computed over all requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from infinity.config import StorageConfig
from infinity.io import Engine, ThreadEngine
from infinity.io.engine import Op
from infinity.io.probe import targets
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Latency, Load, latency_of, points_of
from support.fault_engine import Fault, FaultEngine, FaultKind


def test_percentiles_are_those_of_all_requests() -> None:
    times = [number * 1e-3 for number in range(1, 101)]
    random.Random(1).shuffle(times)
    assert latency_of(times) == Latency(p50=0.05, p95=0.095, p99=0.099, longest=0.1)
    assert latency_of([2.0]) == Latency(p50=2, p95=2, p99=2, longest=2)
    assert latency_of([]) == Latency(p50=0, p95=0, p99=0, longest=0)


def test_slow_requests_appear_in_the_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth read is slow, which does not change the median. Reads end when all writes have been made."""
    delays: list[float] = []
    later = FaultEngine._later

    def recorded(engine: FaultEngine, seconds: float, call: Any) -> None:
        delays.append(seconds)
        later(engine, seconds, call)

    def slow(settings: StorageConfig) -> Engine:
        inner = ThreadEngine(settings.queue_depth, settings.request_bytes)
        return FaultEngine(inner, 1, [Fault(kind=FaultKind.SLOW, op=Op.READ, every=5, seconds=0.2)])

    monkeypatch.setattr(FaultEngine, "_later", recorded)
    monkeypatch.setattr(targets, "open_engine", slow)
    found = measure_paths([tmp_path], points_of([Load.BOTH], [4096], [1]), file_bytes=20 * 4096, seconds=600)
    (one,) = found[str(tmp_path)]
    assert delays
    assert one.latency.longest >= max(delays)
    assert one.latency.p50 < one.latency.longest
    assert one.latency.p50 <= one.latency.p95 <= one.latency.p99 <= one.latency.longest
