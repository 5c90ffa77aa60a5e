"""Tests of metrics with a real Prometheus that scrapes the daemons of two nodes.

Run `first` has a rank on each node, and run `second` has two ranks on node 0. Run `partly` has two ranks on node 1, and
two on a node without a daemon.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.telemetry import METRICS, Stats
from infinity.telemetry.stats_cells import label_sets
from support.counted_rank import make_stats
from support.daemon_process import daemon, get, until
from support.processes import free_port

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker/prometheus"
RULES = [PROMETHEUS / name for name in ("recording.yaml", "alerts.yaml")]
UNAVAILABLE = {
    "infinity_device_endurance_days": "needs two observations of a drive, a minute apart",
    "(infinity_copy_last_success_timestamp_seconds > 0)": "needs a complete copy",
    "infinity_device_wear_ratio": "needs a drive that reports its wear",
}
"""Metrics that are unavailable in a short test on an arbitrary machine."""
RATES = {"read": 1e9, "write": 1e9, "mixed": 1e9}
RANKS = [
    ("first", 2, 0, 0),
    ("first", 2, 1, 1),
    ("second", 2, 0, 0),
    ("second", 2, 1, 0),
    ("partly", 4, 0, 1),
    ("partly", 4, 1, 1),
]
"""Run, world size, rank and node of each rank."""
NODES = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Cluster:
    """Prometheus, and the ranks that it monitors through the daemons of their nodes."""

    query: Callable[[str], list[Any]]
    """Return the series that result from an expression."""
    update: Callable[[], None]
    """Update every metric of each rank. Rank 1 of `first` computes for longer than rank 0."""
    ranks: list[Stats]

    def by_run(self, expression: str) -> dict[str, float]:
        """Return the value of an expression for each run."""
        return {series["metric"]["run"]: float(series["value"][1]) for series in self.query(expression)}


def recording_rules() -> list[str]:
    """Return the names of the series that the recording rules produce."""
    return re.findall(r"record: (\S+)", RULES[0].read_text())


def update_all_metrics(stats: Stats) -> None:
    """Update every metric of a rank."""
    for metric in METRICS:
        if metric.server != "rank" or metric.kind == "info":
            continue
        for values in label_sets(metric, stats.header.devices):
            labels = dict(zip(metric.label_names, values, strict=True))
            if metric.kind == "counter":
                stats.counter(metric.name, **labels).add(1)
            elif metric.kind == "histogram":
                stats.histogram(metric.name, **labels).observe(0.1)
            else:
                stats.gauge(metric.name, **labels).set(time.time() if "timestamp" in metric.name else 1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    drive = folder / "drive"
    runtimes = [folder / f"run{node}" for node in range(len(NODES))]
    for made in (drive, *runtimes):
        made.mkdir()
    with ExitStack() as stack:
        (folder / "infinityd.toml").write_text('[copies]\nhost = "lo"\nport = 0\n')
        options = ["--config", str(folder / "infinityd.toml"), "--device-path", str(drive)]
        daemons = [stack.enter_context(daemon(runtime, *options)) for runtime in runtimes]
        ranks = []
        for run, world_size, rank, node in RANKS:
            stats = make_stats(runtimes[node], run, rank, world_size, [drive])
            stack.callback(stats.close)
            ranks.append(stats)
        assert NodeDaemon(runtimes[0]).ask("copies_join", run_id=RANKS[0][0], rank=0, token="ab" * 32)
        for runtime in runtimes:
            assert NodeDaemon(runtime).ask("record_bandwidth", rates={str(drive): RATES}, source="run")
        port = free_port()
        for path in RULES:
            (folder / path.name).write_text(re.sub(r"\[\d+[mh]\]", "[30s]", path.read_text()))
        nodes = (PROMETHEUS / "nodes.yaml").read_text()
        for index, (address, process) in enumerate(zip(NODES, daemons, strict=True)):
            nodes = nodes.replace(f"node{index}:9470", f"{address}:{process.port}")
        (folder / "nodes.yaml").write_text(nodes)
        settings = re.sub(r"interval: \d+s", "interval: 1s", (PROMETHEUS / "several-nodes.yml").read_text())
        (folder / "several-nodes.yml").write_text(settings)
        log = stack.enter_context((folder / "log").open("w"))
        command = [
            "prometheus", f"--config.file={folder / 'several-nodes.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.kill)

        def query(expression: str) -> list[Any]:
            encoded = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{encoded}", timeout=60) as answer:
                return list(json.load(answer)["data"]["result"])

        def update() -> None:
            for stats in ranks:
                update_all_metrics(stats)
            ranks[1].counter("step_part_seconds_total", part="compute").add(5)

        def scraped() -> bool:
            update()
            time.sleep(0.2)
            try:
                return len(query("up == 1")) == len(NODES) and all(map(query, recording_rules()))
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                return False

        until(scraped)
        yield Cluster(query, update, ranks)


@pytest.fixture
def query(cluster: Cluster) -> Callable[[str], list[Any]]:
    return cluster.query


def substituted(expression: str) -> str:
    """Return an expression with values for Grafana's variables, and with short ranges."""
    for name, value in {"$__rate_interval": "30s", "$instance": ".*", "$run": ".*", "$rank": ".*"}.items():
        expression = expression.replace(name, value)
    return re.sub(r"\[\d+[smhd]\]", "[30s]", expression)


def is_available(expression: str) -> bool:
    return not any(name in expression for name in UNAVAILABLE)


def panels() -> list[tuple[str, str]]:
    """Return the title and expression of each query of the Grafana dashboard."""
    found = json.loads((ROOT / "docker/grafana/dashboards/infinity.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in found for target in panel.get("targets", [])]


def panel(title: str) -> list[str]:
    """Return the queries of a panel."""
    return [substituted(expression) for name, expression in panels() if name == title]


def guide_queries() -> list[str]:
    """Return the queries of the guide."""
    return re.findall(r"```promql\n(.*?)```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.DOTALL)


def test_every_panel_has_data(query: Any) -> None:
    shown = panels()
    assert len(shown) > 20
    empty = [panel for panel in shown if is_available(panel[1]) and not query(substituted(panel[1]))]
    assert empty == []


def test_every_query_of_the_guide_has_a_result(query: Any) -> None:
    assert len(guide_queries()) >= 10
    assert [text for text in guide_queries() if is_available(text) and not query(substituted(text))] == []


def guide_query(metric: str) -> str:
    """Return the query of the guide that contains a metric."""
    (found,) = (text for text in guide_queries() if metric in text)
    return substituted(found)


def test_counters_are_summed_over_the_nodes_of_a_run(cluster: Cluster) -> None:
    """A panel that sums by run shows the ranks of all nodes, and an instance is a node."""
    expected = {run: 0.0 for run, *_ in RANKS}
    for stats in cluster.ranks:
        expected[stats.header.run_id] += stats.snapshot().value("training_tokens_total")
    until(lambda: cluster.by_run("sum by (run) (infinity_training_tokens_total)") == expected)
    nodes, ranks, of = panel("Nodes and ranks")
    assert cluster.by_run(nodes) == {"first": 2, "second": 1, "partly": 1}
    assert cluster.by_run(ranks) == {"first": 2, "second": 2, "partly": 2}
    assert cluster.by_run(of) == {"first": 2, "second": 2, "partly": 4}
    assert {series["metric"]["instance"] for series in cluster.query("infinity_run_info")} == set(NODES)


def test_missing_ranks_of_a_run_are_found(cluster: Cluster) -> None:
    (expression,) = re.findall(r"InfinityRanksNotReported.*?expr: >-\n(.*?)\n +for:", RULES[1].read_text(), re.DOTALL)
    (series,) = cluster.query(expression)
    assert (series["metric"]["run"], series["metric"]["name"], series["value"][1]) == ("partly", "partly", "2")
    missing = guide_query("infinity_daemon_run_world_size")
    assert cluster.by_run(missing) == {"first": 0, "second": 0, "partly": 2}


def test_the_slowest_rank_of_a_run_is_found(cluster: Cluster) -> None:
    for expression in (guide_query('part!="collective"'), *panel("Slowest rank")):

        def slowest(expression: str = expression) -> bool:
            cluster.update()
            time.sleep(0.2)
            found = {series["metric"]["run"]: series["metric"] for series in cluster.query(expression)}
            return found["first"] == {"run": "first", "rank": "1", "instance": NODES[1]}

        until(slowest)


def test_every_recording_rule_has_data(query: Any) -> None:
    assert len(recording_rules()) > 5
    assert [name for name in recording_rules() if not query(name)] == []


def test_eight_ranks_on_four_drives_export_few_series(tmp_path: Path) -> None:
    """A node exports at most 1,500 series."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    folders = [str(tmp_path / f"drive{number}") for number in range(4)]
    for folder in folders:
        os.mkdir(folder)
    with ExitStack() as stack:
        for rank in range(8):
            stats = make_stats(runtime, "20261123-000000-0123", rank, 8, folders)
            stack.callback(stats.close)
            update_all_metrics(stats)
        process = stack.enter_context(daemon(runtime, *(word for path in folders for word in ("--device-path", path))))
        text = get(process.port, "/metrics")
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 1500
