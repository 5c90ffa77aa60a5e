"""Tests of unused interfaces: every operation of the daemon's socket has a caller, and every metric is queried."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from infinity.telemetry import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
CLIENT_FILES = [*(ROOT / "infinity").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
REQUEST_METHODS = {"ask", "_answer"}
"""Methods of `NodeDaemon` that send a request."""


def operations() -> set[str]:
    """Return the operations that the daemon answers: the keys of its dispatch table."""
    tree = ast.parse((ROOT / "daemon/infinity_daemon/requests.py").read_text())
    (table,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "self._ops"
    )
    assert isinstance(table, ast.Dict)
    return {str(ast.literal_eval(key)) for key in table.keys if key is not None}


def requested(source: str) -> Iterator[str]:
    """Yield the operations that a source file requests."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in REQUEST_METHODS
            and node.args
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def expressions() -> str:
    """Return the PromQL expressions of the panels, the rules and the monitoring guide."""
    panels = json.loads((ROOT / "docker/grafana/dashboards/infinity.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    rules = [
        match
        for name in ("recording.yaml", "alerts.yaml")
        for match in re.findall(
            r"expr: (?:>-\n((?:[ ]{10,}.*\n)+)|(.*))", (ROOT / "docker/prometheus" / name).read_text()
        )
    ]
    guide = re.findall(r"```promql\n(.*?)```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.DOTALL)
    return "\n".join([*shown, *("".join(match) for match in rules), *guide])


def test_every_socket_operation_is_requested() -> None:
    """The requested operations are exactly those that the daemon answers."""
    callers: dict[str, list[str]] = {}
    for file in CLIENT_FILES:
        for op in requested(file.read_text()):
            callers.setdefault(op, []).append(str(file.relative_to(ROOT)))
    assert set(callers) == operations(), callers


def test_every_metric_is_queried() -> None:
    """By a panel, a rule or the monitoring guide."""
    used = set(re.findall(rf"{PREFIX}(\w+)", expressions()))
    suffixes = ("", "_bucket", "_sum", "_count")
    assert [metric.name for metric in METRICS if not used & {metric.name + suffix for suffix in suffixes}] == []


def test_the_search_finds_calls_only() -> None:
    """Strings and comments do not count."""
    text = 'node.ask("status")\n"pace"\n# node.ask("reserve")\nself._answer("release", {})\nother.tell("bandwidth")\n'
    assert list(requested(text)) == ["status", "release"]
    assert len(operations()) >= 6
    assert f"{PREFIX}steps_total" in expressions()
    assert f"{PREFIX}no_such_total" not in expressions()
