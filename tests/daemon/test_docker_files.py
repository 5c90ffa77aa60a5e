"""What of `docker/` can be checked without an engine."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.telemetry import METRICS, PREFIX, Metric

DOCKER = Path(__file__).parents[2] / "docker"


def series_names(metric: Metric) -> tuple[str, ...]:
    """Return the names under which Prometheus stores a metric."""
    name = PREFIX + metric.name
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if metric.kind == "histogram" else (name,)


SERIES = {name: metric for metric in METRICS for name in series_names(metric)}


def dashboard():
    return json.loads((DOCKER / "grafana/dashboards/infinity.json").read_text())


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_every_expression_names_metrics_and_labels_of_the_table():
    assert len(expressions()) > 20
    for expression in expressions():
        names = re.findall(r"\binfinity_\w+", expression)
        assert names, expression
        assert set(names) <= set(SERIES), expression
        known = {"le", "rank"}.union(*(SERIES[name].label_names for name in names))
        used = re.findall(r"(\w+)\s*(?:=~|!=|=)", expression)
        used += [word for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(", ")]
        assert set(used) <= known, expression
    assert re.fullmatch(r"label_values\((\w+), (\w+)\)", dashboard()["templating"]["list"][0]["definition"])


def test_every_legend_names_a_label_its_expression_keeps():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            kept = {word for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in group.split(", ")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    found = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_promtool_accepts_the_configuration():
    promtool("check", "config", DOCKER / "prometheus.yml")


def test_promtool_accepts_every_expression(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m").replace("$rank", ".*")}
        for number, text in enumerate(expressions())
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_the_trainer_settings_are_accepted():
    assert load_config(DOCKER / "infinity.toml").telemetry.runtime_dir == "/run/infinity"


def test_compose_mounts_files_that_exist_and_names_volumes_it_has():
    yaml = pytest.importorskip("yaml")
    tree = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert set(tree["services"]) == {"trainer", "infinityd", "prometheus", "grafana"}
    for name, service in tree["services"].items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), (name, source)
            elif not source.startswith("${"):
                assert source in tree["volumes"], (name, source)
    for path in DOCKER.glob("grafana/provisioning/*/*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
    (target,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"] == ["infinityd:9470"]
