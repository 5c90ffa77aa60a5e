"""Bytes transferred in steady-state steps: counted by infinity, planned, and counted by the operating system."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import infinity
from infinity.content.format import Role
from infinity.estimate.machine import UPDATE_SECONDS, Accelerator, Drives, Machine
from infinity.run.run import Run
from support.train import Outcome, Paging, Recipe, offloaded, train

WARM, STEADY = 3, 12  # enough steps that a page that is transferred early or late is below 1%


def traffic(recipe: Recipe, paging: Paging, folder: str) -> dict[str, int | float]:
    """Return the bytes that the steady-state steps transfer, and sizes of the run."""
    with offloaded(recipe, paging, Path(folder)) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        wait_until_idle(optimizer)
        before = kernel_bytes()
        more = replace(recipe, steps=recipe.steps + STEADY)
        counted = optimizer.run.ledger.total_bytes
        spared = spared_bytes(optimizer)
        train(more, model, optimizer, Outcome(), first=recipe.steps)
        wait_until_idle(optimizer)
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


def wait_until_idle(optimizer: infinity.PagedOptimizer) -> None:
    """Wait until no update runs and no transfer is in flight, so that all bytes of a step are counted."""
    until = time.monotonic() + 300
    while optimizer.run.pager.reservations or any(optimizer.run.pager.in_flight().values()):
        assert time.monotonic() < until
        time.sleep(0.005)


def spared_bytes(optimizer: infinity.PagedOptimizer) -> float:
    """Return the bytes of planned reads that were not needed, since the start."""
    return optimizer.run.stats.snapshot().value("prefetch_spared_bytes_total")


def kernel_bytes() -> dict[str, int]:
    """Return the bytes that this process read from and wrote to drives, from /proc/self/io."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def within_one_percent(a: float, b: float) -> bool:
    """Return whether two byte counts agree within 1%."""
    return abs(a - b) <= 0.01 * max(a, b)


def matches_plan(measured: float, planned: float) -> bool:
    """Return whether the measured bytes exceed the plan by at most 1%.

    Less traffic than planned is possible, see `test_measured_bytes_match_the_plan_at_every_cache_size`.
    """
    return 0.85 * planned <= measured <= 1.01 * planned


def machine_of(run: Run) -> Machine:
    """Return a machine for estimates with the update cores of a run. Its speed does not matter for bytes."""
    return Machine(
        drives=Drives(count=1, read=1e9, write=1e9),
        device=Accelerator(name="", flops=1e12),
        update_seconds=UPDATE_SECONDS,
        update_cores=run.update_cores,
    )
