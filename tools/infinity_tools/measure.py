"""Measurements of one rank, per step and in total."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from infinity import PagedOptimizer, torchrun
from infinity.telemetry.ledger import StepRecord
from infinity.telemetry.metrics import OPS, ROLES

WARM_STEPS = 2
"""Number of initial steps that per-step figures exclude: the first records the trace, and the second fills the host
cache.
"""


def peak_rss() -> int:
    """Return the peak resident memory in bytes."""
    # getrusage is not used because its peak includes memory of the parent process at the time of the fork.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def nvme_totals(optimizer: PagedOptimizer) -> tuple[int, int]:
    """Return the bytes read from and written to NVMe since the start of this process, from its metrics."""
    page = optimizer.run.stats.snapshot()
    read, written = (
        int(
            sum(
                page.value("io_bytes_total", op=op, state=state, device=device)
                for state in ROLES
                for device in page.header.devices
            )
        )
        for op in OPS
    )
    return read, written


def report(optimizer: PagedOptimizer) -> dict[str, Any]:
    """Return the measurements of this rank: the index of its node, the record of each step, the figures of the summary
    that are summed over ranks, and the planned seconds per step. Call it while no transfers are in flight.

    Planned figures are 0 without a plan. The bandwidth is the highest of any step while it moved pages.
    """
    read, written = nvme_totals(optimizer)
    traffic = optimizer.run.plan.traffic if optimizer.run.plan is not None else None
    activations = optimizer.run.activation_traffic
    bandwidth, seconds = _rates(optimizer)
    page = optimizer.run.stats.snapshot()
    return {
        "node": torchrun.number("GROUP_RANK", 0),
        "records": tuple(optimizer.records),
        "totals": {
            "state_bytes": optimizer.run.layout.state_bytes,
            "stored_bytes": int(page.value("tier_capacity_bytes", tier="nvme")),
            "host_memory_bytes": int(page.value("tier_capacity_bytes", tier="host")),
            "peak_rss_bytes": peak_rss(),
            "predicted_read_bytes_per_step": traffic.read_bytes + activations.read if traffic else 0,
            "predicted_written_bytes_per_step": traffic.written_bytes + activations.written if traffic else 0,
            "nvme_bandwidth_bytes_per_second": bandwidth,
            "nvme_read_bytes_total": read,
            "nvme_written_bytes_total": written,
            "nvme_retries_total": sum(int(page.value("io_retries_total", op=op)) for op in OPS),
        },
        "predicted_step_seconds": seconds,
    }


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the records that per-step figures are computed from."""
    return records[WARM_STEPS if len(records) > WARM_STEPS else 0 :]


def _rates(optimizer: PagedOptimizer) -> tuple[float, float]:
    """Return the bandwidth and the planned seconds per step of a report."""
    records = steady(optimizer.records)
    rates = [(r.read_bytes + r.written_bytes) / r.transfer_seconds for r in records if r.transfer_seconds]
    bandwidth = max(rates, default=0.0)
    if optimizer.run.plan is None or not bandwidth:
        return bandwidth, 0.0
    computation = median(record.seconds - record.stall_seconds for record in records)
    return bandwidth, optimizer.predict_seconds(bandwidth, computation)
