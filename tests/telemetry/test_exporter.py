"""Tests of the metrics exporter: exposition format, metric table and HTTP server."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infinity.errors import ConfigError
from infinity.telemetry import METRICS, Stats
from infinity.telemetry.exporter import StatsCollector, serve
from infinity.telemetry.metrics import markdown

GOLDEN = Path(__file__).with_name("golden_metrics.txt")
ROOT = Path(__file__).parents[2]


def snapshot(rank=0, run_id="run-1", *, world_size=2, devices=("nvme0", "nvme1")):
    """Return a snapshot with known values; its exposition does not depend on time or machine."""
    stats = Stats.create(
        None,
        run_id=run_id,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        devices=devices,
        info={"version": "0.1.0", "torch_version": '2.13.0+cpu "x"', "io_engine": "threads", "paths": "[]"},
    )
    stats.counter("io_bytes_total", op="read", state="update", device="nvme1").add(1 << 40)
    stats.counter("stall_seconds_total", phase="backward", cause="host_cache").add(0.25)
    stats.gauge("tier_capacity_bytes", tier="host").set(2**31)
    for seconds in (0.3, 7.0, 1e6):
        stats.histogram("step_duration_seconds").observe(seconds)
    return replace(stats.snapshot(), uid=0)


def exposition(snapshots):
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: snapshots))
    return generate_latest(registry).decode()


def test_exposition_matches_the_golden_file():
    """After an intended change, write `exposition([snapshot(0)])` to the golden file and review the difference."""
    assert exposition([snapshot(0)]) == GOLDEN.read_text()


def test_promtool_accepts_the_exposition():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    text = exposition([snapshot(0), snapshot(1)])
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.status, answer.read()


def test_server_serves_metrics_and_health_and_releases_its_port():
    snapshots = [snapshot()]
    with serve(0, lambda: snapshots, host="127.0.0.1") as server:
        assert get(server.port, "/metrics") == (200, GOLDEN.read_bytes())
        status, body = get(server.port, "/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ok"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.port, "/else")
        with pytest.raises(ConfigError, match=f"port {server.port} .*choose another port"):
            serve(server.port, lambda: snapshots, host="127.0.0.1")
        port = server.port
    serve(port, lambda: snapshots, host="127.0.0.1").close()
    with pytest.raises(ConfigError, match="0 to 65535"):
        serve(70000, lambda: snapshots)


def test_the_metrics_page_is_current():
    """After a change, run `python -m infinity.telemetry.metrics > docs/reference/metrics.md`."""
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text() == markdown()


def test_metric_names_follow_prometheus_conventions():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_info") == (metric.kind == "info"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.doc.endswith("."), metric.name
