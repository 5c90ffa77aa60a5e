"""Tests of the node state as a tree: its view of runs and drives, omitted values, and limits."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import json
import math
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.io.block_devices import Drive, locate
from infinity.telemetry import stats
from infinity.telemetry.history import History
from infinity.telemetry.run_views import Runs
from infinity_daemon import requests
from infinity_daemon.background import Background
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_bandwidth import Profile
from infinity_daemon.drive_wear import WearWatch
from infinity_daemon.node_state import NodeState
from infinity_daemon.reservations import Owner, Reservations
from infinity_daemon.stale import StaleRuns
from infinity_daemon.stats_files import Found
from support.counted_rank import CountedRank

UNIX = 1.7e9
"""The Unix time of monotonic second 0."""


def look(runs: Runs, ranks: list[CountedRank], now: float, limits=()) -> list[dict]:
    """Let the node look at the stats files of the ranks."""
    return runs.look([rank.stats.snapshot() for rank in ranks], dict(limits), now, UNIX + now)


def take_steps(runs: Runs, ranks: list[CountedRank], when: range, **counted) -> dict:
    """Take one step per second on each rank, look after each step, and return the first run."""
    for now in when:
        for rank in ranks:
            rank.step(when=UNIX + now, **counted)
        found = look(runs, ranks, float(now))
    return found[0]


@given(number=st.integers(0, 3000), most=st.sampled_from([4, 8, 50]))
def test_a_history_of_any_length_covers_the_full_time(number, most):
    """The first and last rows are close to the first and last added rows, and times increase between them."""
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


def test_merged_history_rows_are_means_of_finite_values():
    history = History(2)
    for value in (1.0, None, math.nan, 3.0):
        history.add((value,))
    assert history.rows() == [(2.0,)]
    nothing = History(2)
    for value in (math.nan, math.inf):
        nothing.add((value,))
    assert nothing.rows() == [(math.inf,)]  # non-finite values stay visible if there are no finite ones


def test_run_figures_match_its_steps():
    ranks = [CountedRank(None, rank=rank, world_size=4) for rank in (0, 1)]
    runs = Runs(lambda path: None)
    look(runs, ranks, 0.0)
    for rank, loss in zip(ranks, (2.0, 4.0), strict=True):
        rank.stats.gauge("training_loss").set(loss)
    ranks[1].save_checkpoint(when=UNIX + 3)
    ranks[0].save_checkpoint(when=UNIX + 2)
    run = take_steps(runs, ranks, range(1, 21))
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
    # The last checkpoint that all ranks have written.
    assert run["checkpoint"] == {"last": UNIX + 2, "count": 1, "seconds": 2.0}
    rank = run["ranks"][1]
    assert (rank["rank"], rank["steps"], rank["host_cache_used"], rank["errors"]) == (1, 20, 48 << 20, 0)
    assert rank["tokens_per_second"] == pytest.approx(200)


def test_other_hosts_of_a_run_are_named():
    """Hosts of ranks on this node are not other hosts, even if containers have different names."""
    hosts = ["pod-0", "pod-1", "node1", "node2"]
    ranks = [
        CountedRank(
            None, rank=rank, world_size=4, hosts=json.dumps(sorted(hosts, key=lambda host: host != hosts[rank]))
        )
        for rank in (0, 1)
    ]
    (run,) = look(Runs(lambda path: None), ranks, 0.0)
    assert (run["hosts"], run["other_hosts"]) == (["pod-0", "pod-1"], ["node1", "node2"])
    (run,) = look(Runs(lambda path: None), [CountedRank(None, hosts='["pod-0"]')], 0.0)
    assert "other_hosts" not in run
    (run,) = look(Runs(lambda path: None), [CountedRank(None)], 0.0)
    assert not {"hosts", "other_hosts"} & run.keys()


def test_run_figures_cover_the_last_ten_seconds():
    """A rank that is first seen late reports its overall mean."""
    rank, runs = CountedRank(None), Runs(lambda path: None)
    look(runs, [rank], 0.0)
    take_steps(runs, [rank], range(1, 30), seconds=0.5)
    run = take_steps(runs, [rank], range(30, 45), seconds=0.25)
    assert run["step_seconds"] == pytest.approx(0.25)
    assert run["tokens_per_second"] == pytest.approx(400)
    fresh = look(Runs(lambda path: None), [rank], 45.0)[0]
    assert fresh["step_seconds"] == pytest.approx((29 * 0.5 + 15 * 0.25) / 44)


def test_runs_with_slow_steps_have_figures():
    """With one step per minute, the figures are those of the last step."""
    rank, runs = CountedRank(None), Runs(lambda path: None)
    for now in range(200):
        if now and now % 60 == 0:
            rank.step(seconds=60.0 if now < 180 else 40.0, tokens=6000, when=UNIX + now)
        run = look(runs, [rank], float(now))[0]
    assert run["step_seconds"] == pytest.approx(40)
    assert run["tokens_per_second"] == pytest.approx(150)
    assert not run["idle"]
    assert [row[0] for row in run["history"]["rows"]] == [1, 2, 3]


def test_unknown_values_are_omitted():
    """Before its first step, a run reports neither a loss of 0 nor an empty host cache."""
    run = look(Runs(lambda path: None), [CountedRank(None)], 0.0)[0]
    unknown = {"loss", "tokens", "tokens_per_second", "step_seconds", "learning_rate", "gradient_norm", "last_step"}
    assert not (unknown | {"parts", "stalled", "fetches", "host_cache", "nvme", "limits", "drives"}) & set(run)
    assert run["checkpoint"] == {"count": 0}
    assert not {"read", "write", "read_per_step"} & set(run["io"])
    assert set(run["ranks"][0]) == {"rank", "pid", "status", "steps", "errors"}
    assert run["history"]["rows"] == []


def test_a_stalled_run_is_reported_as_idle():
    rank, runs = CountedRank(None), Runs(lambda path: None)
    look(runs, [rank], 0.0)
    run = take_steps(runs, [rank], range(1, 10))
    assert (run["idle"], run["tokens_per_second"]) == (False, pytest.approx(200))
    run = look(runs, [rank], 60.0)[0]
    assert run["idle"]
    assert "tokens_per_second" not in run
    rank.stats.close()
    run = look(runs, [rank], 61.0)[0]
    assert (run["idle"], run["status"]) == (False, "ended")


def test_a_resumed_run_starts_a_new_history():
    """Its stats files have the same names, and its counters restart at 0."""
    runs = Runs(lambda path: None)
    rank = CountedRank(None)
    look(runs, [rank], 0.0)
    assert len(take_steps(runs, [rank], range(1, 6), loss=4.0)["history"]["rows"]) == 5
    second = CountedRank(None)
    assert second.stats.header.started > rank.stats.header.started
    run = look(runs, [second], 6.0)[0]
    assert (run["steps"], run["history"]["rows"]) == (0, [])
    run = take_steps(runs, [second], range(7, 9), loss=3.0)
    assert run["history"]["columns"][:2] == ("step", "loss")
    assert [row[:2] for row in run["history"]["rows"]] == [(1, 3.0), (2, 3.0)]


def test_runs_have_a_name_a_user_and_a_remaining_time():
    """Steps include those before the checkpoint that the run resumed from."""
    runs, rank = Runs(lambda path: None), CountedRank(None, name="tiny in mine", steps_before="100")
    run = look(runs, [rank], 0.0)[0]
    assert (run["name"], run["user"], run["steps"]) == ("tiny in mine", getpass.getuser(), 100)
    assert not {"target_steps", "remaining_seconds"} & set(run)
    rank.stats.gauge("training_target_steps").set(50)
    run = take_steps(runs, [rank], range(1, 11))
    assert (run["steps"], run["target_steps"], run["ranks"][0]["steps"]) == (110, 150, 110)
    assert run["remaining_seconds"] == pytest.approx(40 * 0.5)
    rank.stats.close()
    assert "remaining_seconds" not in look(runs, [rank], 11.0)[0]
    assert look(runs, [CountedRank(None)], 12.0)[0]["name"] == "run-1"


def test_live_runs_are_first_and_the_number_is_limited():
    ranks = [CountedRank(None, run=f"run-{index}") for index in range(70)]
    for rank in ranks[:68]:
        rank.stats.close()
    runs = Runs(lambda path: None)
    found = look(runs, ranks, 0.0)
    assert {run["id"] for run in found[:2]} == {"run-68", "run-69"}
    assert (len(found), runs.omitted) == (64, len(ranks) - 64)
    assert [run["id"] for run in look(runs, ranks[:1], 1.0)] == ["run-0"]
    assert runs.omitted == 0


def test_newer_runs_are_first_even_if_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats.time, "time", itertools.count(1e6, -1).__next__)
    ranks = [CountedRank(None, run=f"20260131-00000{index}-000000") for index in range(3)]
    found = look(Runs(lambda path: None), ranks, 0.0)
    assert [run["id"][14] for run in found] == ["2", "1", "0"]


def test_the_traffic_of_a_run_is_reported_per_drive():
    ranks = [CountedRank(None, paths=["/a/x", "/b/x"])]
    drives = {"/a/x": "nvme7n1", "/b/x": "nvme8n1"}
    runs = Runs(drives.get)
    look(runs, ranks, 0.0)
    run = take_steps(runs, ranks, range(1, 4))
    assert run["drives"] == {
        "nvme7n1": {"read": pytest.approx(6 << 20), "write": pytest.approx(4 << 20)},
        "nvme8n1": {"read": 0, "write": 0},
    }
    run = look(runs, ranks, 4.0, limits={"run-1": {"nvme7n1": 1e6}})[0]
    assert run["limits"] == {"nvme7n1": 1e6}


def write_drive(sysfs: Path, drive: Drive, read: int, written: int) -> None:
    folder = sysfs / "class/block" / drive.name
    folder.mkdir(parents=True, exist_ok=True)
    reads, writes = read // 1024, written // 1024  # a read takes 2 ms, a write takes 3 ms
    fields = [reads, 0, read // 512, 2 * reads, writes, 0, written // 512, 3 * writes, 0, reads, 0]
    (folder / "stat").write_text(" ".join(map(str, fields)))


def test_drive_views_report_traffic_space_and_latency(tmp_path, monkeypatch):
    """The space of each file system is counted once, and unknown values are omitted."""
    drive = locate(str(tmp_path)).drive
    profile = Profile(read=1e9, write=5e8, measured=UNIX)
    wear = WearWatch({drive.name: 10**15}, tmp_path)
    drives = Drives(bandwidth=lambda of: profile if of.name == drive.name else None, wear=wear, sysfs=tmp_path)
    (tmp_path / "inside").mkdir()
    drives.paths = (str(tmp_path), str(tmp_path / "inside"), str(tmp_path / "missing"))
    name = locate(str(tmp_path), tmp_path).drive.name  # without sysfs files, the drive is named after its file system
    drive = Drive(name=name, identity=name)
    write_drive(tmp_path, drive, 0, 0)
    now = 100.0
    monkeypatch.setattr("infinity_daemon.configured_drives.time.monotonic", lambda: now)
    drives.look()
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
    now = 102.0
    drives.look()
    found = drives.found[1][0]
    assert (found["read"], found["write"]) == (256_000, 512_000)
    assert found["busy"] == pytest.approx(0.25)
    assert (found["read_latency"], found["write_latency"]) == pytest.approx((0.002, 0.003))
    write_drive(tmp_path, drive, 6_656_000, 1_024_000)
    now = 162.0  # after a minute without an observation
    drives.look()
    assert drives.found[1][0]["read"] == pytest.approx(102_400)
    write_drive(tmp_path, drive, 0, 0)  # counters of a different drive with the same name
    now = 163.0
    drives.look()
    assert "read" not in drives.found[1][0]


def make_state(reservations: Reservations | None = None) -> NodeState:
    drives = Drives(bandwidth=lambda drive: None, wear=WearWatch({}))
    about = {"host": "node", "version": "0.1.0", "started": UNIX, "collectors": {"ranks": True}}
    return NodeState(
        drives=drives,
        reservations=reservations or Reservations(),
        stale=StaleRuns(),
        drive_of=lambda path: None,
        about=lambda: about,
    )


def test_the_state_is_json_for_non_finite_values(tmp_path):
    """A non-finite loss becomes a string, and a huge value stays a number."""
    rank = CountedRank(None, run="odd")
    rank.step(loss=math.nan)
    rank.stats.gauge("training_gradient_norm").set(-math.inf)
    rank.stats.gauge("training_learning_rate").set(1e308)
    rank.stats.gauge("step_last_completed_timestamp_seconds").set(math.nan)
    rank.stats.gauge("tier_used_bytes", tier="host", state="param").set(math.inf)
    state, reservations = None, Reservations()
    reservations.reserve(Owner(uid=0, pid=7, process_started=1), "odd", locate(str(tmp_path)), 1000, free=2000)
    state = make_state(reservations)
    state.observe(Found(snapshots=(rank.stats.snapshot(),), broken=3), {}, 0.0)
    tree = json.loads(state.text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (run,) = tree["runs"]
    assert (run["loss"], run["gradient_norm"], run["learning_rate"]) == ("nan", "-inf", 1e308)
    assert (tree["node"]["host"], tree["node"]["broken_stats_files"]) == ("node", 3)
    (entry,) = tree["reservations"]
    assert (entry["run_id"], entry["bytes"], entry["path"], entry["pid"]) == ("odd", 1000, str(tmp_path), 7)


def test_runs_refer_to_the_dashboards_of_their_other_nodes(monkeypatch):
    """Only on a node that ranks run on under its own name, and only to hosts in its domain."""
    others = ["node1.here", "node2.there", "node3", "1.2.3.4", "8", "0x8", "node4.here"]

    def pages(host: str, port: int = 9470) -> dict[str, str]:
        monkeypatch.setattr("infinity_daemon.node_state.socket.gethostname", lambda: host)
        state, rank = make_state(), CountedRank(None, hosts=json.dumps(["node0.here", *others]))
        short = CountedRank(None, rank=1, world_size=2, hosts=json.dumps(["node0", *others]))
        state.linked_port = port
        state.observe(Found(snapshots=(rank.stats.snapshot(), short.stats.snapshot()), broken=0), {}, 0.0)
        return state.now()["runs"][0].get("pages", {})

    assert pages("node0.here") == {
        "node1.here": "http://node1.here:9470/#run-1", "node4.here": "http://node4.here:9470/#run-1",
    }  # fmt: skip
    assert pages("node0") == {"node3": "http://node3:9470/#run-1"}
    assert pages("node0", 0) == pages("infinityd-xyz") == {}


def test_a_hanging_drive_blocks_only_its_own_thread(monkeypatch, tmp_path):
    """The previous figures and their time are kept, and stopping does not wait for the drive."""
    drives = Drives(bandwidth=lambda drive: None, wear=WearWatch({}))
    drives.paths = (str(tmp_path),)
    drives.look()
    before = drives.found
    queried, resumed = threading.Event(), threading.Event()
    monkeypatch.setattr("infinity_daemon.background._JOIN_SECONDS", 0.01)

    def hang(path):
        queried.set()
        resumed.wait(300)
        raise OSError("gone")

    monkeypatch.setattr("infinity.telemetry.drive_views.space", hang)
    thread = Background("drives", drives.look, 0.01)
    thread.start()
    assert queried.wait(300)
    assert drives.found == before
    thread.close()
    assert not resumed.is_set()
    resumed.set()


def test_each_state_is_serialized_once_for_all_readers(monkeypatch):
    """A slow reader gets only the newest state."""
    written = []
    dumps = json.dumps
    monkeypatch.setattr(
        "infinity_daemon.node_state.json.dumps", lambda *args, **kwargs: written.append(1) or dumps(*args, **kwargs)
    )
    state = make_state()
    state.observe(Found(snapshots=(), broken=0), {}, 0.0)
    readers = [state.texts() for _ in range(20)]
    assert len({next(reader) for reader in readers}) == 1
    assert len(written) == 1
    for broken in (1, 2, 3):
        state.observe(Found(snapshots=(), broken=broken), {}, float(broken))
    assert [json.loads(next(reader))["node"]["broken_stats_files"] for reader in readers] == [3] * 20
    assert len(written) == 2


def test_a_request_before_the_first_state_is_answered_with_an_error(monkeypatch):
    monkeypatch.setattr(requests, "_STATE_SECONDS", 0.0)
    sources = ("stats_files", "profile", "reservations", "is_alive", "used", "wear", "rates_of")
    state = make_state()
    handler = requests.Requests(**dict.fromkeys(sources), state=state.now, more={})
    assert asyncio.run(handler.answer(b'{"op": "state"}', None)).keys() == {"error"}
    state.observe(Found(snapshots=(), broken=0), {}, 0.0)
    assert asyncio.run(handler.answer(b'{"op": "state"}', None))["ok"]


def test_the_socket_returns_the_state_without_histories():
    """The result is empty before the first observation, and otherwise equals the web page's state."""
    state, rank = make_state(), CountedRank(None)
    assert state.now() == {}
    for now in range(3):
        rank.step(loss=math.nan, when=UNIX + now)
        state.observe(Found(snapshots=(rank.stats.snapshot(),), broken=0), {}, float(now))
    answer, full_state = state.now(), json.loads(state.text())
    assert full_state["runs"][0].pop("history")["rows"]
    assert answer == full_state
    assert answer["runs"][0]["loss"] == "nan"


def test_an_unchanged_stream_sends_keepalives(monkeypatch):
    monkeypatch.setattr("infinity_daemon.node_state._BEAT_SECONDS", 0.01)
    state = make_state()
    assert next(state.texts()) == b""
    assert state.text() == b"{}"
    monkeypatch.setattr("infinity_daemon.node_state._BEAT_SECONDS", 300.0)
    later = threading.Timer(0.05, state.observe, (Found(snapshots=(), broken=0), {}, 0.0))
    later.start()
    assert json.loads(next(state.texts()))["runs"] == []
    later.join()
