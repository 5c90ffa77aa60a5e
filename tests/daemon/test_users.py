"""Nothing is served that nobody uses: every operation of the socket is asked, and every metric is shown or watched."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from infinity.telemetry import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
ASKERS = [*(ROOT / "infinity").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
ASK = {"ask", "_answer"}
"""Methods of `NodeDaemon` that send a question."""


def operations() -> set[str]:
    """Return the operations that the daemon answers: the keys of its table."""
    tree = ast.parse((ROOT / "daemon/infinity_daemon/requests.py").read_text())
    (table,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "self._ops"
    )
    assert isinstance(table, ast.Dict)
    return {str(ast.literal_eval(key)) for key in table.keys if key is not None}


def asked(source: str) -> Iterator[str]:
    """Yield the operations that a file asks for."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASK and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def expressions() -> str:
    """Return what panels, rules and the guide ask of Prometheus."""
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


def test_every_operation_of_the_socket_is_asked_for() -> None:
    """By the library or a command; and none is asked for that is not answered."""
    users: dict[str, list[str]] = {}
    for file in ASKERS:
        for op in asked(file.read_text()):
            users.setdefault(op, []).append(str(file.relative_to(ROOT)))
    assert set(users) == operations(), users


def test_every_metric_is_asked_for() -> None:
    """By a panel, a rule or the guide."""
    used = set(re.findall(rf"{PREFIX}(\w+)", expressions()))
    suffixes = ("", "_bucket", "_sum", "_count")
    assert [metric.name for metric in METRICS if not used & {metric.name + suffix for suffix in suffixes}] == []


def test_what_loses_its_last_user_is_found() -> None:
    """The search sees calls, not words."""
    text = 'node.ask("status")\n"pace"\n# node.ask("reserve")\nself._answer("release", {})\nother.tell("bandwidth")\n'
    assert list(asked(text)) == ["status", "release"]
    assert len(operations()) >= 6
    assert f"{PREFIX}steps_total" in expressions()
    assert f"{PREFIX}no_such_total" not in expressions()
