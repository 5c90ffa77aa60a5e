"""Bytes per step: what is measured is what was planned, and what the kernel counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import infinity
from support.layouts import UPDATE_SCHEDULES
from support.ranks import RankPool
from support.tables import all_but, alternate
from support.traffic import STEADY, WARM, as_planned, close, kernel_bytes, traffic
from support.train import PAGE, Outcome, Paging, Recipe, offloaded, train


@pytest.mark.parametrize(
    ("model_and_host_cache", "update_schedule"),
    alternate([("even", "least"), ("even", "middle"), ("even", "all"), ("toy", "least")], UPDATE_SCHEDULES),
)
def test_measured_bytes_are_the_planned_ones(
    model_and_host_cache: tuple[str, str], update_schedule: str, tmp_path: Path
) -> None:
    """Within 1 % over steady steps; nothing at all where everything fits the host cache."""
    model, host_cache = model_and_host_cache
    seen = traffic(
        Recipe(model=model, steps=WARM), Paging(host_cache=host_cache, update_schedule=update_schedule), str(tmp_path)
    )
    assert as_planned(seen["read"], seen["planned_read"]), seen
    assert as_planned(seen["written"], seen["planned_written"]), seen
    assert (seen["read"] == 0) == (seen["written"] == 0) == (host_cache == "all")


@pytest.mark.parametrize(("share", "update_schedule"), alternate([10, 25, 50, 75, 90], UPDATE_SCHEDULES))
def test_measured_bytes_at_every_share(share: int, update_schedule: str, tmp_path: Path) -> None:
    """Within 1 %, above and below, in host caches of a tenth to nine tenths of the state.

    What is read counts with what was spared: on a slow drive a page may come back while it is still being written, and
    is not read again. That is some pages at the turns of a step.
    """
    paging = Paging(host_cache=f"{share}%", update_schedule=update_schedule)
    seen = traffic(Recipe(model="even", steps=2 * WARM), paging, str(tmp_path))
    assert close(seen["read"] + seen["spared"], seen["planned_read"]), seen
    assert close(seen["written"], seen["planned_written"]), seen
    assert seen["spared"] <= 0.15 * seen["planned_read"], seen


@pytest.mark.parametrize("recipe", [Recipe(model="toy", steps=WARM, micro=2), Recipe(model="repeated", steps=WARM)])
def test_measured_bytes_are_the_planned_ones_in_other_loops(recipe: Recipe, tmp_path: Path) -> None:
    """Accumulation, and a module that is used twice."""
    seen = traffic(recipe, Paging(host_cache="least", update_schedule="after_backward"), str(tmp_path))
    assert as_planned(seen["read"], seen["planned_read"]), seen
    assert as_planned(seen["written"], seen["planned_written"]), seen
    assert seen["planned_read"] > 0


@pytest.mark.parametrize("update_schedule", all_but(UPDATE_SCHEDULES, "in_backward", "after_backward"))
def test_measured_bytes_are_the_planned_ones_on_two_ranks(update_schedule: str, tmp_path: Path, pair: RankPool) -> None:
    """Each rank moves its own shards."""
    paging = Paging(host_cache="least", update_schedule=update_schedule)
    for seen in pair.run(traffic, Recipe(model="even", steps=WARM), paging, str(tmp_path)):
        assert as_planned(seen["read"], seen["planned_read"]), seen
        assert as_planned(seen["written"], seen["planned_written"]), seen
        assert seen["planned_read"] > 0


@pytest.mark.parametrize(
    ("update_schedule", "most"),
    [
        ("in_backward", 30.05),
        pytest.param("in_forward", 32.3, marks=pytest.mark.wide),
        pytest.param("after_backward", 34.05, marks=pytest.mark.wide),
    ],
)
def test_bytes_per_parameter_with_nothing_cached(update_schedule: str, most: float, tmp_path: Path) -> None:
    """30 in backward; 4 more where gradients, in bf16, go to NVMe and back; 2 less where the forward updates."""
    paging = Paging(host_cache="least", update_schedule=update_schedule)
    seen = traffic(Recipe(model="even", steps=WARM), paging, str(tmp_path))
    assert seen["resident"] <= 2
    assert seen["state"] == 14 * seen["parameters"], "this model is meant to have no padding"
    each = (seen["read"] + seen["written"]) / STEADY / seen["parameters"]
    assert most - 2.1 < each <= most


def accounted(folder: Path) -> bool:
    """Whether the kernel counts what is written to a folder."""
    before = kernel_bytes()["write_bytes"]
    file = folder / "probe"
    file.write_bytes(os.urandom(8 * PAGE))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    file.unlink()
    return kernel_bytes()["write_bytes"] - before >= 8 * PAGE


@pytest.mark.parametrize(("engine", "update_schedule"), [("auto", "in_backward"), ("threads", "after_backward")])
def test_the_kernel_counts_the_same_bytes(engine: str, update_schedule: str, tmp_path: Path) -> None:
    """`/proc/self/io` within 1 %: no byte is moved that is not counted, and no page cache in between."""
    if not Path("/proc/self/io").exists() or not accounted(tmp_path):
        pytest.skip("the kernel does not count the bytes of this file system")
    paging = Paging(host_cache="least", update_schedule=update_schedule, engine=engine)
    seen = traffic(Recipe(model="even", steps=WARM), paging, str(tmp_path))
    assert close(seen["read"], seen["kernel_read"]), seen
    assert close(seen["written"], seen["kernel_written"]), seen


def test_a_role_is_counted_on_its_own(tmp_path: Path) -> None:
    """The stats page says how many bytes of each state went to which path."""
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
