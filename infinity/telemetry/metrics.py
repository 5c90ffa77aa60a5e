"""Definitions of all metrics.

The layout of the stats file, the exported metrics and `docs/reference/metrics.md` are generated from the table
`METRICS`, so a metric must be in the table to be recorded, exported and documented. Conventions: units are
base units in the plural, names of counters end with ``_total``, no metric is a rate or a percentage, and each label has
a fixed set of values. Names in the table omit the prefix ``infinity_``, which the exporter adds.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final, Literal

from infinity.errors import CorruptPageError, StallError, StorageError

PREFIX: Final = "infinity_"

Kind = Literal["counter", "gauge", "histogram", "info"]
Server = Literal["rank", "daemon"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """Label of a metric.

    `values` lists all values of the label. It is empty if the values depend on the machine, such as the devices in a
    stats file, the drives of a node, or the texts of an info metric.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Definition of a metric.

    The name of a metric includes its unit. `buckets` holds the finite upper bounds of a histogram's buckets in that
    unit; the last bucket is unbounded. `server` is the process that records the metric: a rank, in its stats file, or
    the daemon. The exporter adds the labels ``run`` and ``rank`` to every metric recorded by a rank.
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
"""Parts of a step in which the training thread is stalled on storage."""
FETCH_RESULTS: Final = ("hit", "late", "miss")
CACHE_SLOT_STATUSES: Final = ("free", "resident", "streaming", "writing")
ERROR_REASONS: Final = ("eio", "enospc", "corrupt", "timeout", "other")
STATS_FILE_STATUSES: Final = ("live", "ended", "dead", "broken")
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
_NAME = Label(name="name")
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
        "Versions of infinity and PyTorch, and I/O engine used by the rank; the value is always 1.",
        Label(name="version"),
        Label(name="torch_version"),
        Label(name="io_engine"),
    ),
    _rank(
        "run_info",
        "info",
        "World size, name (`run.name`) and user of the run; the value is always 1.",
        Label(name="world_size"),
        Label(name="name"),
        Label(name="user"),
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
        "Duration of an I/O request from submission to completion, in seconds.",
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
        "I/O requests resubmitted after a failure, or to complete a short or interrupted transfer.",
        _OP,
    ),
    _rank("io_inflight_requests", "gauge", "Page transfers in flight at the end of the last step.", _OP),
    _rank("tier_used_bytes", "gauge", "Bytes of training state stored in a tier.", _TIER, _ROLE),
    _rank("tier_capacity_bytes", "gauge", "Capacity of a tier for this rank, in bytes.", _TIER),
    _rank("gather_copied_bytes_total", "counter", "Bytes of weights copied into FSDP2's all-gather buffers."),
    _rank(
        "link_bytes_total",
        "counter",
        "Bytes copied between host memory and the GPU; 0 when training on the CPU.",
        _LINK,
    ),
    _rank("transfer_seconds_total", "counter", "Seconds during which at least one page transfer was in flight."),
    _rank(
        "cache_slots",
        "gauge",
        "Host cache slots by status, at the end of the last step.",
        Label(name="status", values=CACHE_SLOT_STATUSES),
    ),
    _rank(
        "cache_slot_wait_seconds_total",
        "counter",
        "Seconds that the training thread waited for a free host cache slot.",
    ),
    _rank(
        "prefetch_fetches_total",
        "counter",
        "Page requests by result: the page was ready (`hit`), being read (`late`), or not yet being read (`miss`).",
        Label(name="result", values=FETCH_RESULTS),
    ),
    _rank(
        "prefetch_spared_bytes_total",
        "counter",
        "Bytes of planned reads that were unnecessary because the page was still in memory while it was being written.",
    ),
    _rank(
        "stall_seconds_total",
        "counter",
        "Seconds that the training thread was stalled on storage, by phase and cause.",
        _PHASE,
        _CAUSE,
    ),
    _rank("steps_total", "counter", "Optimizer steps completed."),
    _rank(
        "steps_skipped_total",
        "counter",
        "Completed steps whose update was skipped because the gradient norm was not finite.",
    ),
    _rank("step_duration_seconds", "histogram", "Duration of an optimizer step, in seconds.", buckets=_STEP_BUCKETS),
    _rank(
        "step_part_seconds_total",
        "counter",
        "Seconds of completed steps, by activity of the training thread. The parts add up to the sum of "
        "`infinity_step_duration_seconds` (see docs/explanation/threads-and-time.md).",
        _PART,
    ),
    _rank(
        "step_phase_seconds_total",
        "counter",
        "Seconds spent in each phase, including checkpoints and the time between steps.",
        _PHASE,
    ),
    _rank(
        "step_last_completed_timestamp_seconds",
        "gauge",
        "Unix time at which the last step was completed; 0 before the first one.",
    ),
    _rank("plan_divergences_total", "counter", "Page uses that differed from the use predicted by the plan."),
    _rank("plan_predicted_bytes_per_step", "gauge", "NVMe bytes per step predicted by the plan.", _OP),
    _rank(
        "plan_predicted_link_bytes_per_step",
        "gauge",
        "Bytes copied between host memory and the GPU per step, predicted by the plan.",
        _LINK,
    ),
    _rank("optimizer_updated_parameters_total", "counter", "Parameter updates, summed over all steps."),
    _rank(
        "checkpoint_duration_seconds",
        "histogram",
        "Duration of a checkpoint from its start until it is durable, in seconds.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    _rank(
        "checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which the last checkpoint became durable; 0 before the first one.",
    ),
    _rank("training_loss", "gauge", "Loss most recently reported by the training loop; 0 before the first report."),
    _rank(
        "training_learning_rate",
        "gauge",
        "Learning rate of the first parameter group of the optimizer in the last step; 0 before the first step.",
    ),
    _rank(
        "training_gradient_norm",
        "gauge",
        "Total gradient norm before the most recent gradient clipping; 0 before the first one.",
    ),
    _rank("training_tokens_total", "counter", "Tokens processed by this rank, as reported by the training loop."),
    _rank(
        "training_target_steps",
        "gauge",
        "Value of `infinity_steps_total` at which training will end, if the training loop reports it; 0 otherwise.",
    ),
    _daemon("device_read_bytes_total", "counter", "Bytes read from a drive by all processes since boot.", _DEVICE),
    _daemon("device_written_bytes_total", "counter", "Bytes written to a drive by all processes since boot.", _DEVICE),
    _daemon(
        "device_read_operations_total",
        "counter",
        "Read requests of all processes completed by a drive since boot, after merging and splitting by Linux.",
        _DEVICE,
    ),
    _daemon(
        "device_write_operations_total",
        "counter",
        "Write requests of all processes completed by a drive since boot, after merging and splitting by Linux.",
        _DEVICE,
    ),
    _daemon(
        "device_read_seconds_total",
        "counter",
        "Sum of the durations of all reads from a drive, in seconds. Divided by the number of reads, it is the mean "
        "latency.",
        _DEVICE,
    ),
    _daemon(
        "device_write_seconds_total",
        "counter",
        "Sum of the durations of all writes to a drive, in seconds. Divided by the number of writes, it is the mean "
        "latency.",
        _DEVICE,
    ),
    _daemon(
        "device_busy_seconds_total",
        "counter",
        "Seconds during which a drive was processing at least one request. A drive that processes requests in parallel "
        "may have unused bandwidth even if it is always busy.",
        _DEVICE,
    ),
    _daemon(
        "device_bandwidth_bytes_per_second",
        "gauge",
        "Measured bandwidth of a drive (see docs/how-to/monitoring.md); `mixed` is half reads and half writes.",
        _DEVICE,
        Label(name="op", values=(*OPS, "mixed")),
    ),
    _daemon("device_capacity_bytes", "gauge", "Capacity of the file systems on a drive, in bytes.", _DEVICE),
    _daemon(
        "device_free_bytes", "gauge", "Bytes available to unprivileged users on the file systems of a drive.", _DEVICE
    ),
    _daemon("device_reserved_bytes", "gauge", "Bytes on a drive that are currently reserved by ranks.", _DEVICE),
    _daemon(
        "device_stale_runs",
        "gauge",
        "Stale runs (interrupted and without a live process) in the configured folders on a drive and their "
        "subfolders; `infinity status` lists them.",
        _DEVICE,
    ),
    _daemon("device_stale_bytes", "gauge", "Bytes used by stale runs on a drive.", _DEVICE),
    _daemon(
        "device_wear_ratio",
        "gauge",
        "Fraction of a drive's rated life that has been used, if the drive reports it.",
        _DEVICE,
    ),
    _daemon(
        "device_endurance_days",
        "gauge",
        "Days until a drive reaches its rated endurance (if configured) at the write rate of the last hour.",
        _DEVICE,
    ),
    _daemon(
        "copy_received_bytes_total",
        "counter",
        "Bytes of pages of other nodes that the daemon has received for copies of a rank on this node (`run.copies`). "
        "Pages that have not changed are not sent.",
        _RUN,
        Label(name="rank"),
    ),
    _daemon(
        "copy_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which a rank on this node last had a complete copy of checkpoints of other nodes; 0 if never.",
        _RUN,
        Label(name="rank"),
    ),
    _daemon(
        "copy_failed",
        "gauge",
        "1 if the last copy of checkpoints of other nodes for a rank on this node failed, 0 otherwise.",
        _RUN,
        Label(name="rank"),
    ),
    _daemon(
        "rank_device_info",
        "info",
        "Mapping from a rank's `device` label to the block device that stores its data; the value is always 1.",
        _RUN,
        Label(name="rank"),
        _DEVICE,
        Label(name="block_device"),
    ),
    _daemon(
        "daemon_build_info",
        "info",
        "Versions of infinityd and Python; the value is always 1.",
        Label(name="version"),
        Label(name="python_version"),
    ),
    _daemon("daemon_start_time_seconds", "gauge", "Unix time at which the daemon started."),
    _daemon(
        "daemon_ranks",
        "gauge",
        "Stats files by status: the rank is running (`live`), has ended normally (`ended`) or died (`dead`), or the "
        "file is unreadable (`broken`).",
        Label(name="status", values=STATS_FILE_STATUSES),
    ),
    _daemon(
        "daemon_dead_ranks",
        "gauge",
        "Ranks of a run that died on this node, until the run is resumed or removed.",
        _RUN,
        _NAME,
    ),
    _daemon(
        "daemon_run_world_size",
        "gauge",
        "Number of ranks of a run that has live ranks on this node, including its ranks on other nodes.",
        _RUN,
    ),
    _daemon("daemon_collector_success", "gauge", "1 if the collector's last run succeeded, 0 otherwise.", _COLLECTOR),
    _daemon(
        "daemon_collector_duration_seconds", "gauge", "Duration of the collector's last run, in seconds.", _COLLECTOR
    ),
)

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}


def error_reason(error: BaseException) -> str:
    """Return the value of the ``reason`` label of ``io_errors_total`` for an error."""
    if isinstance(error, CorruptPageError):
        return "corrupt"
    if isinstance(error, StallError | TimeoutError):
        return "timeout"
    code = error.errno if isinstance(error, StorageError | OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "enospc"
    return "eio" if code == errno.EIO else "other"
