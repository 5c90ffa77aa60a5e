"""Tests of the comparison with fio in `infinity probe`."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from infinity.io.probe.points import Load, points_of
from infinity.io.probe.targets import open_target
from infinity_tools.probe.fio import FioError, FioRun, found_in, run_fio
from support.command import run_here

MIB = 1 << 20
SMALL = ["--size", "1MiB", "--block", "64KiB", "--depth", "2", "--seconds", "0.05"]
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def fake_fio(folder: Path, text: str) -> str:
    """Create an executable named fio and return its path."""
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def job(**values: object) -> str:
    """Return fio's JSON output for one job."""
    sides = {"read": {"bw_bytes": 5, "io_bytes": 9}, "write": {"bw_bytes": 7, "io_bytes": 11}}
    return json.dumps({"jobs": [{"error": 0, **sides, **values}]})


def test_fio_output_is_parsed() -> None:
    """Both directions are added, and warnings before the JSON are skipped."""
    assert found_in(job()) == FioRun(bytes_per_second=12.0, written=11)
    assert found_in("fio: this kernel is old\n" + job()) == FioRun(bytes_per_second=12.0, written=11)


def test_invalid_fio_output_raises_fio_error(subtests: pytest.Subtests) -> None:
    for output in [
        "",
        "nonsense",
        "{",
        "{}",
        '{"jobs": []}',
        '{"jobs": 5}',
        job(error=5),
        job(read=None),
        job(read={"bw_bytes": "x"}),
        job(read={"bw_bytes": 0}, write={"bw_bytes": 0, "io_bytes": 0}),
        '{"jobs": [' * 3000,
    ]:
        with subtests.test(output=output), pytest.raises(FioError, match="fio"):
            found_in(output)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return an empty folder."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@needs_fio
def test_fio_measures_unlinked_file(subtests: pytest.Subtests, place: Path) -> None:
    """fio respects its write limit and does not change the size of the file."""
    for load, depth in ((Load.READ, 1), (Load.WRITE, 4), (Load.BOTH, 1)):
        (point,) = points_of([load], [64 << 10], [depth])
        with (
            subtests.test(load=load),
            open_target(str(place), [point], 4 * MIB, "threads", threading.Event()) as target,
        ):
            if not target.file.direct:
                pytest.skip("fio's asynchronous engines need O_DIRECT, which this file system does not support")
            done = run_fio("fio", target, point, 0.2, 4 * MIB)
            assert os.fstat(target.file.fd).st_size == 4 * MIB
            assert os.listdir(place) == []
            assert done.bytes_per_second > 0
            assert (done.written > 0) == (load is not Load.READ)
            assert done.written <= 4 * MIB


@needs_fio
def test_probe_compares_every_load_with_fio(place: Path) -> None:
    """Each load is measured in alternating rounds."""
    done = run_here("probe", place, *SMALL, "--fio", "--json")
    found = done.summary
    assert found["fio_error"] == ""
    assert set(found["fio"]) == {"read", "write", "mixed"}
    for rounds in found["fio"].values():
        assert len(rounds["infinity"]) == len(rounds["fio"]) == 3
        assert rounds["ratio"] == pytest.approx(sorted(rounds["infinity"])[1] / sorted(rounds["fio"])[1])
    assert found["written_bytes"][str(place)] <= found["plan"]["written"][str(place)]
    assert "infinity fio ratio" in " ".join(run_here("probe", place, *SMALL).output.split())
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("program", "says"),
    [("echo no engine >&2; exit 1", "status 1: no engine"), ("echo hello", "fio did not print")],
)
def test_fio_failure_does_not_stop_probe(
    program: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report contains the reason and all other measurements."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "data").mkdir()
    fake_fio(tmp_path / "bin", program)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = run_here("probe", tmp_path / "data", *SMALL)
    assert done.status == 0
    assert "not compared with fio:" in done.output
    assert says in " ".join(done.output.split())
    assert "[storage]" in done.output
    found = run_here("probe", tmp_path / "data", *SMALL, "--json").summary
    assert says in found["fio_error"]
    assert found["fio"] == {}
    assert run_here("probe", tmp_path / "data", *SMALL, "--json", "--no-fio").summary["fio_error"] == ""


def test_missing_fio_fails_only_with_fio_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    done = run_here("probe", tmp_path, *SMALL, "--fio")
    assert done.status == 2
    assert "fio is not installed" in done.errors
    done = run_here("probe", tmp_path, *SMALL, "--json")
    assert done.summary["fio"] == {}
