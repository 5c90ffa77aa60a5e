"""Sample node for tests of `infinity top`, and its views at several sizes.

``PYTHONPATH=.:tools python tests/support/top_state.py`` regenerates the views.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.telemetry.trees import Tree
from infinity_tools.top.reading import Snapshot
from infinity_tools.top.view import view
from infinity_tools.top.view_state import State

VIEWS = Path(__file__).parents[1] / "tools" / "top_views"
SIZES = [(60, 12), (80, 40)]
NOW = 1.8e9
PARTS = {
    "compute": 0.52, "collective": 0.06, "copy": 0.04, "update": 0.13, "read_stall": 0.17, "write_stall": 0.02,
    "host_cache_stall": 0.01, "python": 0.05,
}  # fmt: skip


def rank(number: int, **values: Any) -> Tree:
    """Return a rank of the first run, with `values` replaced."""
    defaults = {
        "rank": number, "pid": 4000 + number, "status": "live", "steps": 1234.0, "step_seconds": 0.5 + number / 10,
        "tokens_per_second": 4096.0, "parts": PARTS, "stalled": 0.2, "read": 0.6e9, "write": 0.4e9,
        "host_cache_used": 48 << 20, "host_cache_capacity": 64 << 20, "errors": 0.0,
    }  # fmt: skip
    return {**defaults, **values}


def run(run_id: str, **values: Any) -> Tree:
    """Return a run like the first one, with `values` replaced."""
    defaults = {
        "id": run_id, "name": run_id, "status": "live", "world_size": 4, "steps": 1234.0, "step_seconds": 0.55,
        "tokens_per_second": 8192.0, "loss": 2.34567, "parts": PARTS, "stalled": 0.2,
        "io": {"read": 1.2e9, "write": 0.8e9, "errors": 0.0, "retries": 3.0},
        "host_cache": {"capacity": 128 << 20, "roles": {"param": 96 << 20}},
        "checkpoint": {"last": NOW - 90, "seconds": 0.021, "count": 12.0},
        "fetches": {"hit": 0.93, "late": 0.05, "miss": 0.02}, "ranks": [rank(0), rank(1)],
    }  # fmt: skip
    return {**defaults, **values}


TRAINING = run("20270115-075959-1a2b3c", name="Qwen3-8B in alice", other_hosts=["node1"])
STARTING = {
    "id": "20270115-080001-3d4e5f", "name": "20270115-080001-3d4e5f", "status": "live", "world_size": 1, "steps": 0.0,
    "io": {"errors": 0.0, "retries": 0.0}, "checkpoint": {"count": 0}, "ranks": [rank(0, steps=0.0)],
}  # fmt: skip
DEAD = run(
    "20270114-120000-0a0b0c", status="dead", world_size=1, steps=77.0, step_seconds=0.125, loss="nan", stalled=0.05,
    io={"errors": 2.0, "retries": 3.0}, ranks=[rank(0, status="dead", steps=77.0)],
)  # fmt: skip
DRIVE: Tree = {
    "name": "nvme0n1", "read": 1.3e9, "write": 0.8e9, "busy": 0.83, "free": 1.2e12, "capacity": 1.92e12,
    "profile": {"mixed": 3.2e9}, "wear": {"ratio": 0.04, "days": 812.0},
}  # fmt: skip
UNKNOWN = {"name": "nvme1n1"}
SNAPSHOT = Snapshot(
    time=NOW, infinityd="0.1.0", runtime_dir="/run/infinity", runs=(TRAINING, STARTING, DEAD),
    drives=(DRIVE, UNKNOWN), notes=("ignored a stats file that is unreadable or from a different version",),
)  # fmt: skip
STATE = State(
    snapshot=SNAPSHOT,
    curves={"nvme0n1": tuple((58.0 - second, 3.2e9 * second / 58) for second in range(58))},
    expanded=frozenset(["20270115-075959-1a2b3c"]),
)
SAMPLE = replace(
    STATE,
    snapshot=replace(SNAPSHOT, runs=SNAPSHOT.runs[:2], drives=(DRIVE,), notes=()),
    interactive=False,
)
"""State shown in docs/how-to/monitoring.md, with 100 columns."""


def views() -> dict[str, str]:
    """Return the view of `STATE` at each size, by file name."""
    return {f"{width}x{height}.txt": view(STATE, width, height).plain + "\n" for width, height in SIZES}


if __name__ == "__main__":
    VIEWS.mkdir(exist_ok=True)
    for name, text in views().items():
        (VIEWS / name).write_text(text)
