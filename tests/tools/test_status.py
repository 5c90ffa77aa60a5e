"""`infinity status` shows all that the node's daemon answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.io.drives import locate
from infinity.node import NodeDaemon
from infinity.store.folder import RunFolder
from infinity.store.marker import new_run_id
from infinity.telemetry import Stats
from support.command import run_here
from support.daemon_process import daemon, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A runtime folder."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    return runtime


def test_a_node_with_a_rank_a_drive_a_reservation_and_a_stale_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tables and as JSON."""
    monkeypatch.setenv("COLUMNS", "300")
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    run = RunFolder.of([nvme], new_run_id())
    run.create()
    stats = Stats.create(folder, run_id="mine", rank=1, local_rank=1, world_size=8, devices=[], info={})
    stats.counter("steps_total").add(57)
    with daemon(folder, "--device-path", str(nvme)):
        node = NodeDaemon(folder)
        rates = {str(nvme): {"read": 3.21e9, "write": 1.5e9, "mixed": 2e9}}
        assert node.ask("record_bandwidth", rates=rates, source="probe")
        with node.space_reserved(str(nvme), 3 << 20, "begins"):
            until(lambda: (node.ask("status") or {})["stale_runs"])
            shown = run_here("status", "--runtime-dir", folder)
            told = run_here("status", "--runtime-dir", folder, "--json")
    stats.close()
    assert (shown.status, told.status) == (0, 0), shown.errors + told.errors
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.output.splitlines()}
    drive = locate(str(nvme)).drive.name
    assert "metrics on port" in rows["infinityd"]
    assert rows["mine"].startswith("mine 1 of 8 live 57 ")
    assert rows["begins"].startswith(f"begins {drive} {nvme} 3 MiB ")
    assert " 3.21 1.50 2.00 0 s ago " in rows[drive]
    assert rows[drive].endswith(f" {nvme}")
    assert " no commit " in rows[run.run_id]
    assert rows[run.run_id].endswith(str(run.roots[0]))
    found = json.loads(told.output)
    assert [one["run_id"] for one in found["stale_runs"]] == [run.run_id]
    assert found["paths"][0]["bandwidth"]["mixed"] == 2e9


def test_a_node_without_anything(folder: Path) -> None:
    """It says so."""
    with daemon(folder):
        shown = run_here("status", "--runtime-dir", folder)
    assert shown.status == 0
    for what in ("ranks", "drives", "reservations", "stale runs"):
        assert f"no {what}" in shown.output


def test_a_drive_that_is_gone_and_texts_that_look_like_markup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is hidden, and nothing breaks."""
    monkeypatch.setenv("COLUMNS", "200")
    answer: dict[str, Any] = {
        "version": "1", "pid": 1, "started": 0.0, "metrics_port": 9, "collectors": {"devices": False},
        "ranks": [{"run_id": "[red]x", "rank": 0, "world_size": 1, "pid": 5, "status": "dead", "steps": 1.0}],
        "paths": [{"path": "/gone", "error": "No such file"}],
        "reservations": [], "stale_runs": [],
    }  # fmt: skip
    monkeypatch.setattr(NodeDaemon, "ask", lambda self, op: answer)
    shown = run_here("status", "--runtime-dir", folder)
    assert "cannot collect devices" in shown.output
    assert "[red]x" in shown.output
    assert "/gone: No such file" in shown.output


def test_without_a_daemon_it_says_where_none_answers(folder: Path) -> None:
    """In one line."""
    shown = run_here("status", "--runtime-dir", folder)
    assert shown.status == 2
    assert f"no infinityd of yours or root's answers in '{folder}'" in shown.errors
    assert shown.output == ""
