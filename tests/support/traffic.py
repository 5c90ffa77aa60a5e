"""Bytes of steady steps: counted by us, planned, and counted by the kernel."""

from __future__ import annotations

import time
from pathlib import Path

import infinity
from infinity.content.format import Role
from support.train import Outcome, Paging, Recipe, offloaded, train

WARM, STEADY = 3, 24  # as many steps as make what is in flight at both ends less than 1 %


def traffic(recipe: Recipe, paging: Paging, folder: str) -> dict[str, int | float]:
    """Return bytes of the steady steps: counted by us, planned, and counted by the kernel."""
    with offloaded(recipe, paging, Path(folder)) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        quiet(optimizer)
        before = kernel_bytes()
        more = Recipe(**{**vars(recipe), "steps": recipe.steps + STEADY})
        counted = optimizer.run.ledger.total_bytes
        spared = spared_bytes(optimizer)
        train(more, model, optimizer, Outcome(), first=recipe.steps)
        quiet(optimizer)
        counted = {op: value - counted[op] for op, value in optimizer.run.ledger.total_bytes.items()}
        kernel = {name: value - before[name] for name, value in kernel_bytes().items()}
        assert optimizer.update_schedule == paging.update_schedule
        return {
            "read": counted["read"],
            "written": counted["write"],
            "planned_read": STEADY * optimizer.run.plan.traffic.read_bytes,
            "planned_written": STEADY * optimizer.run.plan.traffic.written_bytes,
            "spared": spared_bytes(optimizer) - spared,
            "kernel_read": kernel["read_bytes"],
            "kernel_written": kernel["write_bytes"],
            "resident": len(optimizer.run.plan.resident),
            "parameters": optimizer.run.layout.parameters,
            "state": optimizer.run.layout.state_bytes,
            "gradients": optimizer.run.layout.bytes_of(Role.GRAD),
        }


def quiet(optimizer: infinity.PagedOptimizer) -> None:
    """Wait until no update runs and nothing is in flight, so that all bytes are counted that a step asked for."""
    until = time.monotonic() + 300
    while optimizer.run.pager.reservations or any(optimizer.run.pager.in_flight().values()):
        assert time.monotonic() < until
        time.sleep(0.005)


def spared_bytes(optimizer: infinity.PagedOptimizer) -> float:
    """Return the bytes of reads that were planned and not needed, since the start."""
    return optimizer.run.stats.snapshot().value("prefetch_spared_bytes_total")


def kernel_bytes() -> dict[str, int]:
    """Return what the kernel says that this process moved to and from drives."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def close(a: float, b: float) -> bool:
    """Whether two byte counts agree within 1 %."""
    return abs(a - b) <= 0.01 * max(a, b)


def as_planned(measured: float, planned: float) -> bool:
    """Whether no more than 1 % above the plan was moved; less is possible, see `test_measured_bytes_match_the_plan_at_every_cache_size`."""
    return 0.85 * planned <= measured <= 1.01 * planned
