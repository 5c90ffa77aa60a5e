"""Tests of bandwidth fairness: the rule on a simulated drive, and the `pace` requests of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from infinity.daemon_client import NodeDaemon
from infinity_daemon.fairness import Fairness, Usage
from support.counted_rank import make_stats
from support.daemon_process import daemon, until

CAPACITY = 1000.0
"""Bandwidth of the simulated drive, in bytes per second."""


@dataclass
class SimulatedRun:
    """Run with one rank: its demand, and the share of the drive that it takes without limits."""

    name: str
    wanted: float = 2 * CAPACITY
    greed: float = 1.0
    weight: float = 1.0
    uid: int = 0
    moved: float = 0.0
    stalled: float = 0.0
    second: float = 0.0
    """Bytes moved in the last second."""


def simulate(runs: list[SimulatedRun], fairness: Fairness, seconds: int, now: float = 0.0) -> float:
    """Let runs share the drive in proportion to `greed`, within their limits; the daemon observes each second."""
    for _ in range(seconds):
        limits = {run.name: min(run.wanted, fairness.rates_of(run.name).get("d", CAPACITY)) for run in runs}
        received = dict.fromkeys(limits, 0.0)
        left = CAPACITY
        for _ in range(len(runs)):  # runs share the bandwidth that other runs cannot use
            unsatisfied = [run for run in runs if received[run.name] < limits[run.name] - 1e-9]
            greed = sum(run.greed for run in unsatisfied)
            granted = {
                run.name: min(limits[run.name] - received[run.name], left * run.greed / greed) for run in unsatisfied
            }
            for name, amount in granted.items():
                received[name] += amount
            left -= sum(granted.values())
        for run in runs:
            run.second = received[run.name]
            run.moved += run.second
            run.stalled += max(0.0, 1 - run.second / run.wanted)
        now += 1.0
        fairness.observe(
            {
                (run.name, 0): Usage(moved={"d": run.moved}, stalled=run.stalled, weight=run.weight, uid=run.uid)
                for run in runs
            },
            now,
            {"d": CAPACITY},
        )
    return now


def test_bandwidth_is_divided_by_weight(subtests: pytest.Subtests) -> None:
    """The drive is fully used, even if one run would take much more without limits."""
    for greedy in [0, 1]:
        for weights in [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0), (1.0, 1.0, 1.0), (4.0, 2.0, 1.0)]:
            with subtests.test(weights=weights, greedy=greedy):
                runs = [
                    SimulatedRun(name=f"{number}", greed=8.0 if number == greedy else 1.0, weight=weight)
                    for number, weight in enumerate(weights)
                ]
                fairness = Fairness()
                now = simulate(runs, fairness, 60)
                before = [run.moved for run in runs]
                simulate(runs, fairness, 60, now)
                shares = [
                    (run.moved - moved) / weight for run, moved, weight in zip(runs, before, weights, strict=True)
                ]
                assert max(shares) / min(shares) < 1.1
                assert sum(run.moved for run in runs) - sum(before) > 0.97 * 60 * CAPACITY


def test_a_single_run_is_not_limited() -> None:
    """The limit is also removed when the other run ends."""
    fairness = Fairness()
    first, second = SimulatedRun(name="first", greed=8.0), SimulatedRun(name="second")
    now = simulate([first], fairness, 5)
    assert first.second == CAPACITY
    now = simulate([first, second], fairness, 30, now)
    assert fairness.rates_of("first")
    simulate([first], fairness, 2, now)
    assert first.second == CAPACITY
    assert fairness.rates_of("first") == fairness.rates_of("second") == {}


def test_unused_bandwidth_is_given_to_other_runs() -> None:
    modest, greedy = SimulatedRun(name="modest", wanted=200.0), SimulatedRun(name="greedy", greed=8.0)
    fairness = Fairness()
    now = simulate([modest, greedy], fairness, 60)
    before = modest.moved, greedy.moved
    simulate([modest, greedy], fairness, 60, now)
    assert modest.moved - before[0] > 0.85 * 60 * 200
    assert greedy.moved - before[1] > 0.95 * 60 * 800


def test_bandwidth_is_divided_between_users_first() -> None:
    """A user gets no more by starting more runs or by a larger `storage.bandwidth_weight`."""
    many = [SimulatedRun(name=f"{number}", greed=8.0, weight=9.0, uid=1) for number in range(3)]
    one = SimulatedRun(name="one", uid=2)
    fairness = Fairness()
    now = simulate([*many, one], fairness, 60)
    before = one.moved
    simulate([*many, one], fairness, 60, now)
    assert one.moved - before == pytest.approx(60 * CAPACITY / 2, rel=0.1)


def test_a_false_stats_file_does_not_stop_the_runs_of_other_users() -> None:
    """A user who claims to be stalled and to get almost nothing takes at most three quarters from another user."""
    fairness = Fairness()
    for second in range(300):
        usages = {
            ("honest", 0): Usage(moved={"d": 400.0 * second}, stalled=0.5 * second, uid=1),
            ("liar", 0): Usage(moved={"d": 1.0 * second}, stalled=1.0 * second, weight=9999.0, uid=2),
        }
        fairness.observe(usages, float(second), {"d": CAPACITY})
    assert fairness.rates_of("honest")["d"] >= CAPACITY / 4


def test_the_rate_of_a_run_is_divided_among_its_ranks() -> None:
    """Bytes that a rank moved before it was first observed do not count."""
    fairness = Fairness()
    for second in range(40):
        usages = {("wide", rank): Usage(moved={"d": 1e6 + 450.0 * second}, stalled=0.5 * second) for rank in range(2)}
        usages["slow", 0] = Usage(moved={"d": 100.0 * second}, stalled=0.9 * second)
        fairness.observe(usages, float(second))
    rate = fairness.rates_of("wide")["d"]
    assert rate == pytest.approx(103 / 2, rel=0.1)
    assert fairness.rates_of("slow") == {}


def test_the_daemon_limits_only_the_greedy_run(tmp_path: Path) -> None:
    """Of two runs, the one whose stats file shows nearly all traffic of the drive is limited."""
    (tmp_path / "drive").mkdir()
    with daemon(tmp_path):
        stats_files = {name: make_stats(tmp_path, name, paths=[tmp_path / "drive"]) for name in ("greedy", "modest")}

        def rates(run_id: str) -> object:
            answer = NodeDaemon(tmp_path).ask("pace", run_id=run_id, paths=[str(tmp_path / "drive")])
            assert answer is not None
            return answer["rates"]

        def greedy_run_is_limited() -> bool:
            for name, moved, stalled in (("greedy", 10 << 20, 0.02), ("modest", 1 << 20, 0.02)):
                stats_files[name].counter("io_bytes_total", op="read", state="param", device="nvme0").add(moved)
                stats_files[name].counter("stall_seconds_total", phase="forward", cause="read").add(stalled)
            return bool(rates("greedy"))

        until(greedy_run_is_limited)
        assert list(rates("greedy")) == [str(tmp_path / "drive")]
        assert rates("modest") == rates("unknown") == {}
        for stats in stats_files.values():
            stats.close()
