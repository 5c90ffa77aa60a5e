"""Tests of bytes per step: measured traffic equals the plan and the counters of the operating system."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest

import infinity
from support.layouts import UPDATE_SCHEDULES
from support.ranks import RankPool
from support.tables import WIDE, all_but, alternate
from support.traffic import STEADY, WARM, kernel_bytes, matches_plan, traffic, within_one_percent
from support.train import PAGE, Outcome, Paging, Recipe, offloaded, train


@functools.cache
def steady(recipe: Recipe, paging: Paging) -> dict[str, int | float]:
    """Return `traffic` on one rank. Several tests use the run with the smallest host cache."""
    with tempfile.TemporaryDirectory() as folder:
        return traffic(recipe, paging, folder)


@pytest.mark.parametrize(
    ("model_and_host_cache", "update_schedule"),
    alternate([("even", "least"), ("toy", "all"), ("toy", "least")], UPDATE_SCHEDULES),
)
def test_measured_bytes_match_the_plan(model_and_host_cache: tuple[str, str], update_schedule: str) -> None:
    """Steady steps match within 1 %; if everything fits the host cache, no bytes move."""
    model, host_cache = model_and_host_cache
    seen = steady(Recipe(model=model, steps=WARM), Paging(host_cache=host_cache, update_schedule=update_schedule))
    assert matches_plan(seen["read"], seen["planned_read"]), seen
    assert matches_plan(seen["written"], seen["planned_written"]), seen
    assert (seen["read"] == 0) == (seen["written"] == 0) == (host_cache == "all")


@pytest.mark.parametrize(("percent", "update_schedule"), alternate([10, 50, 90], UPDATE_SCHEDULES))
def test_measured_bytes_match_the_plan_at_every_cache_size(percent: int, update_schedule: str) -> None:
    """Host caches of 10 to 90 % of the state match within 1 %, with reads spared by pending writes counted as reads."""
    paging = Paging(host_cache=f"{percent}%", update_schedule=update_schedule)
    seen = steady(Recipe(model="even", steps=2 * WARM), paging)
    assert within_one_percent(seen["read"] + seen["spared"], seen["planned_read"]), seen
    assert within_one_percent(seen["written"], seen["planned_written"]), seen
    assert seen["spared"] <= 0.15 * seen["planned_read"], seen


@pytest.mark.parametrize("recipe", [Recipe(model="toy", steps=WARM, micro=2), Recipe(model="repeated", steps=WARM)])
def test_measured_bytes_match_the_plan_with_accumulation_and_reuse(recipe: Recipe) -> None:
    seen = steady(recipe, Paging(host_cache="least", update_schedule="after_backward"))
    assert matches_plan(seen["read"], seen["planned_read"]), seen
    assert matches_plan(seen["written"], seen["planned_written"]), seen
    assert seen["planned_read"] > 0


@pytest.mark.parametrize("update_schedule", all_but(UPDATE_SCHEDULES, "in_backward", "after_backward"))
def test_measured_bytes_match_the_plan_on_two_ranks(update_schedule: str, tmp_path: Path, pair: RankPool) -> None:
    """Each rank transfers its own shards."""
    paging = Paging(host_cache="least", update_schedule=update_schedule)
    for seen in pair.run(traffic, Recipe(model="toy", steps=WARM), paging, str(tmp_path)):
        assert matches_plan(seen["read"], seen["planned_read"]), seen
        assert matches_plan(seen["written"], seen["planned_written"]), seen
        assert seen["planned_read"] > 0


@pytest.mark.parametrize(
    ("update_schedule", "most"),
    [
        ("in_backward", 30.05),
        pytest.param("in_forward", 32.3, marks=WIDE),
        pytest.param("after_backward", 34.05, marks=WIDE),
    ],
)
def test_bytes_per_parameter_without_caching(update_schedule: str, most: float) -> None:
    """30 with updates in backward, 4 more if bf16 gradients are stored, 2 less if updates run in forward."""
    paging = Paging(host_cache="least", update_schedule=update_schedule)
    seen = steady(Recipe(model="even", steps=WARM), paging)
    assert seen["resident"] <= 2
    assert seen["state"] == 14 * seen["parameters"], "the model must have no padding"
    each = (seen["read"] + seen["written"]) / STEADY / seen["parameters"]
    assert most - 2.1 < each <= most


def accounts_writes(folder: Path) -> bool:
    """Return whether the operating system counts bytes that are written to a folder."""
    before = kernel_bytes()["write_bytes"]
    file = folder / "probe"
    file.write_bytes(os.urandom(8 * PAGE))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    file.unlink()
    return kernel_bytes()["write_bytes"] - before >= 8 * PAGE


@pytest.mark.parametrize(
    ("engine", "update_schedule"),
    [("auto", "in_backward"), pytest.param("threads", "after_backward", marks=WIDE)],
)
def test_measured_bytes_match_proc_self_io(engine: str, update_schedule: str, tmp_path: Path) -> None:
    """The counters agree within 1 %: every byte is counted, and none passes through the page cache."""
    if not Path("/proc/self/io").exists() or not accounts_writes(tmp_path):
        pytest.skip("the operating system does not count bytes written to this file system")
    paging = Paging(host_cache="least", update_schedule=update_schedule, engine=engine)
    seen = steady(Recipe(model="even", steps=WARM), paging)
    assert within_one_percent(seen["read"], seen["kernel_read"]), seen
    assert within_one_percent(seen["written"], seen["kernel_written"]), seen


def test_bytes_are_counted_per_role_and_path(tmp_path: Path) -> None:
    """The stats file records bytes by state and path."""
    recipe = Recipe(model="even", steps=WARM)
    with offloaded(recipe, Paging(host_cache="least", paths=2, update_schedule="after_backward"), tmp_path) as (
        model,
        optimizer,
    ):
        train(recipe, model, optimizer, Outcome())
        optimizer.drain()
        stats = optimizer.run.stats
        total = optimizer.run.ledger.total_bytes
        for op in ("read", "write"):
            parts = [
                stats.snapshot().value("io_bytes_total", op=op, state=state, device=device)
                for state in ("param", "update", "grad")
                for device in ("nvme0", "nvme1")
            ]
            assert sum(parts) == total[op]
            assert all(parts)
    assert isinstance(optimizer, infinity.PagedOptimizer)
