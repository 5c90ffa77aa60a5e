"""Tests of the `infinity probe` command: output formats, measurements, results stored in infinityd, and cleanup."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.config import StorageConfig, load_config
from infinity.daemon_client import NodeDaemon
from infinity_tools.probe import probe_command
from infinity_tools.probe.probe_report import Ask, Report
from infinity_tools.probe.shown import Bar, show
from infinity_tools.probe.work import probe_all
from support.command import Finished, environment, run_here
from support.daemon_process import daemon

MIB = 1 << 20
TINY = ["--size", "1MiB", "--block", "4KiB,64KiB", "--depth", "1", "--depth", "2", "--seconds", "0.02"]
TINY += ["--sustained", "--sustained-bytes", "2MiB", "--sustained-seconds", "5"]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Finished]:
    """Return the report and the output of a probe of two folders, which leaves no files."""
    places = [tmp_path_factory.mktemp("drives") / name for name in ("a", "b[x]")]
    for place in places:
        place.mkdir()
    reports = []

    def observed(ask: Ask, view: Bar) -> Report:
        reports.append(probe_all(ask, view))
        return reports[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_command, "probe_all", observed)
        patch.setenv("COLUMNS", "500")
        done = run_here("probe", *places, *TINY, "--runtime-dir", places[0].parent)
    assert done.status == 0, done.errors
    assert [list(place.iterdir()) for place in places] == [[], []]
    return reports[0], done


def again(probed: tuple[Report, Finished], monkeypatch: pytest.MonkeyPatch, *options: object) -> Finished:
    """Run the command with other options of its output, and with the measurements of `probed`."""
    report, _ = probed
    monkeypatch.setattr(probe_command, "probe_all", lambda ask, view: report)
    done = run_here("probe", *report.ask.paths, *TINY, *options)
    assert done.status == 0, done.errors
    return done


def test_json_contains_all_measurements(probed: tuple[Report, Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is printed."""
    done = again(probed, monkeypatch, "--json")
    assert not done.errors
    found, names = done.summary, list(probed[0].ask.paths)
    assert list(found["paths"]) == list(found["alone"]) == list(found["sustained"]) == names
    for name in names:
        assert len(found["paths"][name]) == 3 * 2 * 2
        assert [one["load"] for one in found["alone"][name]] == ["read", "write", "mixed"]
        assert found["sustained"][name]["written_bytes"] == 2 * MIB
        assert 0 < found["written_bytes"][name] <= found["plan"]["written"][name]
        assert found["written_bytes"][name] >= 3 * MIB  # the file and the sustained writes
    for one in found["paths"][names[0]] + found["alone"][names[0]]:
        took = one["latency_seconds"]
        assert 0 < took["p50"] <= took["p95"] <= took["p99"] <= took["longest"]
        assert (one["read_bytes_per_second"] > 0) == (one["load"] != "write")
    assert found["engine"] in ("io_uring", "threads")
    size = found["recommended"]["request_bytes"], found["recommended"]["queue_depth"]
    assert size in {(one["block_bytes"], one["depth"]) for one in found["paths"][names[0]]}

    def total(of: dict[str, list[dict[str, Any]]], load: str) -> int:
        measured = [one for rows in of.values() for one in rows if one["load"] == load]
        return sum(one["bytes_per_second"] for one in measured if (one["block_bytes"], one["depth"]) == size)

    assert set(found["together_of_alone"]) == {"read", "write", "mixed"}
    for load, share in found["together_of_alone"].items():
        assert share == pytest.approx(total(found["paths"], load) / total(found["alone"], load), rel=1e-3)


def test_out_writes_json_settings_and_plot(
    probed: tuple[Report, Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings in the file are also printed."""
    out = tmp_path / "out" / "here"
    done = again(probed, monkeypatch, "--out", out)
    found = json.loads((out / "probe.json").read_text())
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "probe.toml").read_text()
    assert text in done.output
    assert text == found["recommended"]["toml"]
    assert load_config(out / "probe.toml").storage == StorageConfig(
        paths=probed[0].ask.paths,
        request_bytes=found["recommended"]["request_bytes"],
        queue_depth=found["recommended"]["queue_depth"],
        engine=found["recommended"]["engine"],
    )


def test_default_sizes_include_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also include requests of 8 MiB."""
    asked = []
    monkeypatch.setattr(probe_command, "check", lambda ask: asked.append(ask))
    monkeypatch.setattr(probe_command, "probe_all", lambda ask, view: sys.exit(7))
    assert run_here("probe", ".").status == 7
    sizes = {(point.block_bytes, point.depth) for point in asked[0].points}
    assert (StorageConfig().request_bytes, StorageConfig().queue_depth) in sizes
    assert (8 * MIB, StorageConfig().queue_depth) in sizes


def test_report_fits_terminal_width(
    subtests: pytest.Subtests, probed: tuple[Report, Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, settings and paths are not truncated."""
    places = [Path(path) for path in probed[0].ask.paths]
    report = replace(probed[0], ask=replace(probed[0].ask, paths=("a", "b[x]")))
    for name in ("together", "alone", "sustained"):
        found = {Path(path).name: one for path, one in getattr(report, name).items()}
        report = replace(report, **{name: found})
    for width in [60, 80, 120]:
        with subtests.test(width=width):
            console = Console(file=io.StringIO(), width=width)
            show(console, report, None)
            text = console.file.getvalue()
            lines = [line for line in text.splitlines() if not line.startswith(("paths = ", "written: ", "/"))]
            assert max(map(len, lines)) <= width
            assert "…" not in text
            words = " ".join(text.split())
            for part in ("block depth read write mixed p50 p95 p99 max", "b[x], all folders busy at once", "64 KiB",
                         "folder read together write together mixed together",
                         "relative to the sum of the folders alone: read",
                         "sustained writes, b[x]: too short", "the result was not stored", "[storage]"):  # fmt: skip
                assert part in words
            assert f"paths = [{', '.join(json.dumps(str(place)) for place in places)}]" in text


def test_time_and_bytes_are_announced_first(probed: tuple[Report, Finished]) -> None:
    """Both are upper bounds."""
    report, done = probed
    said = " ".join(done.errors.split())
    # 12 points together, 3 alone in each folder, and 3 rounds of 2 to confirm the size.
    assert "24 measurements of 0.02 s: 0.48 s" in said
    assert "sustained writes: up to 2 MiB per folder, for up to 5 s" in said
    # The file, 8 measurements that write together, 2 alone, 6 in rounds, 1 MiB each; and 2 MiB of sustained writes.
    assert f"writes up to 19 MiB to {report.ask.paths[0]}" in said
    assert replace(report.ask, paths=report.ask.paths[:1]).plan.measurements == 18  # nothing to measure alone


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)])
def test_stopped_probe_removes_its_files(number: int, tmp_path: Path) -> None:
    """The signal arrives during a measurement, when the file has already been unlinked."""
    place = tmp_path / "a"
    place.mkdir()
    words = ["probe", str(place), "--size", "4MiB", "--block", "64KiB", "--depth", "1", "--seconds", "600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity_tools", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path / "tmp"),
    )  # fmt: skip
    end = time.monotonic() + 300
    while not _open_without_name(process.pid, place):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in errors
    assert output == b""
    assert os.listdir(place) == []


def _open_without_name(pid: int, folder: Path) -> bool:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except OSError:  # closed in the meantime
            continue
    return any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


def test_daemon_stores_best_bandwidth_per_direction(runtime: Path, tmp_path: Path) -> None:
    """`--runtime-dir` selects the daemon. Without a daemon, the output states that nothing was stored."""
    place = tmp_path / "place"
    place.mkdir()
    options = ["--size", "8MiB", "--block", "64KiB,1MiB", "--depth", "1,2", "--seconds", "0.05", "--json"]
    with daemon(runtime):
        found = run_here("probe", place, *options, "--runtime-dir", runtime).summary
        answer = NodeDaemon(runtime).ask("bandwidth", paths=[str(place)])
        gone = run_here("probe", place, *options).summary["daemon"]
    assert found["daemon"]["kept"]
    assert answer is not None
    for op in ("read", "write"):
        best = max(one[f"{op}_bytes_per_second"] for one in found["paths"][str(place)] if one["load"] == op)
        assert answer["bandwidth"][str(place)][op] == pytest.approx(best, abs=1)
    assert not gone["kept"]
    assert "no infinityd" in gone["says"]


def test_all_folders_then_each_folder_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single folder is recorded once."""
    asked = []

    def ask(_: NodeDaemon, op: str, **values: object) -> object:
        asked.append((op, values))
        return {"ok": True}

    monkeypatch.setattr(NodeDaemon, "ask", ask)
    places = [tmp_path / "place", tmp_path / "other"]
    for folder in places:
        folder.mkdir()
    options = ["--size", "8MiB", "--block", "1MiB", "--depth", "2", "--seconds", "0.05", "--json"]
    found = run_here("probe", *places, *options).summary
    names = [str(place) for place in places]
    assert asked.pop(0) == ("bandwidth", {"paths": names})  # stops a measurement by the daemon itself
    assert [list(values["rates"]) for _, values in asked] == [names, names[:1], names[1:]]
    assert {(op, values["source"]) for op, values in asked} == {("record_bandwidth", "probe")}
    for values, kind in zip(asked, ("paths", "alone", "alone"), strict=True):
        for name, rates in values[1]["rates"].items():
            measured = {one["load"]: one["bytes_per_second"] for one in found[kind][name]}
            assert rates == pytest.approx(measured, abs=1)
    asked.clear()
    run_here("probe", places[0], *options)
    assert [list(values["rates"]) for _, values in asked[1:]] == [names[:1]]


def test_interconnect_requires_torchrun() -> None:
    """On the node test bed, tests/nodes/test_interconnect.py measures it."""
    done = run_here("probe", "--interconnect")
    assert done.status == 2
    assert "--interconnect requires several ranks; start it on each node" in done.errors
