"""Tests of the files in `docker/` that need no container engine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.telemetry import METRICS, PREFIX
from support.daemon_process import ENVIRONMENT

DOCKER = Path(__file__).parents[2] / "docker"
DOCS = Path(__file__).parents[2] / "docs"


def dashboard():
    return json.loads((DOCKER / "grafana/dashboards/infinity.json").read_text())


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_file_is_current():
    """`make docs` regenerates the dashboard after a change to its generator or to a metric."""
    command = [sys.executable, str(DOCKER / "grafana/dashboard.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    assert (DOCKER / "grafana/dashboards/infinity.json").read_text() == printed


def test_every_metric_is_used():
    """Every metric appears in a panel, a rule or a query of the monitoring guide."""
    texts = [*expressions(), (DOCS / "how-to" / "monitoring.md").read_text()]
    texts += [(DOCKER / "prometheus" / name).read_text() for name in ("alerts.yaml", "recording.yaml")]
    used = {name for text in texts for name in re.findall(rf"\b{PREFIX}(\w+)", text)}
    unused = [
        metric.name
        for metric in METRICS
        if not used & {metric.name, *(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))}
    ]
    assert unused == []


def test_the_dashboard_works_with_any_data_source_and_instance():
    """Both are variables, as are run and rank. The list of runs shows their names."""
    tree = dashboard()
    variables = {variable["name"]: variable for variable in tree["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "run", "rank"]
    sources = re.findall(r'"uid": "(.*?)"', json.dumps({"panels": tree["panels"], "variables": variables}))
    assert set(sources) == {"${datasource}"}
    for text in expressions():
        assert all('instance=~"$instance"' in chosen for chosen in re.findall(rf"\b{PREFIX}\w+({{.*?}})?", text)), text
    shown = '{name="tiny in mine", run="20270115-075959-1a2b3c", shown="tiny in mine 20270115-075959-1a2b3c"} 1'
    pattern = variables["run"]["regex"].strip("/").replace("(?<", "(?P<")
    assert re.search(pattern, shown).groupdict() == {
        "value": "20270115-075959-1a2b3c", "text": "tiny in mine 20270115-075959-1a2b3c",
    }  # fmt: skip


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    found = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_promtool_accepts_the_prometheus_configuration():
    for name in ("prometheus", "several-nodes"):
        promtool("check", "config", DOCKER / f"prometheus/{name}.yml")


def test_alert_rules_pass_their_unit_tests():
    promtool("test", "rules", *DOCKER.glob("prometheus/*.test.yaml"))


def test_promtool_accepts_every_dashboard_expression(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(expressions())
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_the_trainer_settings_are_accepted():
    assert load_config(DOCKER / "infinity.toml").telemetry.runtime_dir == "/run/infinity"


def test_compose_mounts_existing_files_and_declared_volumes():
    yaml = pytest.importorskip("yaml")
    tree = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert set(tree["services"]) == {"trainer", "infinityd", "prometheus", "grafana"}
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert tree["services"]["infinityd"]["build"]["target"] in stages
    for name, service in tree["services"].items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), (name, source)
            elif not source.startswith("${"):
                assert source in tree["volumes"], (name, source)
    for path in DOCKER.glob("grafana/provisioning/*/*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
    (target,) = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())["scrape_configs"][0][
        "static_configs"
    ]
    assert target["targets"] == ["infinityd:9470"]
