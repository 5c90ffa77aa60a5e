"""Tests that `infinity probe` stores its results in infinityd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.daemon_client import NodeDaemon
from support.command import run_here
from support.daemon_process import daemon


def test_daemon_stores_best_bandwidth_per_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, place = tmp_path / "session", tmp_path / "place"
    for folder in (session, session / "infinity", place):
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    options = ["--size", "8MiB", "--block", "64KiB,1MiB", "--depth", "1,2", "--seconds", "0.05", "--json"]
    with daemon(session / "infinity"):
        ended = run_here("probe", str(place), *options)
        assert ended.status == 0, ended.errors
        (measured,) = json.loads(ended.output)["paths"].values()
        answer = NodeDaemon(session / "infinity").ask("bandwidth", paths=[str(place)])
        assert answer is not None
        profile = answer["bandwidth"][str(place)]
    for op in ("read", "write"):
        best = max(found[f"{op}_bytes_per_second"] for found in measured if found["load"] == op)
        assert profile[op] == pytest.approx(best, abs=1)


def test_output_reports_whether_results_were_stored(tmp_path: Path) -> None:
    """`--runtime-dir` selects the daemon."""
    runtime, place = tmp_path / "runtime", tmp_path / "place"
    for folder in (runtime, place):
        folder.mkdir(mode=0o700)
    options = ["--size", "8MiB", "--block", "1MiB", "--depth", "2", "--seconds", "0.05", "--no-fio", "--json"]
    with daemon(runtime):
        assert run_here("probe", place, *options, "--runtime-dir", runtime).summary["daemon"]["kept"]
        gone = run_here("probe", place, *options).summary["daemon"]
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
    options = ["--size", "8MiB", "--block", "1MiB", "--depth", "2", "--seconds", "0.05", "--no-fio", "--json"]
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
