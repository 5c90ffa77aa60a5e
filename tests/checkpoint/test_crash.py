"""Test of runs and commands that are killed or lose power at random times: a short version of `make crash-test`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import crash, lives
from support.nodes import Nodes
from support.processes import run_program


def test_killed_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    """Every resumed state equals the state of an uninterrupted run, and no checkpoint is lost."""
    numbers = ("--trials", 2, "--power", 3, "--seed", 364, "--ranks", 2)
    done = run_program(Path(crash.__file__), *numbers, "--dir", tmp_path, folder=tmp_path, environment={})
    assert done.stdout.splitlines()[-1:] == ["5 trials, 0 failures"], done.stdout + done.stderr[-4000:]
    assert done.returncode == 0
    (counts,) = re.findall(r"2 ranks: (\d+) resumes, (\d+) kills, of which (\d+) with a loss of power", done.stdout)
    # The number of runs that reach a checkpoint depends on the load of the machine.
    assert all(seen >= least for seen, least in zip(map(int, counts), (2, 3, 2), strict=True)), done.stdout


class HangingProcess:
    """Process that ends only when it is killed."""

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def signal(self, number: int) -> None:
        self.status = -number


def test_a_hang_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "_PATIENCE", 0)
    monkeypatch.setattr(lives.Life, "_start", lambda *_: HangingProcess())
    harness = crash.Harness(tmp_path, 0, 2)
    words, status = harness.life.run({1: crash.End(call=7)}, 0)
    assert status == lives.HUNG
    assert list(harness._problems(words, status)) == ["the ranks did not end"]
    killed = harness.life.run({1: crash.End(seconds=0)}, 0)
    assert list(harness._problems(*killed)) == []


@pytest.mark.wide
def test_runs_killed_many_times_resume_bit_for_bit(tmp_path: Path) -> None:
    numbers = ("--trials", 40, "--power", 20, "--seed", 7)
    done = run_program(Path(crash.__file__), *numbers, "--dir", tmp_path, folder=tmp_path, environment={})
    assert done.stdout.splitlines()[-1:] == ["60 trials, 0 failures"], done.stdout + done.stderr[-4000:]
    for ranks in ("1 rank", "2 ranks"):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{ranks}: "))
        resumes, kills, power_losses, *_, commands = map(int, re.findall(r"\d+", line.partition(":")[2]))
        counts = (resumes, kills, power_losses, commands)
        assert all(seen >= least for seen, least in zip(counts, (3, 15, 4, 3), strict=True)), done.stdout


@pytest.mark.parametrize(
    ("trials", "power", "ranks", "seed", "resumes"),
    [pytest.param(1, 2, 2, 5, 0, id="few"), pytest.param(20, 10, 4, 3, 1, id="many", marks=pytest.mark.wide)],
)
def test_killed_runs_on_nodes_resume_bit_for_bit(
    trials: int, power: int, ranks: int, seed: int, resumes: int, tmp_path: Path
) -> None:
    """Each of two nodes has its own drive, and their ranks may change places.

    On a slow machine, few lives may all be killed before their first checkpoint.
    """
    (folder := tmp_path / "lives").mkdir()
    with Nodes(tmp_path, 2) as nodes:
        report = crash.run(trials, power, seed, ranks, folder, nodes)
    assert not report.failures
    assert report.trials == trials + power
    assert report.ends >= power
    assert report.resumes >= resumes
