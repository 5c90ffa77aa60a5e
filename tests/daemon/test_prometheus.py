"""Tests of metrics with a real Prometheus that scrapes a daemon with two runs of two ranks each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.telemetry import METRICS, Stats
from infinity.telemetry.stats_cells import label_sets
from support.daemon_process import daemon, get, until
from support.processes import free_port

ROOT = Path(__file__).parents[2]
RULES = [ROOT / "docker/prometheus" / name for name in ("recording.yaml", "alerts.yaml")]
UNAVAILABLE = {
    "infinity_device_endurance_days": "needs two observations of a drive, a minute apart",
    "infinity_device_wear_ratio": "needs a drive that reports its wear",
}
"""Metrics that are unavailable in a short test on an arbitrary machine."""
RATES = {"read": 1e9, "write": 1e9, "mixed": 1e9}


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
def query(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Function that evaluates an expression in Prometheus and returns the resulting series."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    runtime, drive = folder / "run", folder / "drive"
    for made in (runtime, drive):
        made.mkdir()
    with ExitStack() as stack:
        process = stack.enter_context(daemon(runtime, "--device-path", str(drive)))
        ranks = []
        for run in ("first", "second"):
            for rank in range(2):
                info = {"paths": json.dumps([str(drive)]), "version": "1", "io_engine": "io_uring"}
                stats = Stats.create(
                    runtime, run_id=run, rank=rank, local_rank=rank, world_size=2, devices=["nvme0"], info=info
                )
                stack.callback(stats.close)
                ranks.append(stats)
        assert NodeDaemon(runtime).ask("record_bandwidth", rates={str(drive): RATES}, source="run")
        port = free_port()
        rules = [folder / path.name for path in RULES]
        for path, copy in zip(RULES, rules, strict=True):
            copy.write_text(re.sub(r"\[\d+[mh]\]", "[30s]", path.read_text()))
        (folder / "prometheus.json").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(path) for path in rules],
                    "scrape_configs": [
                        {
                            "job_name": "infinity",
                            "static_configs": [{"targets": [f"127.0.0.1:{process.port}"]}],
                        }
                    ],
                }
            )
        )
        log = stack.enter_context((folder / "log").open("w"))
        command = [
            "prometheus", f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.kill)

        def run_query(expression: str) -> list[Any]:
            encoded = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{encoded}", timeout=60) as answer:
                return list(json.load(answer)["data"]["result"])

        def scraped() -> bool:
            for stats in ranks:
                update_all_metrics(stats)
            time.sleep(0.2)
            try:
                return all(map(run_query, recording_rules()))
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                return False

        until(scraped)
        yield run_query


def substituted(expression: str) -> str:
    """Return an expression with values for Grafana's variables, and with short ranges."""
    for name, value in {"$__rate_interval": "30s", "$instance": ".*", "$run": ".*", "$rank": ".*"}.items():
        expression = expression.replace(name, value)
    return re.sub(r"\[\d+[smhd]\]", "[30s]", expression)


def is_available(expression: str) -> bool:
    return not any(name in expression for name in UNAVAILABLE)


def test_every_panel_has_data(query: Any) -> None:
    panels = json.loads((ROOT / "docker/grafana/dashboards/infinity.json").read_text())["panels"]
    shown = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    assert len(shown) > 20
    empty = [panel for panel in shown if is_available(panel[1]) and not query(substituted(panel[1]))]
    assert empty == []


def test_every_query_of_the_guide_has_a_result(query: Any) -> None:
    queries = re.findall(r"```promql\n(.*?)```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.DOTALL)
    assert len(queries) >= 10
    assert [text for text in queries if is_available(text) and not query(substituted(text))] == []


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
            stats = Stats.create(
                runtime, run_id="20261123-000000-0123", rank=rank, local_rank=rank, world_size=8,
                devices=[f"nvme{number}" for number in range(4)], info={"paths": json.dumps(folders)},
            )  # fmt: skip
            stack.callback(stats.close)
            update_all_metrics(stats)
        process = stack.enter_context(daemon(runtime, *(word for path in folders for word in ("--device-path", path))))
        text = get(process.port, "/metrics")
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 1500
