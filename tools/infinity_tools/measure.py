"""What one rank measures of its run, step by step and in all."""

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
"""Steps left out of every figure per step: the first records the trace, the second fills the host cache."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank counted."""

    node: int
    """Tells which ranks share a machine."""
    records: tuple[StepRecord, ...]
    """One per step."""
    kernel: tuple[tuple[int, int] | None, ...]
    """Bytes read and written in each step, as the kernel counts them; None where it does not."""
    state_bytes: int
    """Of weights and optimizer state of this rank."""
    host_cache_bytes: int
    """Of pinned memory."""
    stored_bytes: int
    """Space that its files take on NVMe."""
    peak_rss_bytes: int
    """Of the process, since its start."""
    read_bytes_total: int
    """From NVMe, since the start."""
    written_bytes_total: int
    """To NVMe, since the start."""
    retries_total: int
    """Requests to NVMe that were repeated."""
    predicted_read_bytes: int
    """Of a step, by the plan; 0 without one."""
    predicted_written_bytes: int
    """Likewise."""
    bandwidth: float
    """Bytes per second in the step that moved pages fastest, while it did; 0 where none moved any."""
    predicted_seconds: float
    """Of a step at this bandwidth; 0 without a plan, or where nothing moved."""

    @property
    def predicted_bytes(self) -> int:
        """Bytes that the plan predicts for a step."""
        return self.predicted_read_bytes + self.predicted_written_bytes


@dataclass
class KernelCounts:
    """Bytes that the kernel says this process read from and wrote to storage, step by step."""

    steps: list[tuple[int, int] | None] = field(default_factory=list)
    """Bytes read and written, by step; None where the kernel does not count."""
    _before: tuple[int, int] | None = None
    """The same since the start of the process, as the step began."""

    def begin(self) -> None:
        """Bytes from now on belong to the next step."""
        self._before = kernel_bytes()

    def end(self) -> None:
        """Close a step."""
        now, before = kernel_bytes(), self._before
        self.steps.append((now[0] - before[0], now[1] - before[1]) if now and before else None)
        self._before = now


def kernel_bytes() -> tuple[int, int] | None:
    """Return bytes read and written so far, from ``/proc/self/io``; None where the kernel does not count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def peak_rss() -> int:
    """Return the most memory that was resident at any time, in bytes."""
    # Not getrusage: its figure begins with what the parent process had when it forked.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def nvme_totals(optimizer: PagedOptimizer) -> tuple[int, int]:
    """Return bytes read from and written to NVMe since the start of this process, as its metrics show them."""
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
    """Return what this rank counted. Nothing is in flight any more."""
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
    """Return the records of the steps that figures per step are made of."""
    return records[WARM_STEPS if len(records) > WARM_STEPS else 0 :]


def _rates(optimizer: PagedOptimizer) -> tuple[float, float]:
    """Return bandwidth and predicted seconds of a step, as a `RankReport` has them."""
    records = steady(optimizer.records)
    rates = [(r.read_bytes + r.written_bytes) / r.transfer_seconds for r in records if r.transfer_seconds]
    bandwidth = max(rates, default=0.0)
    if optimizer.run.plan is None or not bandwidth:
        return bandwidth, 0.0
    computation = median(record.seconds - record.stall_seconds for record in records)
    return bandwidth, optimizer.predict_seconds(bandwidth, computation)
