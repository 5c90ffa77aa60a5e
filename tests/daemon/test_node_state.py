"""The state of the node as a tree: what it says of runs and drives, what it leaves out, and that it is bounded."""

from __future__ import annotations

import json
import math
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.io.block_devices import Drive, locate
from infinity.telemetry import METRICS
from infinity.telemetry.history import History
from infinity.telemetry.run_views import Runs
from infinity.telemetry.stats_cells import label_sets
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_bandwidth import Profile
from infinity_daemon.drive_wear import WearWatch
from infinity_daemon.node_state import NodeState
from infinity_daemon.reservations import Owner, Reservations
from infinity_daemon.stats_files import Found
from support.counted_rank import CountedRank

UNIX = 1.7e9
"""The Unix time of monotonic second 0."""


def look(runs: Runs, ranks: list[CountedRank], now: float, limits=()) -> list[dict]:
    """Let the pages of ranks be looked at."""
    return runs.look([rank.stats.snapshot() for rank in ranks], dict(limits), now, UNIX + now)


def steps(runs: Runs, ranks: list[CountedRank], when: range, **counted) -> dict:
    """Have each rank take a step a second, look after each, and return the first run."""
    for now in when:
        for rank in ranks:
            rank.step(when=UNIX + now, **counted)
        found = look(runs, ranks, float(now))
    return found[0]


@given(number=st.integers(0, 3000), most=st.sampled_from([4, 8, 50]))
def test_a_history_of_any_length_keeps_all_of_its_time(number, most):
    """Its first and its last row are about the first and the last that were added, and between them they rise."""
    history = History(most)
    for index in range(number):
        history.add((float(index), 1.0, None))
    rows = history.rows()
    assert min(number, most // 2) <= len(rows) <= most
    if number:
        each = max(1.0, 4 * number / most)
        assert rows[0][0] <= each
        assert number - 1 - rows[-1][0] <= each
        assert all(a[0] < b[0] for a, b in pairwise(rows))
        assert all(row[1:] == (1.0, None) for row in rows)


def test_a_row_that_is_thinned_is_the_mean_of_what_is_known():
    history = History(2)
    for value in (1.0, None, math.nan, 3.0):
        history.add((value,))
    assert history.rows() == [(2.0,)]
    nothing = History(2)
    for value in (math.nan, math.inf):
        nothing.add((value,))
    assert nothing.rows() == [(math.inf,)]  # that it was no number is not hidden


def test_figures_of_a_run_are_those_of_its_steps():
    ranks = [CountedRank(None, rank=rank, world_size=4) for rank in (0, 1)]
    runs = Runs(lambda path: None)
    look(runs, ranks, 0.0)
    for rank, loss in zip(ranks, (2.0, 4.0), strict=True):
        rank.stats.gauge("training_loss").set(loss)
    ranks[1].save_checkpoint(when=UNIX + 3)
    ranks[0].save_checkpoint(when=UNIX + 2)
    run = steps(runs, ranks, range(1, 21))
    assert (run["id"], run["status"], run["world_size"], len(run["ranks"])) == ("run-1", "live", 4, 2)
    assert (run["steps"], run["loss"], run["tokens"], run["last_step"]) == (20, 3.0, 4000, UNIX + 20)
    assert run["step_seconds"] == pytest.approx(0.5)
    assert run["tokens_per_second"] == pytest.approx(400)
    assert run["parts"]["compute"] == pytest.approx(0.8)
    assert run["stalled"] == pytest.approx(0.2)
    assert run["fetches"] == pytest.approx({"hit": 0.9, "late": 0.1, "miss": 0})
    assert run["io"]["read"] == pytest.approx(2 * (6 << 20))
    assert run["io"]["write"] == pytest.approx(2 * (4 << 20))
    assert run["io"]["read_per_step"] == 2 * (6 << 20)
    assert run["io"]["read_total"] == 40 * (6 << 20)
    assert run["host_cache"]["capacity"] == 2 * (64 << 20)
    assert run["host_cache"]["roles"] == {
        "param": 2 * (8 << 20),
        "update": 2 * (16 << 20),
        "grad": 2 * (24 << 20),
        "activation": 0,
    }
    assert run["checkpoint"] == {"last": UNIX + 2, "count": 1, "seconds": 2.0}  # the last that all ranks have
    rank = run["ranks"][1]
    assert (rank["rank"], rank["steps"], rank["host_cache_used"], rank["errors"]) == (1, 20, 48 << 20, 0)
    assert rank["tokens_per_second"] == pytest.approx(200)


def test_figures_are_of_now_and_not_of_the_whole_run():
    """After a change of speed they are those of the last ten seconds; a page that is seen late gives its mean."""
    rank, runs = CountedRank(None), Runs(lambda path: None)
    look(runs, [rank], 0.0)
    steps(runs, [rank], range(1, 30), seconds=0.5)
    run = steps(runs, [rank], range(30, 45), seconds=0.25)
    assert run["step_seconds"] == pytest.approx(0.25)
    assert run["tokens_per_second"] == pytest.approx(400)
    fresh = look(Runs(lambda path: None), [rank], 45.0)[0]
    assert fresh["step_seconds"] == pytest.approx((29 * 0.5 + 15 * 0.25) / 44)


def test_looks_that_are_far_apart_have_rates_too():
    """Those between the last two."""
    rank, runs = CountedRank(None), Runs(lambda path: None)
    look(runs, [rank], 0.0)
    for now in (60.0, 120.0):
        for _ in range(60):
            rank.step(when=UNIX + now)
        run = look(runs, [rank], now)[0]
        assert run["io"]["read"] == pytest.approx(6 << 20)


def test_steps_that_take_long_have_figures_too():
    """One a minute: those of the last one."""
    rank, runs = CountedRank(None), Runs(lambda path: None)
    for now in range(200):
        if now and now % 60 == 0:
            rank.step(seconds=60.0 if now < 180 else 40.0, tokens=6000, when=UNIX + now)
        run = look(runs, [rank], float(now))[0]
    assert run["step_seconds"] == pytest.approx(40)
    assert run["tokens_per_second"] == pytest.approx(150)
    assert not run["idle"]
    assert [row[0] for row in run["history"]["rows"]] == [1, 2, 3]


def test_what_is_not_known_is_left_out():
    """A run before its first step has no loss of 0, and no host cache that is empty."""
    run = look(Runs(lambda path: None), [CountedRank(None)], 0.0)[0]
    unknown = {"loss", "tokens", "tokens_per_second", "step_seconds", "learning_rate", "gradient_norm", "last_step"}
    assert not (unknown | {"parts", "stalled", "fetches", "host_cache", "nvme", "limits", "drives"}) & set(run)
    assert run["checkpoint"] == {"count": 0}
    assert not {"read", "write", "read_per_step"} & set(run["io"])
    assert set(run["ranks"][0]) == {"rank", "pid", "status", "steps", "errors"}
    assert run["history"]["rows"] == []


def test_a_run_that_stands_still_is_said_to():
    rank, runs = CountedRank(None), Runs(lambda path: None)
    look(runs, [rank], 0.0)
    run = steps(runs, [rank], range(1, 10))
    assert (run["idle"], run["tokens_per_second"]) == (False, pytest.approx(200))
    run = look(runs, [rank], 60.0)[0]
    assert run["idle"]
    assert "tokens_per_second" not in run
    rank.stats.close()
    run = look(runs, [rank], 61.0)[0]
    assert (run["idle"], run["status"]) == (False, "ended")


def test_a_run_that_is_resumed_begins_anew():
    """Its pages have the same names, and count from 0 again."""
    runs = Runs(lambda path: None)
    rank = CountedRank(None)
    look(runs, [rank], 0.0)
    assert len(steps(runs, [rank], range(1, 6), loss=4.0)["history"]["rows"]) == 5
    second = CountedRank(None)
    assert second.stats.header.started > rank.stats.header.started
    run = look(runs, [second], 6.0)[0]
    assert (run["steps"], run["history"]["rows"]) == (0, [])
    run = steps(runs, [second], range(7, 9), loss=3.0)
    assert run["history"]["columns"][:2] == ("step", "loss")
    assert [row[:2] for row in run["history"]["rows"]] == [(1, 3.0), (2, 3.0)]


def test_runs_that_go_on_come_first_and_all_are_bounded():
    ranks = [CountedRank(None, run=f"run-{index}") for index in range(70)]
    for rank in ranks[:68]:
        rank.stats.close()
    runs = Runs(lambda path: None)
    found = look(runs, ranks, 0.0)
    assert {run["id"] for run in found[:2]} == {"run-68", "run-69"}
    assert len(found) == 64
    assert [run["id"] for run in look(runs, ranks[:1], 1.0)] == ["run-0"]


def test_what_a_run_moves_is_told_by_drive():
    ranks = [CountedRank(None, paths=["/a/x", "/b/x"])]
    drives = {"/a/x": "nvme7n1", "/b/x": "nvme8n1"}
    runs = Runs(drives.get)
    look(runs, ranks, 0.0)
    run = steps(runs, ranks, range(1, 4))
    assert run["drives"] == {
        "nvme7n1": {"read": pytest.approx(6 << 20), "write": pytest.approx(4 << 20)},
        "nvme8n1": {"read": 0, "write": 0},
    }
    run = look(runs, ranks, 4.0, limits={"run-1": {"nvme7n1": 1e6}})[0]
    assert run["limits"] == {"nvme7n1": 1e6}


def write_drive(sysfs: Path, drive: Drive, read: int, written: int) -> None:
    folder = sysfs / "class/block" / drive.name
    folder.mkdir(parents=True, exist_ok=True)
    reads, writes = read // 1024, written // 1024  # each takes 2 ms and 3 ms
    fields = [reads, 0, read // 512, 2 * reads, writes, 0, written // 512, 3 * writes, 0, reads, 0]
    (folder / "stat").write_text(" ".join(map(str, fields)))


def test_drives_are_told_against_their_profiles(tmp_path):
    """What everybody does, space of each file system once, wear; what is not known is left out."""
    drive = locate(str(tmp_path)).drive
    profile = Profile(read=1e9, write=5e8, measured=UNIX)
    wear = WearWatch({drive.name: 10**15}, tmp_path)
    drives = Drives(bandwidth=lambda of: profile if of.name == drive.name else None, wear=wear, sysfs=tmp_path)
    (tmp_path / "inside").mkdir()
    drives.paths = (str(tmp_path), str(tmp_path / "inside"), str(tmp_path / "missing"))
    name = locate(str(tmp_path), tmp_path).drive.name  # with the files of no kernel, that of its file system
    drive = Drive(name=name, identity=name)
    write_drive(tmp_path, drive, 0, 0)
    drives.look(100.0)
    (first, missing) = drives.found[1]
    assert first["paths"] == [str(tmp_path), str(tmp_path / "inside")]
    assert not {"read", "write"} & set(first)
    assert missing == {
        "name": f"{tmp_path}/missing",
        "paths": [f"{tmp_path}/missing"],
        "error": "No such file or directory",
    }
    assert 0 < first["free"] <= first["capacity"]
    write_drive(tmp_path, drive, 512_000, 1_024_000)
    drives.look(102.0)
    found = drives.found[1][0]
    assert (found["read"], found["write"]) == (256_000, 512_000)
    assert found["busy"] == pytest.approx(0.25)
    assert (found["read_latency"], found["write_latency"]) == pytest.approx((0.002, 0.003))
    write_drive(tmp_path, drive, 6_656_000, 1_024_000)
    drives.look(162.0)  # after a minute in which nobody looked
    assert drives.found[1][0]["read"] == pytest.approx(102_400)
    write_drive(tmp_path, drive, 0, 0)  # another drive under this name
    drives.look(163.0)
    assert "read" not in drives.found[1][0]


def state_of(reservations: Reservations | None = None) -> NodeState:
    drives = Drives(bandwidth=lambda drive: None, wear=WearWatch({}))
    about = {"host": "node", "version": "0.1.0", "started": UNIX, "collectors": {"ranks": True}}
    return NodeState(
        drives=drives,
        reservations=reservations or Reservations(),
        drive_of=lambda path: None,
        about=lambda: about,
    )


def test_the_state_is_json_whatever_a_page_says(tmp_path):
    """A loss that is no number is a text, and one that is huge is a number."""
    rank = CountedRank(None, run="odd")
    rank.step(loss=math.nan)
    rank.stats.gauge("training_gradient_norm").set(-math.inf)
    rank.stats.gauge("training_learning_rate").set(1e308)
    rank.stats.gauge("step_last_completed_timestamp_seconds").set(math.nan)
    rank.stats.gauge("tier_used_bytes", tier="host", state="param").set(math.inf)
    state, reservations = None, Reservations()
    reservations.reserve(Owner(pid=7, process_started=1), "odd", locate(str(tmp_path)), 1000, free=2000)
    state = state_of(reservations)
    state.observe(Found(snapshots=(rank.stats.snapshot(),), broken=3), {}, 0.0)
    tree = json.loads(state.text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (run,) = tree["runs"]
    assert (run["loss"], run["gradient_norm"], run["learning_rate"]) == ("nan", "-inf", 1e308)
    assert (tree["node"]["host"], tree["node"]["broken_stats_files"]) == ("node", 3)
    (entry,) = tree["reservations"]
    assert (entry["run"], entry["bytes"], entry["path"], entry["pid"]) == ("odd", 1000, str(tmp_path), 7)


@given(st.lists(st.sampled_from([0.0, -0.0, -1.0, 1e-320, 0.1, 1e308, math.nan, math.inf, -math.inf]), min_size=9))
def test_no_numbers_of_a_page_are_too_odd(values):
    """Gauges may hold anything, counters whatever is finite and 0 or more: there is always a state, and it is JSON."""
    rank, state = CountedRank(None), state_of()
    chosen = iter(values * 50)
    for metric in METRICS:
        if metric.server != "rank" or metric.kind not in ("gauge", "counter", "histogram"):
            continue
        for labels in label_sets(metric, ("nvme0",)):
            named, value = dict(zip(metric.label_names, labels, strict=True)), next(chosen)
            if metric.kind == "gauge":
                rank.stats.gauge(metric.name, **named).set(value)
            elif 0 <= value < math.inf:
                cell = rank.stats.counter if metric.kind == "counter" else rank.stats.histogram
                counted = cell(metric.name, **named)
                counted.add(value) if metric.kind == "counter" else counted.observe(value)
        state.observe(Found(snapshots=(rank.stats.snapshot(),), broken=0), {}, next(chosen))
    tree = json.loads(state.text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert len(tree["runs"]) == 1


def test_a_drive_that_does_not_answer_keeps_only_its_own_thread_waiting(monkeypatch, tmp_path):
    """The figures of before stay, with their time; and whoever stops it does not wait either."""
    drives = Drives(bandwidth=lambda drive: None, wear=WearWatch({}))
    drives.paths = (str(tmp_path),)
    drives.look(0.0)
    before = drives.found
    asked, hangs = threading.Event(), threading.Event()
    monkeypatch.setattr("infinity_daemon.configured_drives._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("infinity_daemon.background._JOIN_SECONDS", 0.01)

    def hang(path):
        asked.set()
        hangs.wait(300)
        raise OSError("gone")

    monkeypatch.setattr("infinity.telemetry.drive_views.space", hang)
    drives.start()
    assert asked.wait(300)
    assert drives.found == before
    drives.stop()
    assert not hangs.is_set()
    hangs.set()


def test_however_many_look_a_state_is_written_once(monkeypatch):
    """And who is slow gets the newest, not all that were missed."""
    written = []
    dumps = json.dumps
    monkeypatch.setattr(
        "infinity_daemon.node_state.json.dumps", lambda *given, **how: written.append(1) or dumps(*given, **how)
    )
    state = state_of()
    state.observe(Found(snapshots=(), broken=0), {}, 0.0)
    readers = [state.texts() for _ in range(20)]
    assert len({next(reader) for reader in readers}) == 1
    assert len(written) == 1
    for broken in (1, 2, 3):
        state.observe(Found(snapshots=(), broken=broken), {}, float(broken))
    assert [json.loads(next(reader))["node"]["broken_stats_files"] for reader in readers] == [3] * 20
    assert len(written) == 2


def test_who_asks_on_the_socket_gets_the_state_without_its_curves():
    """Nothing before there is one; then what the page gets but for what is long."""
    state, rank = state_of(), CountedRank(None)
    assert state.now() == {}
    for now in range(3):
        rank.step(loss=math.nan, when=UNIX + now)
        state.observe(Found(snapshots=(rank.stats.snapshot(),), broken=0), {}, float(now))
    told, page = state.now(), json.loads(state.text())
    assert page["runs"][0].pop("history")["rows"]
    assert told == page
    assert told["runs"][0]["loss"] == "nan"


def test_a_stream_without_news_is_not_silent(monkeypatch):
    monkeypatch.setattr("infinity_daemon.node_state._BEAT_SECONDS", 0.01)
    state = state_of()
    assert next(state.texts()) == b""
    assert state.text() == b"{}"
    monkeypatch.setattr("infinity_daemon.node_state._BEAT_SECONDS", 300.0)
    later = threading.Timer(0.05, state.observe, (Found(snapshots=(), broken=0), {}, 0.0))
    later.start()
    assert json.loads(next(state.texts()))["runs"] == []
    later.join()
