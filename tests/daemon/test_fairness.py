"""How a drive is shared: the rule, on a drive that is simulated; and the question that ranks ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.telemetry import Stats
from infinity_daemon.fairness import Fairness, Usage
from support.daemon_process import daemon, until

CAPACITY = 1000.0
"""Bytes per second of the drive."""


@dataclass
class Job:
    """One run of one rank: what it would move if it were alone, and how much of the drive it takes by itself."""

    name: str
    wanted: float = 2 * CAPACITY
    greed: float = 1.0
    weight: float = 1.0
    moved: float = 0.0
    stalled: float = 0.0
    second: float = 0.0
    """Bytes of the last second."""


def go_on(jobs: list[Job], fairness: Fairness, seconds: int, now: float = 0.0) -> float:
    """Let jobs share the drive by their greed, as far as their rates allow, and the daemon look at it every second."""
    for _ in range(seconds):
        most = {job.name: min(job.wanted, fairness.rates_of(job.name).get("d", CAPACITY)) for job in jobs}
        got = dict.fromkeys(most, 0.0)
        left = CAPACITY
        for _ in range(len(jobs)):  # what one cannot use, the others share
            open_jobs = [job for job in jobs if got[job.name] < most[job.name] - 1e-9]
            greed = sum(job.greed for job in open_jobs)
            given = {job.name: min(most[job.name] - got[job.name], left * job.greed / greed) for job in open_jobs}
            for name, nbytes in given.items():
                got[name] += nbytes
            left -= sum(given.values())
        for job in jobs:
            job.second = got[job.name]
            job.moved += job.second
            job.stalled += max(0.0, 1 - job.second / job.wanted)
        now += 1.0
        fairness.observe(
            {(job.name, 0): Usage(moved={"d": job.moved}, stalled=job.stalled, weight=job.weight) for job in jobs}, now
        )
    return now


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0), (1.0, 1.0, 1.0), (4.0, 2.0, 1.0)])
@pytest.mark.parametrize("greedy", [0, 1])
def test_shares_are_those_of_the_weights(weights: tuple[float, ...], greedy: int) -> None:
    """However much more one takes by itself; and all of the drive is used."""
    jobs = [
        Job(name=f"{number}", greed=8.0 if number == greedy else 1.0, weight=weight)
        for number, weight in enumerate(weights)
    ]
    fairness = Fairness()
    now = go_on(jobs, fairness, 60)
    before = [job.moved for job in jobs]
    go_on(jobs, fairness, 60, now)
    shares = [(job.moved - moved) / weight for job, moved, weight in zip(jobs, before, weights, strict=True)]
    assert max(shares) / min(shares) < 1.1
    assert sum(job.moved for job in jobs) - sum(before) > 0.97 * 60 * CAPACITY


def test_one_that_is_alone_is_never_held_back() -> None:
    """And neither is one that shared the drive, when the other has ended."""
    fairness = Fairness()
    first, second = Job(name="first", greed=8.0), Job(name="second")
    now = go_on([first], fairness, 5)
    assert first.second == CAPACITY
    now = go_on([first, second], fairness, 30, now)
    assert fairness.rates_of("first")
    go_on([first], fairness, 2, now)
    assert first.second == CAPACITY
    assert fairness.rates_of("first") == fairness.rates_of("second") == {}


def test_what_one_does_not_want_the_others_get() -> None:
    """It gets all that it wants, and the drive stays busy."""
    modest, greedy = Job(name="modest", wanted=200.0), Job(name="greedy", greed=8.0)
    fairness = Fairness()
    now = go_on([modest, greedy], fairness, 60)
    before = modest.moved, greedy.moved
    go_on([modest, greedy], fairness, 60, now)
    assert modest.moved - before[0] > 0.85 * 60 * 200
    assert greedy.moved - before[1] > 0.95 * 60 * 800


def test_the_rate_of_a_run_is_shared_by_its_ranks() -> None:
    """And bytes that a rank has moved before it was first seen are nobody's speed."""
    fairness = Fairness()
    for second in range(40):
        usages = {("wide", rank): Usage(moved={"d": 1e6 + 450.0 * second}, stalled=0.5 * second) for rank in range(2)}
        usages["slow", 0] = Usage(moved={"d": 100.0 * second}, stalled=0.9 * second)
        fairness.observe(usages, float(second))
    rate = fairness.rates_of("wide")["d"]
    assert rate == pytest.approx(103 / 2, rel=0.1)
    assert fairness.rates_of("slow") == {}


def test_ranks_ask_a_daemon(tmp_path: Path) -> None:
    """Two runs whose stats pages say that one of them has nearly all of the drive: that one is held back."""
    (tmp_path / "drive").mkdir()
    with daemon(tmp_path):
        pages = {
            name: Stats.create(
                tmp_path, run_id=name, rank=0, local_rank=0, world_size=1, devices=["nvme0"],
                info={"paths": json.dumps([str(tmp_path / "drive")])},
            )
            for name in ("greedy", "modest")
        }  # fmt: skip

        def rates(run_id: str) -> object:
            answer = NodeDaemon(tmp_path).ask("pace", run_id=run_id, paths=[str(tmp_path / "drive")])
            assert answer is not None
            return answer["rates"]

        def held_back() -> bool:
            for name, moved, stalled in (("greedy", 10 << 20, 0.02), ("modest", 1 << 20, 0.02)):
                pages[name].counter("io_bytes_total", op="read", state="param", device="nvme0").add(moved)
                pages[name].counter("stall_seconds_total", phase="forward", cause="read").add(stalled)
            return bool(rates("greedy"))

        until(held_back)
        assert list(rates("greedy")) == [str(tmp_path / "drive")]
        assert rates("modest") == rates("unknown") == {}
        for stats in pages.values():
            stats.close()
