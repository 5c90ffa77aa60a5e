"""Tests of `infinity status`."""

from __future__ import annotations

import getpass
import io
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.daemon_client import NodeDaemon
from infinity.io.block_devices import locate
from infinity.store.folder import RunFolder
from infinity.store.marker import new_run_id
from infinity_tools.status import _tables
from infinity_tools.tables import show_whole
from support.command import run_here
from support.counted_rank import make_stats
from support.daemon_process import daemon, until


def test_status_shows_ranks_drives_reservations_and_stale_runs(runtime: Path, tmp_path: Path) -> None:
    """Tables and JSON contain the same data."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    run = RunFolder.of([nvme], new_run_id())
    run.create()
    stats = make_stats(runtime, "mine", 1, 8)
    stats.counter("steps_total").add(57)
    with daemon(runtime, "--device-path", str(nvme)):
        node = NodeDaemon(runtime)
        rates = {str(nvme): {"read": 3.21e9, "write": 1.5e9, "mixed": 2e9}}
        assert node.ask("record_bandwidth", rates=rates, source="probe")
        with node.space_reserved(str(nvme), 3 << 20, "begins"):
            # The drives are listed before they have been looked at.
            until(lambda: (found := node.ask("state")) and found["stale_runs"] and '"profile"' in json.dumps(found))
            shown = run_here("status", "--runtime-dir", runtime)
            as_json = run_here("status", "--runtime-dir", runtime, "--json")
    stats.close()
    assert (shown.status, as_json.status) == (0, 0), shown.errors + as_json.errors
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.output.splitlines()}
    drive = locate(str(nvme)).drive.name
    assert "metrics on port" in rows["infinityd"]
    assert rows["mine"].startswith(f"mine mine {getpass.getuser()} 1 of 8 live 57 ")
    assert rows["begins"].startswith(f"begins {getpass.getuser()} {drive} 3 MiB ")
    assert rows["begins"].endswith(f" {nvme}")
    assert re.search(r" 3\.21 1\.50 2\.00 \d+ \w+ ago ", rows[drive])
    assert rows[drive].endswith(f" {nvme}")
    assert " no checkpoint " in rows[run.run_id]
    assert rows[run.run_id].endswith(str(run.roots[0]))
    found = json.loads(as_json.output)
    assert [one["id"] for one in found["stale_runs"]] == [run.run_id]
    assert found["drives"][0]["profile"]["mixed"] == 2e9


def test_status_shows_missing_drive_and_escapes_markup(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer: dict[str, Any] = {
        "node": {"version": "1", "pid": 1, "started": 0.0, "metrics_port": 9, "collectors": {"devices": False}},
        "runs": [{"id": "[red]x", "name": "x", "user": "me", "world_size": 1,
                  "ranks": [{"rank": 0, "pid": 5, "status": "dead", "steps": 1.0}]}],
        "drives": [{"name": "/gone", "paths": ["/gone"], "error": "No such file"}],
        "reservations": [], "stale_runs": [], "omitted_runs": 3,
    }  # fmt: skip
    monkeypatch.setattr(NodeDaemon, "ask", lambda self, op: answer)
    shown = run_here("status", "--runtime-dir", runtime)
    assert "failed to collect devices" in shown.output
    assert "[red]x" in shown.output
    assert "/gone: No such file" in shown.output
    assert "3 more runs not shown" in shown.output
    for section in ("reservations", "stale runs"):
        assert f"no {section}" in shown.output


RUN_ID = "20260101-120000-a1b2c3"
FOLDER = "/mnt/a-drive-with-a-long-name/and-a-folder/of-this-project"
FULL: dict[str, Any] = {
    "runs": [{"id": RUN_ID, "name": "tiny", "user": "me", "world_size": 1,
              "ranks": [{"rank": 0, "pid": 5, "status": "dead", "steps": 1.0}]}],
    "drives": [{"name": "nvme0n1", "paths": [FOLDER, "/mnt/other"], "free": 1 << 40,
                "wear": {"ratio": 0.01, "days": 900.0},
                "profile": {"read": 7e9, "write": 5e9, "mixed": 6e9, "measured": 0.0}}],
    "reservations": [{"run_id": RUN_ID, "user": "me", "device": "nvme0n1", "path": FOLDER, "bytes": 1 << 30,
                      "pid": 12345}],
    "stale_runs": [{"id": RUN_ID, "bytes": 123 << 30, "checkpointed": False, "complete": False, "changed": 0.0,
                    "folders": [f"{FOLDER}/{RUN_ID}", f"/mnt/other/{RUN_ID}"]}],
}  # fmt: skip


def test_ids_and_paths_are_not_truncated() -> None:
    """A terminal wraps long lines itself, and each path ends its line."""
    for width, terminal in product((40, 80, 120), (True, False)):
        console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False)
        for one in _tables(FULL):
            show_whole(console, one)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert len(lines) == 4 * 3 + 2
        assert sum(line.startswith(f"{RUN_ID} ") for line in lines) == 3
        assert sum(line.startswith("nvme0n1 ") for line in lines) == 1
        assert sum(line.endswith(f"  {FOLDER}") for line in lines) == 2
        assert [line.split("  ")[-1] for line in lines[-2:]] == [f"{FOLDER}/{RUN_ID}", f"/mnt/other/{RUN_ID}"]


def test_status_without_daemon_names_runtime_folder(runtime: Path) -> None:
    shown = run_here("status", "--runtime-dir", runtime)
    assert shown.status == 2
    assert "no infinityd" in shown.errors
    assert f"'{runtime}'" in shown.errors
    assert shown.output == ""
