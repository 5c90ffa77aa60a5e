"""What `infinity top` draws, as text, at several sizes; and what keys change of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from infinity.telemetry.metrics import PARTS, STALLS
from infinity_tools.top.minute import Minute, buckets
from infinity_tools.top.table_cells import LOOKS, bar, curve, decimal, legend, rates
from infinity_tools.top.view import view
from infinity_tools.top.view_state import SORTS, State
from support.top_state import DEAD, DRIVE, NOW, SAMPLE, SNAPSHOT, STARTING, STATE, VIEWS, rank, run, views

FIRST = SNAPSHOT.runs[0].id


def shown(state: State, width: int = 120, height: int = 40) -> str:
    """The text of a view."""
    return view(state, width, height).plain


def of_runs(*runs) -> State:
    """A node with these runs."""
    return replace(STATE, snapshot=replace(SNAPSHOT, runs=runs), expanded=frozenset())


def order(state: State) -> list[str]:
    """Ids of the runs as they are shown, shortened."""
    return [one.id for one in state.runs]


@pytest.mark.parametrize("name", sorted(views()))
def test_the_view_at_each_size(name: str) -> None:
    """`tests/support/top_state.py` writes them anew."""
    assert views()[name] == (VIEWS / name).read_text()
    assert sorted(views()) == sorted(path.name for path in VIEWS.iterdir())


def test_the_guide_shows_what_is_drawn() -> None:
    """The sample in docs/how-to/monitoring.md."""
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "monitoring.md").read_text()
    section = guide[guide.index("## In a terminal") :]
    assert re.search(r"```text\n(.*?)```", section, re.DOTALL)[1] == shown(SAMPLE, 100) + "\n"


@pytest.mark.parametrize("help", [False, True])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_longer_than_the_screen(help: bool, ascii: bool) -> None:
    """However small it is, whatever is on it: more runs than lines, wide letters, long names."""
    many = [run(f"run-{number}", step=10.0**number, loss=-(10.0**number), status="idle") for number in range(20)]
    drives = (replace(DRIVE, name="盘" * 30), replace(DRIVE, name="/nvme/" + "盘" * 100, error="No such file"), DRIVE)
    snapshot = replace(SNAPSHOT, runs=(*many, DEAD, STARTING, run("x" * 128)), drives=drives, notes=("wide 盘 " * 40,))
    state = replace(STATE, snapshot=snapshot, expanded=frozenset(one.id for one in many), ascii=ascii, help=help)
    for width in (1, 7, 20, 40, 59, 60, 61, 80, 100, 143, 300):
        for height in (1, 2, 3, 5, 8, 15, 24, 200):
            lines = shown(state, width, height).split("\n")
            assert len(lines) <= height, (width, height)
            assert max(map(cell_len, lines)) <= width, (width, height)
            assert all(line == line.rstrip() for line in lines)
            assert not ascii or "".join(lines).isascii()


@pytest.mark.parametrize("height", range(8, 40))
def test_the_chosen_run_is_on_the_screen(height: int) -> None:
    """With the keys, and the drives where there is room."""
    state = of_runs(*(run(f"run-{number:02d}", step_seconds=1.0) for number in range(30)))
    for number in (0, 1, 15, 28, 29):
        text = shown(replace(state, chosen=f"run-{number:02d}"), 80, height)
        assert f"> run-{number:02d}" in text
        assert text.split("\n")[-1].startswith("q quit")
        assert height < 12 or "nvme0n1" in text


def test_what_has_no_room_in_the_table_is_below_an_expanded_run() -> None:
    """So nothing is lost on a narrow terminal."""
    for width in (60, 80, 120, 200):
        text = shown(STATE, width)
        for said in ("2 min (0.021 s)", "75% of 128 MiB", "93%/7%", "0/3", "1.20/0.80 GB/s", "8.19k"):
            assert said in text, (width, said)
    assert "0/3" not in shown(replace(STATE, expanded=frozenset()), 80)


def test_figures_that_ask_for_attention_are_said_on_a_line_of_their_own() -> None:
    """A rank that died, transfers that failed, a loss that is no number; whatever columns there are."""
    text = shown(of_runs(DEAD), 80)
    assert f"{DEAD.id}: rank 0 died, failed transfers: 2, loss is nan" in text
    assert "died" not in shown(of_runs(STARTING), 80)


def test_a_node_without_runs_says_what_to_start() -> None:
    """And where it looks."""
    text = shown(of_runs(), 60)
    assert "no run on this node" in text
    assert "/run/infinity" in text
    assert "infinity train --model tiny" in text
    only = shown(replace(STATE, only="2028"), 60)
    assert "no run id starts with 2028" in only
    assert FIRST in only


def test_the_first_line_says_how_it_looks() -> None:
    """Where from, in which order, and whether it is paused."""
    assert shown(STATE).split("\n")[0] == (
        "infinity top  runs: 2 live, 1 dead  by step time  from infinityd 0.1.0  every 1 s"
    )
    paused = shown(replace(STATE, paused=True, reverse=True, snapshot=replace(SNAPSHOT, infinityd=None)), 80)
    assert paused.split("\n")[0] == "infinity top  runs: 2 live, 1 dead  paused  by step time, reversed"
    assert "q quit" not in shown(replace(STATE, interactive=False))


def test_sort_orders() -> None:
    """The largest first; what has ended comes last in any order; reversed within."""
    runs = (
        run("a", step_seconds=1.0, stalled=0.1, read_bytes_per_second=5e9),
        run("b", step_seconds=3.0, stalled=0.3, read_bytes_per_second=None),
        run("c", step_seconds=2.0, stalled=0.4, read_bytes_per_second=1e9),
        run("d", step_seconds=9.0, stalled=0.9, read_bytes_per_second=9e9, status="ended"),
    )
    state, seen = of_runs(*runs), {}
    for _ in SORTS:
        seen[state.sort] = "".join(order(state))
        state = state.pressed("s")
    assert seen == {"step time": "bcad", "stall share": "cbad", "bytes": "acbd", "id": "abcd"}
    assert state.sort == SORTS[0]
    assert "".join(order(state.pressed("r"))) == "acbd"
    assert state.pressed("r").pressed("r") == state


def test_keys_choose_and_expand() -> None:
    """Down and up stop at the ends; a run that is gone stands for the first."""
    state = of_runs(run("a"), run("b"), run("c"))
    assert state.chosen_run.id == "a"
    down = state.pressed("down").pressed("j")
    assert down.chosen_run.id == down.pressed("j").chosen_run.id == "c"
    assert down.pressed("up").pressed("k").pressed("k").chosen_run.id == "a"
    open_ = down.pressed("enter")
    assert open_.expanded == {"c"}
    assert "rank 1" in shown(open_)
    assert "rank 1" not in shown(open_.pressed("enter"))
    gone = replace(open_, snapshot=replace(SNAPSHOT, runs=(run("a"), run("b"))))
    assert gone.chosen_run.id == "a"
    assert of_runs().pressed("enter").pressed("j") == of_runs()


def test_other_keys() -> None:
    """Pause, help and what means nothing."""
    assert STATE.pressed("p").paused
    assert not STATE.pressed("p").pressed("p").paused
    help = STATE.pressed("?")
    assert "\nq " in shown(help)
    assert help.pressed("x") == STATE
    assert STATE.pressed("x") == STATE.pressed("escape") == STATE


def test_the_help_explains_every_part_and_order() -> None:
    """With the mark that it has in a bar."""
    text = shown(replace(STATE, help=True), 80, 60)
    assert all(f"{look.mark} {look.name}" in text for look in LOOKS.values())
    assert ", ".join(SORTS) in text


def test_a_bar_is_as_long_as_it_should_be() -> None:
    """Parts stand in proportion, told apart without colors; every part has a look, and stalls are letters."""
    assert tuple(LOOKS) == PARTS
    for marks in ([look.mark for look in LOOKS.values()], [look.plain for look in LOOKS.values()]):
        assert len(set(marks)) == len(PARTS)
    assert all(LOOKS[part].mark.isalpha() for part in STALLS)
    assert bar({"compute": 0.5, "read_stall": 0.25, "python": 0.25}, 8, plain=True).plain == "####rr.."
    for width in range(1, 50):
        drawn = bar(rank(0).parts, width, plain=False).plain
        assert len(drawn) == width
    assert legend({"compute": 0.75, "read_stall": 0.25}, 40, plain=True).plain == "# compute 75%  r read stall 25%"
    assert legend({"compute": 0.75, "read_stall": 0.25}, 20, plain=True).plain == "# compute 75%"


def test_numbers_stay_short() -> None:
    """Whatever they are."""
    for value in (0.0, 0.01234, 9.9996, 12.345, 99.996, 123.4, 99_999.0, 1e6, 1e300, float("nan"), float("-inf")):
        assert len(decimal(value)) <= 6, value
    assert [decimal(value) for value in (0.01234, 12.345, 123.4, None)] == ["0.012", "12.35", "123", "-"]
    assert rates(1.2e9, 3e6) == "1.20/0.00 GB/s"
    assert rates(None, 3e6) == "-/3 MB/s"


def test_the_curve_of_a_minute() -> None:
    """Is of the last sixty seconds, as high as the profile; what was not seen is blank."""
    minute = Minute()
    for second in range(100):
        drive = replace(DRIVE, read_bytes_per_second=float(second), written_bytes_per_second=0.0)
        curves = minute.add(replace(SNAPSHOT, time=NOW + second, drives=(drive,)))
    seen = curves[DRIVE.name]
    assert (seen[0], seen[-1], len(seen)) == ((60.0, 39.0), (0.0, 99.0), 61)
    assert buckets(seen[-5:], 6) == [None] * 5 + [97.0]
    assert curve([None, 0.0, 50.0, 100.0, 1000.0], 100.0, plain=False) == " ▁▅██"
    assert curve([0.0, 0.0], 0.0, plain=True) == "__"
    unknown = replace(DRIVE, read_bytes_per_second=None)
    assert minute.add(replace(SNAPSHOT, time=NOW + 100, drives=(unknown,)))[DRIVE.name][-1] == (1.0, 99.0)
    assert minute.add(replace(SNAPSHOT, time=NOW + 101, drives=())) == {}
