"""Tests of the text that `infinity top` draws at several sizes, and of its keys.

``PYTHONPATH=.:tools python tests/tools/test_top_view.py`` regenerates the stored views.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from infinity.telemetry.metrics import PARTS, STALLS
from infinity.telemetry.trees import Tree
from infinity_tools.top.minute import Minute, buckets
from infinity_tools.top.reading import Snapshot
from infinity_tools.top.table_cells import ASCII, LOOKS, bar, curve, decimal, legend, rates
from infinity_tools.top.view import view
from infinity_tools.top.view_state import SORTS, State

VIEWS = Path(__file__).parent / "top_views"
SIZES = [(60, 12), (80, 40)]
NOW = 1.8e9
SHARES = {
    "compute": 0.52, "collective": 0.06, "copy": 0.04, "update": 0.13, "read_stall": 0.17, "write_stall": 0.02,
    "host_cache_stall": 0.01, "python": 0.05,
}  # fmt: skip


def rank(number: int, **values: Any) -> Tree:
    """Return a rank of the first run, with `values` replaced."""
    defaults = {
        "rank": number, "pid": 4000 + number, "status": "live", "steps": 1234.0, "step_seconds": 0.5 + number / 10,
        "tokens_per_second": 4096.0, "parts": SHARES, "stalled": 0.2, "read": 0.6e9, "write": 0.4e9,
        "host_cache_used": 48 << 20, "host_cache_capacity": 64 << 20, "errors": 0.0,
    }  # fmt: skip
    return {**defaults, **values}


def run(run_id: str, **values: Any) -> Tree:
    """Return a run like the first one, with `values` replaced."""
    defaults = {
        "id": run_id, "name": run_id, "status": "live", "world_size": 4, "steps": 1234.0, "step_seconds": 0.55,
        "tokens_per_second": 8192.0, "loss": 2.34567, "parts": SHARES, "stalled": 0.2,
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


FIRST = SNAPSHOT.runs[0]["id"]


def shown(state: State, width: int = 120, height: int = 40) -> str:
    """Return the text of a view."""
    return view(state, width, height).plain


def state_with_runs(*runs) -> State:
    """Return a state with these runs."""
    return replace(STATE, snapshot=replace(SNAPSHOT, runs=runs), expanded=frozenset())


def order(state: State) -> list[str]:
    """Return the run ids in display order."""
    return [one["id"] for one in state.runs]


def test_view_matches_stored_text() -> None:
    assert views() == {path.name: path.read_text() for path in VIEWS.iterdir()}


def test_monitoring_guide_shows_current_view() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "monitoring.md").read_text()
    section = guide[guide.index("## In a terminal") :]
    assert re.search(r"```text\n(.*?)```", section, re.DOTALL)[1] == shown(SAMPLE, 100) + "\n"


def test_view_fits_any_screen_size() -> None:
    """The state has more runs than lines, wide characters and long names."""
    many = [run(f"run-{number}", steps=10.0**number, loss=-(10.0**number), status="idle") for number in range(20)]
    drives = ({**DRIVE, "name": "盘" * 30}, {**DRIVE, "name": "/nvme/" + "盘" * 100, "error": "No such file"}, DRIVE)
    snapshot = replace(SNAPSHOT, runs=(*many, DEAD, STARTING, run("x" * 128)), drives=drives, notes=("wide 盘 " * 40,))
    full = replace(STATE, snapshot=snapshot, expanded=frozenset(one["id"] for one in many))
    widths, heights = (1, 59, 100, 300), (1, 5, 24, 200)
    for ascii, help, width, height in product((False, True), (False, True), widths, heights):
        lines = shown(replace(full, ascii=ascii, help=help), width, height).split("\n")
        assert len(lines) <= height, (width, height)
        assert max(map(cell_len, lines)) <= width, (width, height)
        assert all(line == line.rstrip() for line in lines)
        assert not ascii or "".join(lines).isascii()


def test_selected_run_is_visible() -> None:
    """The keys are visible too, and the drives if the screen has at least 12 lines."""
    state = state_with_runs(*(run(f"run-{number:02d}", step_seconds=1.0) for number in range(30)))
    for height, number in product((8, 12, 13, 39), (0, 15, 29)):
        text = shown(replace(state, chosen=f"run-{number:02d}"), 80, height)
        assert f"> run-{number:02d}" in text, height
        assert text.split("\n")[-1].startswith("q quit"), height
        assert height < 12 or "nvme0n1" in text, height


def test_expanded_run_shows_hidden_columns() -> None:
    """No figure is lost on a narrow terminal."""
    for width in (60, 80, 120, 200):
        text = shown(STATE, width)
        for said in ("2 min (0.021 s)", "75% of 128 MiB", "93%/7%", "0/3", "1.20/0.80 GB/s", "8.19k"):
            assert said in text, (width, said)
    assert "0/3" not in shown(replace(STATE, expanded=frozenset()), 80)


def test_node_without_runs_suggests_command() -> None:
    """The runtime folder is shown as well."""
    text = shown(state_with_runs(), 60)
    assert "no run on this node" in text
    assert "/run/infinity" in text
    assert "infinity train --model tiny" in text
    only = shown(replace(STATE, only="2028"), 60)
    assert "no run id starts with 2028" in only
    assert FIRST in only


def test_first_line_shows_source_order_and_pause() -> None:
    assert shown(STATE).split("\n")[0] == (
        "infinity top  runs: 2 live, 1 dead  by step time  from infinityd 0.1.0  every 1 s"
    )
    paused = shown(replace(STATE, paused=True, reverse=True, snapshot=replace(SNAPSHOT, infinityd=None)), 80)
    assert paused.split("\n")[0] == "infinity top  runs: 2 live, 1 dead  paused  by step time, reversed"
    assert "q quit" not in shown(replace(STATE, interactive=False))


def test_sort_orders() -> None:
    """The largest value is first, and finished runs are last even in reverse order."""
    runs = (
        run("a", step_seconds=1.0, stalled=0.1, io={"read": 5e9}),
        run("b", step_seconds=3.0, stalled=0.3, io={"read": None}),
        run("c", step_seconds=2.0, stalled=0.4, io={"read": 1e9}),
        run("d", step_seconds=9.0, stalled=0.9, io={"read": 9e9}, status="ended"),
    )
    state, seen = state_with_runs(*runs), {}
    for _ in SORTS:
        seen[state.sort] = "".join(order(state))
        state = state.pressed("s")
    assert seen == {"step time": "bcad", "stall share": "cbad", "bytes": "acbd", "id": "abcd"}
    assert state.sort == SORTS[0]
    assert "".join(order(state.pressed("r"))) == "acbd"
    assert state.pressed("r").pressed("r") == state


def test_keys_select_and_expand_runs() -> None:
    """The selection stops at both ends; if the selected run disappears, the first one is selected."""
    state = state_with_runs(run("a"), run("b"), run("c"))
    assert state.chosen_run == "a"
    down = state.pressed("down").pressed("j")
    assert down.chosen_run == down.pressed("j").chosen_run == "c"
    assert down.pressed("up").pressed("k").pressed("k").chosen_run == "a"
    open_ = down.pressed("enter")
    assert open_.expanded == {"c"}
    assert "rank 1" in shown(open_)
    assert "rank 1" not in shown(open_.pressed("enter"))
    gone = replace(open_, snapshot=replace(SNAPSHOT, runs=(run("a"), run("b"))))
    assert gone.chosen_run == "a"
    assert state_with_runs().pressed("enter").pressed("j") == state_with_runs()


def test_help_explains_bar_parts_and_sort_orders() -> None:
    text = shown(replace(STATE, help=True), 80, 60)
    assert all(f"{look.mark} {look.name}" in text for look in LOOKS.values())
    assert ", ".join(SORTS) in text


def test_bar_parts_are_proportional() -> None:
    """Every part has a distinct mark, so that colors are not required; stalls are letters."""
    assert tuple(LOOKS) == PARTS
    marks = "".join(look.mark for look in LOOKS.values())
    assert len(set(marks)) == len(set(marks.translate(ASCII))) == len(PARTS)
    assert marks.translate(ASCII).isascii()
    assert all(LOOKS[part].mark.isalpha() for part in STALLS)
    assert bar({"compute": 0.5, "read_stall": 0.25, "python": 0.25}, 8).plain == "████rr··"
    for width in range(1, 50):
        drawn = bar(rank(0)["parts"], width).plain
        assert len(drawn) == width
    assert legend({"compute": 0.75, "read_stall": 0.25}, 40).plain == "█ compute 75%  r read stall 25%"
    assert legend({"compute": 0.75, "read_stall": 0.25}, 20).plain == "█ compute 75%"


def test_numbers_have_at_most_six_characters() -> None:
    for value in (0.0, 0.01234, 9.9996, 12.345, 99.996, 123.4, 99_999.0, 1e6, 1e300, float("nan"), float("-inf")):
        assert len(decimal(value)) <= 6, value
    assert [decimal(value) for value in (0.01234, 12.345, 123.4, None)] == ["0.012", "12.35", "123", "-"]
    assert rates(1.2e9, 3e6) == "1.20/0.00 GB/s"
    assert rates(None, 3e6) == "-/3 MB/s"


def test_curve_shows_last_60_seconds() -> None:
    """The curve is scaled to the measured bandwidth, and missing samples are blank."""
    minute = Minute()
    for second in range(100):
        drive = {**DRIVE, "read": float(second), "write": 0.0}
        curves = minute.add(replace(SNAPSHOT, time=NOW + second, drives=(drive,)))
    seen = curves["nvme0n1"]
    assert (seen[0], seen[-1], len(seen)) == ((60.0, 39.0), (0.0, 99.0), 61)
    assert buckets(seen[-5:], 6) == [None] * 5 + [97.0]
    assert curve([None, 0.0, 50.0, 100.0, 1000.0], 100.0) == " ▁▅██"
    assert curve([0.0, 0.0], 0.0) == "▁▁"
    unknown = {"name": "nvme0n1"}
    assert minute.add(replace(SNAPSHOT, time=NOW + 100, drives=(unknown,)))["nvme0n1"][-1] == (1.0, 99.0)
    assert minute.add(replace(SNAPSHOT, time=NOW + 101, drives=())) == {}


if __name__ == "__main__":
    VIEWS.mkdir(exist_ok=True)
    for name, text in views().items():
        (VIEWS / name).write_text(text)
