"""Table of all metrics.

The layout of the stats file, the exporter and `docs/reference/metrics.md` are generated from `METRICS`, so a metric
that is not in the table cannot be counted, exported or documented. Conventions: base units in the plural, ``_total`` on
counters, no rates or percentages, and labels only from closed sets. Names in the table have no ``infinity_`` prefix;
the exporter adds it.

``python -m infinity.telemetry.metrics`` prints the table as Markdown.
"""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from typing import Final, Literal

from infinity.errors import CorruptPageError, StallError, StorageError

PREFIX: Final = "infinity_"

Kind = Literal["counter", "gauge", "histogram", "info"]
Server = Literal["rank", "daemon"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label and the closed set of its values.

    `values` is empty if the set is closed but depends on the machine: the devices of a stats file, the drives of a
    node, or the texts of an info metric.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the table.

    The name of a metric includes its unit. `buckets` holds the upper bounds of a histogram in that unit, except the
    last (infinite) one. `server` is the process that counts the metric: a rank in its stats file, or the daemon. The
    exporter adds the labels ``run`` and ``rank`` to every metric of a rank.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    server: Server = "rank"

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels in table order, without ``run`` and ``rank``."""
        return tuple(label.name for label in self.labels)


TIERS: Final = ("host", "nvme")
ROLES: Final = ("param", "update", "grad", "activation")
OPS: Final = ("read", "write")
LINK_DIRECTIONS: Final = ("to_device", "from_device")
PHASES: Final = ("forward", "backward", "update", "checkpoint", "other")
CAUSES: Final = ("read", "write", "host_cache")
PARTS: Final = (
    "compute", "collective", "copy", "update", "read_stall", "write_stall", "host_cache_stall", "python",
)  # fmt: skip
STALLS: Final = ("read_stall", "write_stall", "host_cache_stall")
"""Parts of a step in which the training thread is stalled."""
FETCH_RESULTS: Final = ("hit", "late", "miss")
CACHE_SLOT_STATUSES: Final = ("free", "resident", "streaming", "writing")
ERROR_REASONS: Final = ("eio", "enospc", "corrupt", "timeout", "other")
PAGE_STATUSES: Final = ("live", "ended", "dead", "broken")
COLLECTORS: Final = ("build", "devices", "ranks", "stale")

_OP = Label(name="op", values=OPS)
_LINK = Label(name="direction", values=LINK_DIRECTIONS)
_ROLE = Label(name="state", values=ROLES)
_TIER = Label(name="tier", values=TIERS)
_PHASE = Label(name="phase", values=PHASES)
_CAUSE = Label(name="cause", values=CAUSES)
_PART = Label(name="part", values=PARTS)
_DEVICE = Label(name="device")
_RUN = Label(name="run")
_COLLECTOR = Label(name="collector", values=COLLECTORS)

_REQUEST_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0,
)  # fmt: skip
_STEP_BUCKETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0)
_CHECKPOINT_BUCKETS = (0.01, 0.05, 0.25, 1.0, 5.0, 20.0, 120.0)


def _rank(name: str, kind: Kind, doc: str, *labels: Label, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name=name, kind=kind, doc=doc, labels=labels, buckets=buckets)


def _daemon(name: str, kind: Kind, doc: str, *labels: Label) -> Metric:
    return Metric(name=name, kind=kind, doc=doc, labels=labels, server="daemon")


METRICS: Final[tuple[Metric, ...]] = (
    _rank(
        "build_info",
        "info",
        "Versions of infinity and torch on this rank, and the I/O engine in use; always 1.",
        Label(name="version"),
        Label(name="torch_version"),
        Label(name="io_engine"),
    ),
    _rank(
        "run_info",
        "info",
        "World size of the run that the rank belongs to; always 1.",
        Label(name="world_size"),
    ),
    _rank(
        "io_bytes_total",
        "counter",
        "Bytes transferred between the host cache and NVMe, by page role and configured path.",
        _OP,
        _ROLE,
        _DEVICE,
    ),
    _rank(
        "io_request_duration_seconds",
        "histogram",
        "Duration of one I/O request from submission to completion, in seconds.",
        _OP,
        buckets=_REQUEST_BUCKETS,
    ),
    _rank(
        "io_errors_total",
        "counter",
        "Page transfers that failed after all retries.",
        _OP,
        Label(name="reason", values=ERROR_REASONS),
    ),
    _rank(
        "io_retries_total",
        "counter",
        "Requests submitted again, either for the rest of a short or interrupted transfer or for a failed one.",
        _OP,
    ),
    _rank("io_inflight_requests", "gauge", "Page transfers in flight at the end of the last step.", _OP),
    _rank("tier_used_bytes", "gauge", "Bytes of training state held in a tier.", _TIER, _ROLE),
    _rank("tier_capacity_bytes", "gauge", "Capacity of a tier for this rank, in bytes.", _TIER),
    _rank(
        "gather_copied_bytes_total",
        "counter",
        "Bytes of weights copied into the all-gather buffers of FSDP2.",
    ),
    _rank(
        "link_bytes_total",
        "counter",
        "Bytes copied between host memory and the GPU; 0 if the model trains on the CPU.",
        _LINK,
    ),
    _rank("transfer_seconds_total", "counter", "Seconds during which at least one page transfer was in flight."),
    _rank(
        "cache_slots",
        "gauge",
        "Host cache slots by status.",
        Label(name="status", values=CACHE_SLOT_STATUSES),
    ),
    _rank("cache_slot_wait_seconds_total", "counter", "Seconds the training thread waited for a free cache slot."),
    _rank(
        "prefetch_fetches_total",
        "counter",
        "Pages requested, by result: ready in time (hit), still being read (late), or not yet being read (miss).",
        Label(name="result", values=FETCH_RESULTS),
    ),
    _rank(
        "prefetch_spared_bytes_total",
        "counter",
        "Planned read bytes that were not read because the page was still being written and could be reused.",
    ),
    _rank(
        "stall_seconds_total",
        "counter",
        "Seconds the training thread was stalled on storage, by phase and cause.",
        _PHASE,
        _CAUSE,
    ),
    _rank("steps_total", "counter", "Optimizer steps completed."),
    _rank(
        "steps_skipped_total", "counter", "Completed steps without an update because the gradient norm was not finite."
    ),
    _rank(
        "step_duration_seconds",
        "histogram",
        "Duration of one optimizer step, in seconds.",
        buckets=_STEP_BUCKETS,
    ),
    _rank(
        "step_part_seconds_total",
        "counter",
        "Seconds of completed steps by activity of the training thread. The parts add up to the sum of "
        "`infinity_step_duration_seconds` (docs/explanation/threads-and-time.md).",
        _PART,
    ),
    _rank(
        "step_phase_seconds_total",
        "counter",
        "Seconds by phase, including checkpoints and the time between steps.",
        _PHASE,
    ),
    _rank(
        "step_last_completed_timestamp_seconds",
        "gauge",
        "Unix time at which the last step ended; 0 before the first step.",
    ),
    _rank("plan_divergences_total", "counter", "Page uses that differed from the next use in the plan."),
    _rank("plan_predicted_bytes_per_step", "gauge", "NVMe bytes per step predicted by the plan.", _OP),
    _rank(
        "plan_predicted_link_bytes_per_step",
        "gauge",
        "Bytes copied between host memory and the GPU per step, as predicted by the plan.",
        _LINK,
    ),
    _rank("optimizer_updated_parameters_total", "counter", "Parameters updated, summed over all steps."),
    _rank(
        "checkpoint_duration_seconds",
        "histogram",
        "Seconds from the start of a checkpoint until it is durable on disk.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    _rank(
        "checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix time of the last durable checkpoint; 0 before the first one.",
    ),
    _rank("training_loss", "gauge", "Last reported loss; 0 before the first report."),
    _rank(
        "training_learning_rate",
        "gauge",
        "Learning rate of the first optimizer param group in the last step; 0 before the first step.",
    ),
    _rank(
        "training_gradient_norm",
        "gauge",
        "Total gradient norm before the last clipping; 0 if gradients have not been clipped yet.",
    ),
    _rank("training_tokens_total", "counter", "Tokens this rank has trained on, as reported by the training loop."),
    _daemon("device_read_bytes_total", "counter", "Bytes read from a drive by all processes since boot.", _DEVICE),
    _daemon("device_written_bytes_total", "counter", "Bytes written to a drive by all processes since boot.", _DEVICE),
    _daemon(
        "device_read_operations_total",
        "counter",
        "Reads completed by a drive for all processes since boot, after merging and splitting by the kernel.",
        _DEVICE,
    ),
    _daemon(
        "device_write_operations_total",
        "counter",
        "Writes completed by a drive for all processes since boot, after merging and splitting by the kernel.",
        _DEVICE,
    ),
    _daemon(
        "device_read_seconds_total",
        "counter",
        "Total seconds spent by the reads of a drive. Divided by the number of reads, this is the mean latency.",
        _DEVICE,
    ),
    _daemon(
        "device_write_seconds_total",
        "counter",
        "Total seconds spent by the writes of a drive. Divided by the number of writes, this is the mean latency.",
        _DEVICE,
    ),
    _daemon(
        "device_busy_seconds_total",
        "counter",
        "Seconds during which a drive had at least one request. A drive that serves requests in parallel can be busy "
        "and still have bandwidth left.",
        _DEVICE,
    ),
    _daemon(
        "device_bandwidth_bytes_per_second",
        "gauge",
        "Measured bandwidth of a drive (docs/how-to/monitoring.md); `mixed` is half reads and half writes.",
        _DEVICE,
        Label(name="op", values=(*OPS, "mixed")),
    ),
    _daemon("device_capacity_bytes", "gauge", "Size of the file system on a drive, in bytes.", _DEVICE),
    _daemon("device_free_bytes", "gauge", "Bytes available to users on the file system of a drive.", _DEVICE),
    _daemon(
        "device_reserved_bytes",
        "gauge",
        "Bytes that ranks have reserved on a drive and not yet released.",
        _DEVICE,
    ),
    _daemon(
        "device_stale_runs",
        "gauge",
        "Runs without a live process in the configured folders of a drive (listed by `infinity status`).",
        _DEVICE,
    ),
    _daemon("device_stale_bytes", "gauge", "Bytes used by stale runs on a drive.", _DEVICE),
    _daemon(
        "device_wear_ratio",
        "gauge",
        "Fraction of its rated life that a drive has used, if the drive reports it.",
        _DEVICE,
    ),
    _daemon(
        "device_endurance_days",
        "gauge",
        "Days until a drive reaches its rated endurance, if configured, at the write rate of the last hour.",
        _DEVICE,
    ),
    _daemon(
        "rank_device_info",
        "info",
        "Block device that stores the data of a rank's device number; always 1.",
        _RUN,
        Label(name="rank"),
        _DEVICE,
        Label(name="block_device"),
    ),
    _daemon(
        "daemon_build_info",
        "info",
        "Versions of infinityd and Python; always 1.",
        Label(name="version"),
        Label(name="python_version"),
    ),
    _daemon("daemon_start_time_seconds", "gauge", "Unix time at which the daemon started."),
    _daemon(
        "daemon_ranks",
        "gauge",
        "Stats files found, by status: running ranks (live), ended ranks, dead ranks, and unreadable files (broken).",
        Label(name="status", values=PAGE_STATUSES),
    ),
    _daemon("daemon_collector_success", "gauge", "1 if the last run of the collector succeeded, else 0.", _COLLECTOR),
    _daemon("daemon_collector_duration_seconds", "gauge", "Duration of the last run of the collector.", _COLLECTOR),
)

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}


def error_reason(error: BaseException) -> str:
    """Return the value of the label ``reason`` of ``io_errors_total`` for an error."""
    if isinstance(error, CorruptPageError):
        return "corrupt"
    if isinstance(error, StallError | TimeoutError):
        return "timeout"
    code = error.errno if isinstance(error, StorageError | OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "enospc"
    return "eio" if code == errno.EIO else "other"


_SECTIONS = (
    (
        "rank",
        "Per rank",
        "Counted by each rank. Every metric also has the labels `run` (run id) and `rank`. `device` is the number of\n"
        "the configured path (`nvme0` is the first); `infinity_rank_device_info` maps it to the block device.",
    ),
    ("daemon", "Per node", "Served by `infinityd`. `device` is the kernel name of the block device."),
)


def markdown() -> str:
    """Return the table as the Markdown text of `docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m infinity.telemetry.metrics`; do not edit. Every label set of a rank's metrics",
        "exists from the start of the rank, with the value 0.",
        "",
    ]
    for server, title, text in _SECTIONS:
        lines += [f"## {title}", "", text, "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS if metric.server == server]
        lines.append("")
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    labels = "; ".join(
        f"`{label.name}`: {', '.join(label.values)}" if label.values else f"`{label.name}`" for label in metric.labels
    )
    kind = "gauge" if metric.kind == "info" else metric.kind
    return f"| `{PREFIX}{metric.name}` | {kind} | {labels} | {metric.doc} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
