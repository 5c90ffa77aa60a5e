"""Everything that is shown or asked for, by a real Prometheus that scrapes a daemon with two jobs of two ranks."""

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
NOT_HERE = {
    "infinity_device_endurance_days": "needs a minute between two looks at a drive",
    "infinity_device_wear_ratio": "needs a drive that tells it",
}
"""Metrics that a short test on any machine cannot have."""
RATES = {"read": 1e9, "write": 1e9, "mixed": 1e9}


def recorded() -> list[str]:
    """Return the names of the series that rules record."""
    return re.findall(r"record: (\S+)", RULES[0].read_text())


def go_on(stats: Stats) -> None:
    """Count something in every metric."""
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
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ask Prometheus; what it says of an expression, as a list of series."""
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

        def query(expression: str) -> list[Any]:
            given = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{given}", timeout=60) as answer:
                return list(json.load(answer)["data"]["result"])

        def scraped() -> bool:
            for stats in ranks:
                go_on(stats)
            time.sleep(0.2)
            try:
                return all(map(query, recorded()))
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                return False

        until(scraped)
        yield query


def filled(expression: str) -> str:
    """Return an expression with values for Grafana's variables, and short ranges."""
    for name, value in {"$__rate_interval": "30s", "$run": ".*", "$rank": ".*"}.items():
        expression = expression.replace(name, value)
    return re.sub(r"\[\d+[smhd]\]", "[30s]", expression)


def can_be_here(expression: str) -> bool:
    return not any(name in expression for name in NOT_HERE)


def test_every_panel_can_show_data(ask: Any) -> None:
    """With two jobs of two ranks."""
    panels = json.loads((ROOT / "docker/grafana/dashboards/infinity.json").read_text())["panels"]
    shown = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    assert len(shown) > 20
    empty = [shown for shown in shown if can_be_here(shown[1]) and not ask(filled(shown[1]))]
    assert empty == []


def test_runs_can_be_told_apart(ask: Any) -> None:
    """By the variable of the dashboard."""
    found = ask('max by (run, rank) (infinity_steps_total{run=~"first"})')
    assert {(series["metric"]["run"], series["metric"]["rank"]) for series in found} == {("first", "0"), ("first", "1")}


def test_every_query_of_the_guide_has_an_answer(ask: Any) -> None:
    """The ten that people need."""
    queries = re.findall(r"```promql\n(.*?)```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.DOTALL)
    assert len(queries) >= 10
    assert [query for query in queries if can_be_here(query) and not ask(filled(query))] == []


def test_recorded_series_are_there(ask: Any) -> None:
    """All that the rules name."""
    assert len(recorded()) > 5
    assert [name for name in recorded() if not ask(name)] == []


def test_eight_ranks_on_four_drives_are_few_series(tmp_path: Path) -> None:
    """At most 1,500, whatever has been counted."""
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
            go_on(stats)
        process = stack.enter_context(daemon(runtime, *(word for path in folders for word in ("--device-path", path))))
        text = get(process.port, "/metrics")
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 1500
