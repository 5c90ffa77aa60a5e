"""Tests of the figures that `infinity top` reads from the daemon or from stats files."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.io.block_devices import locate
from infinity.telemetry import METRICS
from infinity.telemetry.stats import KEEP_CLOSED_SECONDS
from infinity.telemetry.stats_cells import label_sets
from infinity.telemetry.trees import Tree
from infinity_tools.top.reading import Reader, Snapshot
from infinity_tools.top.view import view
from infinity_tools.top.view_state import State
from support.command import run_here
from support.counted_rank import CountedRank, make_stats
from support.daemon_process import daemon, until

FAST = ("--interval", "0.1")
LATER = time.time() + 86_400
"""End time of steps, in the future, so that a slow test machine never marks the run as idle."""
ESCAPE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def trained_ranks(folder: Path, tmp_path: Path, run: str = "run-1", world_size: int = 2) -> list[CountedRank]:
    """Return two ranks that have completed ten steps and a checkpoint."""
    ranks = [CountedRank(folder, run, rank, world_size, paths=[tmp_path]) for rank in range(2)]
    for rank in ranks:
        for _ in range(10):
            rank.step(loss=2.5, when=LATER)
        rank.save_checkpoint()
    return ranks


def test_reader_derives_figures_from_stats_files(runtime: Path, tmp_path: Path) -> None:
    """Rates cover the steps between two reads. `test_node_state.py` checks all figures."""
    ranks, reader = trained_ranks(runtime, tmp_path, world_size=4), Reader(runtime)
    before = reader.read()
    assert before.infinityd is None
    assert any("infinityd" in note for note in before.notes)
    for _ in range(2):
        for rank in ranks:
            rank.step(seconds=0.25, loss=2.0, when=LATER)
        snapshot = reader.read()
    (run,) = snapshot.runs
    assert [run[name] for name in ("id", "status", "world_size", "steps", "loss")] == ["run-1", "live", 4, 12, 2.0]
    assert (before.runs[0]["step_seconds"], run["step_seconds"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert [(rank["rank"], rank["steps"], rank["status"]) for rank in run["ranks"]] == [
        (0, 12, "live"),
        (1, 12, "live"),
    ]
    (drive,) = snapshot.drives
    assert drive["name"] == locate(str(tmp_path)).drive.name
    assert 0 < drive["free"] <= drive["capacity"]
    assert not {"profile", "wear"} & drive.keys()


def test_daemon_and_stats_files_give_same_figures(runtime: Path, tmp_path: Path) -> None:
    """Only the daemon knows the bandwidth; after it exits, the stats files are read again."""
    trained_ranks(runtime, tmp_path)
    reader = Reader(runtime)
    alone = reader.read()
    with daemon(runtime, "--device-path", str(tmp_path)):
        rates = {str(tmp_path): {"read": 3e9, "write": 1e9, "mixed": 2e9}}
        assert NodeDaemon(runtime).ask("record_bandwidth", rates=rates, source="probe")
        until(lambda: any("profile" in drive for drive in reader.read().drives))
        reported = reader.read()
    after = reader.read()
    assert after.infinityd is None

    def steady(snapshot: Snapshot) -> list[Tree]:
        varying = {"io", "read", "write", "drives", "ranks", "history"}
        return [
            {name: value for name, value in one.items() if name not in varying}
            for run in snapshot.runs
            for one in (run, *run["ranks"])
        ]

    assert steady(reported) == steady(alone) == steady(after)
    assert len(steady(reported)) == 3
    assert reported.drives[0]["profile"]["mixed"] == 2e9
    assert reported.drives[0]["name"] == alone.drives[0]["name"]
    assert reported.notes == ()


def test_daemon_reports_invalid_stats_files(runtime: Path) -> None:
    (runtime / "odd.rank0.stats").write_bytes(b"garbage")
    with daemon(runtime):
        until(lambda: Reader(runtime).read().infinityd)
        snapshot = Reader(runtime).read()
    (note,) = snapshot.notes
    assert re.match("ignored a stats file .*; see the log of infinityd", note)


def test_invalid_stats_files_are_ignored_and_reported(runtime: Path, tmp_path: Path) -> None:
    """Garbage, another format version and an empty file do not hide valid files."""
    trained_ranks(runtime, tmp_path)
    good = (runtime / "run-1.rank0.stats").read_bytes()
    (runtime / "a.rank0.stats").write_bytes(b"\x1b[31mgarbage" * 100)
    (runtime / "b.rank0.stats").write_bytes(good[:8] + b"\x07" + good[9:])
    (runtime / "c\n.rank0.stats").write_bytes(b"")
    snapshot = Reader(runtime).read()
    assert [run["id"] for run in snapshot.runs] == ["run-1"]
    (note,) = [note for note in snapshot.notes if "a.rank0.stats" in note]
    assert note.endswith("(and 2 more)")
    (runtime / "a.rank0.stats").unlink()
    assert "b.rank0.stats: format version 7" in " ".join(Reader(runtime).read().notes)
    (runtime / "b.rank0.stats").unlink()
    assert all(note.isprintable() for note in Reader(runtime).read().notes)


def test_run_status_follows_its_processes(runtime: Path, tmp_path: Path) -> None:
    """A finished run is still shown; a run whose process no longer exists is dead."""
    reader = Reader(runtime)
    assert reader.read().runs == ()
    first, second = trained_ranks(runtime, tmp_path)
    assert [run["status"] for run in reader.read().runs] == ["live"]
    first.stats.close()
    second.stats.close()
    assert [run["status"] for run in reader.read().runs] == ["ended"]
    killed = make_stats(runtime, "run-2")
    header = killed.path.read_bytes()
    started = str(killed.header.process_started).encode()
    killed.path.write_bytes(header.replace(started, b"1" * len(started)))
    assert {run["id"]: run["status"] for run in reader.read().runs} == {"run-1": "ended", "run-2": "dead"}
    killed.close()


def test_old_finished_run_is_not_shown(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon, its stats file may remain for weeks."""
    for rank in trained_ranks(runtime, tmp_path):
        rank.stats.close()
    assert len(Reader(runtime).read().runs) == 1
    later = time.time() + KEEP_CLOSED_SECONDS
    monkeypatch.setattr("infinity_tools.top.reading.time.time", lambda: later)
    assert Reader(runtime).read().runs == ()


def test_unknown_daemon_answer_is_handled(
    subtests: pytest.Subtests, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid values are treated as unknown, and no text changes the terminal."""
    for answer in [
        {"runs": [None, 5, {"id": 5, "parts": {"compute": "x"}, "ranks": [{}], "io": 3, "host_cache": {"roles": []}}]},
        {"runs": [], "drives": {"a": 1}, "time": "now", "node": []},
        {"runs": [{"id": "\x1b[2J", "loss": "nan"}], "drives": [{"name": "/\n"}], "node": {"version": "\x07"}},
    ]:
        with subtests.test(answer=answer):
            monkeypatch.setattr(NodeDaemon, "ask", lambda self, op: answer)
            done = run_here("top", *FAST, "--runtime-dir", runtime, "--once")
            assert done.status == 0, done.errors
            assert not ESCAPE.search(done.output)
            assert run_here("top", *FAST, "--runtime-dir", runtime, "--json").status == 0


def test_json_contains_runs_and_drives(runtime: Path, tmp_path: Path) -> None:
    ranks = trained_ranks(runtime, tmp_path)
    ranks[0].stats.gauge("training_loss").set(float("nan"))
    done = run_here("top", *FAST, "--json", "--runtime-dir", runtime)
    assert (done.status, done.errors) == (0, "")
    tree = json.loads(done.output, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))
    assert set(tree) == {field.name for field in fields(Snapshot)}
    assert [rank["steps"] for rank in tree["runs"][0]["ranks"]] == [10, 10]
    assert tree["runs"][0]["loss"] == "nan"
    assert tree["drives"][0]["capacity"] > 0


def test_output_to_pipe_prints_once_without_escape_codes(runtime: Path, tmp_path: Path) -> None:
    trained_ranks(runtime, tmp_path)
    for words in (("--once",), ()):
        done = run_here("top", *FAST, *words, "--runtime-dir", runtime)
        assert (done.status, done.errors) == (0, "")
        assert not ESCAPE.search(done.output)
        assert "  run-1    live       10  0.500" in done.output
        assert "compute 80%  r read stall 20%" in done.output
        assert "q quit" not in done.output


def test_run_option_selects_by_id_prefix(runtime: Path, tmp_path: Path) -> None:
    """An unknown id is reported together with the available ids."""
    trained_ranks(runtime, tmp_path)
    trained_ranks(runtime, tmp_path, run="other")
    command = ("top", *FAST, "--once", "--runtime-dir", runtime)
    assert "run-1" in run_here(*command).output
    only = run_here(*command, "--run", "oth")
    assert "other" in only.output
    assert "run-1" not in only.output
    assert [run["id"] for run in json.loads(run_here(*command, "--json", "--run", "run").output)["runs"]] == ["run-1"]
    missing = run_here(*command, "--run", "nothing")
    assert missing.status == 2
    assert missing.errors.startswith("error: --run 'nothing' ")
    assert missing.errors.endswith("runs: run-1, other\n")
    assert not missing.output


def test_extreme_gauge_values_are_shown(subtests: pytest.Subtests, runtime: Path, tmp_path: Path) -> None:
    for value in [math.nan, -math.inf, 1e308, -1.0]:
        with subtests.test(value=value):
            (rank, _) = trained_ranks(runtime, tmp_path)
            for metric in METRICS:
                if metric.server == "rank" and metric.kind == "gauge":
                    for labels in label_sets(metric, ("nvme0",)):
                        rank.stats.gauge(metric.name, **dict(zip(metric.label_names, labels, strict=True))).set(value)
            state = State(snapshot=Reader(runtime).read(), expanded=frozenset(["run-1"]))
            assert state.snapshot.runs[0]["steps"] == 10
            for width in (60, 300):
                assert "run-1" in view(state, width, 40).plain
            reported = run_here("top", *FAST, "--json", "--runtime-dir", runtime)
            json.loads(reported.output, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))
