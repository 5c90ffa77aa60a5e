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
from prometheus_client.parser import text_string_to_metric_families

from infinity.errors import ConfigError
from infinity.telemetry import METRICS, PREFIX, Stats
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


def test_rank_metrics_have_the_prefix_and_rank_labels():
    families = list(text_string_to_metric_families(exposition([snapshot(0), snapshot(1)])))
    served = {family.name for family in families}
    table = {PREFIX + metric.name.removesuffix("_total") for metric in METRICS if metric.server == "rank"}
    assert served == table
    labels = [sample.labels for family in families for sample in family.samples]
    assert all((found["run"], found["rank"]) in (("run-1", "0"), ("run-1", "1")) for found in labels)


def test_histogram_buckets_are_cumulative():
    samples = {
        sample.labels.get("le", sample.name): sample.value
        for family in text_string_to_metric_families(exposition([snapshot()]))
        if family.name == "infinity_step_duration_seconds"
        for sample in family.samples
    }
    assert (samples["0.25"], samples["0.5"], samples["8.0"], samples["512.0"], samples["+Inf"]) == (
        0,
        1,
        2,
        2,
        3,
    )
    assert samples["infinity_step_duration_seconds_count"] == 3


def test_runs_with_equal_ranks_have_separate_series():
    snapshots = [snapshot(rank, run) for run in ("one", "two") for rank in (0, 1)]
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(exposition(snapshots))
        for sample in family.samples
    ]
    assert len(set(samples)) == len(samples)
    alone = exposition([snapshot(0, "one")])
    assert len(samples) == 4 * sum(not line.startswith("#") for line in alone.splitlines())


def test_the_number_of_series_per_node_is_limited():
    """The limit of 1,500 per node includes the series of drives and daemon, which tests/daemon counts."""
    snapshots = [snapshot(rank, world_size=8, devices=[f"nvme{index}" for index in range(4)]) for rank in range(8)]
    series = [line for line in exposition(snapshots).splitlines() if not line.startswith("#")]
    assert len(series) <= 1_330


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
