"""Tests that `infinity probe` stores its results in infinityd."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.daemon_client import NodeDaemon
from support.command import run_here
from support.daemon_process import daemon


def test_daemon_stores_best_bandwidth_per_direction(tmp_path: Path) -> None:
    """`--runtime-dir` selects the daemon. Without a daemon, the output states that nothing was stored."""
    runtime, place = tmp_path / "runtime", tmp_path / "place"
    for folder in (runtime, place):
        folder.mkdir(mode=0o700)
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
