"""Measurements of one rank, per step and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from infinity import PagedOptimizer, torchrun
from infinity.ranks import Ranks
from infinity.telemetry.ledger import StepRecord
from infinity.telemetry.metrics import OPS, ROLES

WARM_STEPS = 2
"""Number of initial steps that per-step figures exclude: the first records the trace, and the second fills the host
cache.
"""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Measurements of one rank."""

    node: int
    """Index of the node. Ranks with the same index share a machine."""
    records: tuple[StepRecord, ...]
    """Record of each step."""
    kernel: tuple[tuple[int, int] | None, ...]
    """Bytes read and written in each step as counted by the operating system, or None if it does not count them."""
    state_bytes: int
    """Bytes of weights and optimizer state of this rank."""
    host_cache_bytes: int
    """Size of the host cache."""
    stored_bytes: int
    """Space of the rank's files on NVMe."""
    peak_rss_bytes: int
    """Peak resident memory of the process."""
    read_bytes_total: int
    """Bytes read from NVMe since the start."""
    written_bytes_total: int
    """Bytes written to NVMe since the start."""
    retries_total: int
    """Number of repeated NVMe requests."""
    predicted_read_bytes: int
    """Planned bytes read per step. 0 without a plan."""
    predicted_written_bytes: int
    """Planned bytes written per step. 0 without a plan."""
    bandwidth: float
    """Highest throughput of a step while it moved pages, in bytes per second. 0 if no step moved pages."""
    predicted_seconds: float
    """Planned seconds per step at this bandwidth. 0 without a plan or without traffic."""

    @property
    def predicted_bytes(self) -> int:
        """Planned bytes per step."""
        return self.predicted_read_bytes + self.predicted_written_bytes


@dataclass
class KernelCounts:
    """Bytes that this process reads from and writes to storage per step, as counted by the operating system."""

    steps: list[tuple[int, int] | None] = field(default_factory=list)
    """Bytes read and written in each step, or None if the operating system does not count them."""
    _before: tuple[int, int] | None = None
    """Bytes read and written since the start of the process, at the beginning of the step."""

    def begin(self) -> None:
        """Begin the first step."""
        self._before = kernel_bytes()

    def end(self) -> None:
        """End a step and begin the next one."""
        now, before = kernel_bytes(), self._before
        self.steps.append((now[0] - before[0], now[1] - before[1]) if now and before else None)
        self._before = now


def kernel_bytes() -> tuple[int, int] | None:
    """Return the bytes read and written so far from ``/proc/self/io``, or None if the operating system does not count
    them.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


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


def report(optimizer: PagedOptimizer, kernel: Sequence[tuple[int, int] | None], ranks: Ranks) -> RankReport:
    """Return the report of this rank. Call it while no transfers are in flight."""
    read, written = nvme_totals(optimizer)
    traffic = optimizer.run.plan.traffic if optimizer.run.plan is not None else None
    activations = optimizer.run.activation_traffic
    bandwidth, seconds = _rates(optimizer)
    page = optimizer.run.stats.snapshot()
    return RankReport(
        node=torchrun.number("GROUP_RANK", 0),
        records=tuple(optimizer.records),
        kernel=tuple(kernel),
        state_bytes=optimizer.run.layout.state_bytes,
        host_cache_bytes=int(page.value("tier_capacity_bytes", tier="host")),
        stored_bytes=int(page.value("tier_capacity_bytes", tier="nvme")),
        peak_rss_bytes=peak_rss(),
        read_bytes_total=read,
        written_bytes_total=written,
        retries_total=sum(int(page.value("io_retries_total", op=op)) for op in OPS),
        predicted_read_bytes=traffic.read_bytes + activations.read if traffic else 0,
        predicted_written_bytes=traffic.written_bytes + activations.written if traffic else 0,
        bandwidth=bandwidth,
        predicted_seconds=seconds,
    )


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the records that per-step figures are computed from."""
    return records[WARM_STEPS if len(records) > WARM_STEPS else 0 :]


def _rates(optimizer: PagedOptimizer) -> tuple[float, float]:
    """Return the bandwidth and the planned seconds per step of a `RankReport`."""
    records = steady(optimizer.records)
    rates = [(r.read_bytes + r.written_bytes) / r.transfer_seconds for r in records if r.transfer_seconds]
    bandwidth = max(rates, default=0.0)
    if optimizer.run.plan is None or not bandwidth:
        return bandwidth, 0.0
    computation = median(record.seconds - record.stall_seconds for record in records)
    return bandwidth, optimizer.predict_seconds(bandwidth, computation)
