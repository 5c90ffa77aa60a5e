"""Tests of the `infinity probe` command: output formats, measurements and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.config import StorageConfig, load_config
from infinity_tools.cli import app
from infinity_tools.probe.shown import duration, milliseconds
from support.command import environment, run_here

MIB = 1 << 20
TINY = ["--size", "1MiB", "--block", "4KiB,64KiB", "--depth", "1", "--depth", "2", "--seconds", "0.02"]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Return two empty folders."""
    folders = [tmp_path / "drives" / name for name in ("a", "b[x]")]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_json_contains_all_measurements(places: list[Path], tmp_path: Path) -> None:
    """Nothing else is printed."""
    done = run_here("probe", *places, *TINY, "--sustained", "--sustained-bytes", "2MiB", "--json")
    assert done.status == 0, done.errors
    assert not done.errors
    found = json.loads(done.output)
    names = [str(place) for place in places]
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
    assert set(found["together_of_alone"]) == {"read", "write", "mixed"}
    assert found["engine"] in ("io_uring", "threads")
    size = found["recommended"]["request_bytes"], found["recommended"]["queue_depth"]
    assert size in {(one["block_bytes"], one["depth"]) for one in found["paths"][names[0]]}
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_together_is_relative_to_sum_of_single_folders(places: list[Path]) -> None:
    """The comparison uses the recommended settings. There is none for a single folder."""
    found = run_here("probe", *places, *TINY, "--json").summary
    size = found["recommended"]["request_bytes"], found["recommended"]["queue_depth"]

    def total(of: dict[str, list[dict[str, Any]]], load: str) -> int:
        measured = [one for rows in of.values() for one in rows if one["load"] == load]
        return sum(one["bytes_per_second"] for one in measured if (one["block_bytes"], one["depth"]) == size)

    for load, share in found["together_of_alone"].items():
        assert share == pytest.approx(total(found["paths"], load) / total(found["alone"], load), rel=1e-3)
    assert run_here("probe", places[0], *TINY, "--json").summary["alone"] == {}


def test_out_writes_json_settings_and_plot(places: list[Path], tmp_path: Path) -> None:
    """The settings in the file are also printed."""
    out = tmp_path / "out" / "here"
    done = run_here("probe", *places, *TINY, "--sustained", "--sustained-bytes", "2MiB", "--out", out)
    assert done.status == 0, done.errors
    found = json.loads((out / "probe.json").read_text())
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "probe.toml").read_text()
    assert text in done.output
    assert text == found["recommended"]["toml"]
    storage = load_config(out / "probe.toml").storage
    assert storage == StorageConfig(
        paths=tuple(map(str, places)),
        request_bytes=found["recommended"]["request_bytes"],
        queue_depth=found["recommended"]["queue_depth"],
        engine=found["recommended"]["engine"],
    )


def test_default_sizes_include_default_settings(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They also include requests of 8 MiB."""
    asked = []
    monkeypatch.setattr("infinity_tools.probe.probe_command.check", lambda ask: asked.append(ask))
    monkeypatch.setattr("infinity_tools.probe.probe_command.probe_all", lambda ask, view: sys.exit(7))
    assert run_here("probe", places[0]).status == 7
    sizes = {(point.block_bytes, point.depth) for point in asked[0].points}
    assert (StorageConfig().request_bytes, StorageConfig().queue_depth) in sizes
    assert (8 * MIB, StorageConfig().queue_depth) in sizes


def test_report_fits_terminal_width(
    subtests: pytest.Subtests, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, settings and paths are not truncated."""
    for width in [60, 80, 120]:
        with subtests.test(width=width):
            monkeypatch.chdir(places[0].parent)
            words = ["probe", "a", "b[x]", *TINY, "--sustained", "--sustained-bytes", "2MiB"]
            done = CliRunner().invoke(app, words, env={"COLUMNS": str(width)}, catch_exceptions=False)
            assert done.exit_code == 0
            lines = [line for line in done.stdout.splitlines() if not line.startswith("paths = ")]
            assert max(map(len, lines)) <= width
            assert "…" not in done.stdout
            words = " ".join(done.stdout.split())
            for text in ("block depth read write mixed p50 p95 p99 max", "b[x], all folders busy at once", "64 KiB",
                         "folder read together write together mixed together",
                         "relative to the sum of the folders alone: read",
                         "sustained writes, b[x]: too short", "the result was not stored", "[storage]"):  # fmt: skip
                assert text in words
            assert f"paths = [{', '.join(json.dumps(str(place)) for place in places)}]" in done.stdout


def test_time_and_bytes_are_announced_first(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are upper bounds."""
    monkeypatch.setenv("COLUMNS", "500")
    done = run_here("probe", *places, *TINY, "--sustained", "--sustained-bytes", "2MiB", "--sustained-seconds", "5")
    said = " ".join(done.errors.split())
    # 12 points together, 3 alone in each folder, and 3 rounds of 2 to confirm the size.
    assert "24 measurements of 0.02 s: 0.48 s" in said
    assert "sustained writes: up to 2 MiB per folder, for up to 5 s" in said
    # The file, 8 measurements that write together, 2 alone, 6 in rounds, 1 MiB each; and 2 MiB of sustained writes.
    assert f"writes up to 19 MiB to {places[0]}" in said
    one = run_here("probe", places[0], *TINY)
    assert "18 measurements of 0.02 s" in " ".join(one.errors.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_probe_removes_its_files(number: int, places: list[Path], tmp_path: Path) -> None:
    """The signal arrives during a measurement, when the file has already been unlinked."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    words = ["probe", *map(str, places), "--size", "4MiB", "--block", "64KiB", "--depth", "1", "--seconds", "600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity_tools", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path / "tmp"),
    )  # fmt: skip
    end = time.monotonic() + 300
    while not _open_without_name(process.pid, places[1]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in errors
    assert output == b""
    assert [os.listdir(place) for place in places] == [[], []]


def _open_without_name(pid: int, folder: Path) -> bool:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except OSError:  # closed in the meantime
            continue
    return any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


def test_durations_are_formatted_compactly() -> None:
    assert [duration(one) for one in (0.05, 9.7, 59.4, 61, 3725)] == [
        "0.05 s",
        "9.7 s",
        "59 s",
        "1 min 1 s",
        "1 h 2 min",
    ]
    assert [milliseconds(one) for one in (0.000123, 0.0123, 0.1234)] == ["0.12", "12.3", "123"]
