"""The one table of metrics.

The layout of the stats page, the exporter and `docs/metrics.md` are all made from `METRICS`; a metric that
is not here cannot be counted, served or documented. Conventions: base FSDP modules in the plural, ``_total`` on
counters, no rates and no percentages, labels only from closed sets. Names are written here without the
``infinity_`` prefix, which the exporter adds.

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

    `values` is empty where the set is closed but known only on the machine: the devices of a page, the
    drives and collectors of a daemon, the texts of an info metric.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the table.

    `name` carries the FSDP module; `buckets` are the upper bounds of a histogram, in the FSDP module of the name,
    without
    the last (infinite) one. `server` says who counts it: a rank on its stats page, or the daemon. The
    exporter puts the labels ``run`` and ``rank`` on every metric of a rank.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    server: Server = "rank"

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in the order of the table, without ``run`` and ``rank``."""
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
"""Parts in which the training thread stands still."""
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
        "Versions a rank runs with and the I/O engine it chose; always 1.",
        Label(name="version"),
        Label(name="torch_version"),
        Label(name="io_engine"),
    ),
    _rank(
        "run_info",
        "info",
        "Identity of the run a rank belongs to; always 1.",
        Label(name="world_size"),
    ),
    _rank(
        "io_bytes_total",
        "counter",
        "Bytes moved between the host cache and NVMe, by the role of the page and the configured path.",
        _OP,
        _ROLE,
        _DEVICE,
    ),
    _rank(
        "io_request_duration_seconds",
        "histogram",
        "Seconds from submission to completion of one request.",
        _OP,
        buckets=_REQUEST_BUCKETS,
    ),
    _rank(
        "io_errors_total",
        "counter",
        "Transfers that failed for good.",
        _OP,
        Label(name="reason", values=ERROR_REASONS),
    ),
    _rank(
        "io_retries_total",
        "counter",
        "Requests submitted again: the rest of a short or interrupted transfer, or all of one that failed.",
        _OP,
    ),
    _rank("io_inflight_requests", "gauge", "Requests submitted and not yet completed.", _OP),
    _rank("tier_used_bytes", "gauge", "Bytes of training state held in a tier.", _TIER, _ROLE),
    _rank("tier_capacity_bytes", "gauge", "Bytes a tier may hold for this rank.", _TIER),
    _rank(
        "gather_copied_bytes_total",
        "counter",
        "Bytes of weights copied into the buffers of FSDP2.",
    ),
    _rank(
        "link_bytes_total",
        "counter",
        "Bytes copied between host memory and the device that computes; none where that is the CPU.",
        _LINK,
    ),
    _rank("transfer_seconds_total", "counter", "Seconds in which pages were on their way from or to NVMe."),
    _rank(
        "pool_frames",
        "gauge",
        "Cache slots of the host cache by what they are used for.",
        Label(name="status", values=CACHE_SLOT_STATUSES),
    ),
    _rank("pool_wait_seconds_total", "counter", "Seconds the pager waited for a free cache slot."),
    _rank(
        "prefetch_fetches_total",
        "counter",
        "Pages asked for: ready in time (hit), still being read (late) or not begun (miss).",
        Label(name="result", values=FETCH_RESULTS),
    ),
    _rank(
        "prefetch_spared_bytes_total",
        "counter",
        "Bytes that the plan reads and nobody had to: the page came back while it was still being written.",
    ),
    _rank(
        "stall_seconds_total",
        "counter",
        "Seconds the training thread stood still, by phase and by cause.",
        _PHASE,
        _CAUSE,
    ),
    _rank("steps_total", "counter", "Optimizer steps completed."),
    _rank("steps_skipped_total", "counter", "Of these, steps without an update: the gradients' norm was not finite."),
    _rank(
        "step_duration_seconds",
        "histogram",
        "Seconds of one optimizer step, from end to end.",
        buckets=_STEP_BUCKETS,
    ),
    _rank(
        "step_part_seconds_total",
        "counter",
        "Seconds of all completed steps by what the training thread did (docs/architecture.md); the parts add up to "
        "the sum of `infinity_step_duration_seconds`.",
        _PART,
    ),
    _rank(
        "step_phase_seconds_total",
        "counter",
        "Seconds by phase, checkpoints and the time between steps included.",
        _PHASE,
    ),
    _rank(
        "step_last_completed_timestamp_seconds",
        "gauge",
        "Unix time at which the last step ended; 0 before.",
    ),
    _rank("plan_divergences_total", "counter", "Page uses that were not the next ones in the plan."),
    _rank("plan_predicted_bytes_per_step", "gauge", "NVMe bytes the plan predicts for one step.", _OP),
    _rank(
        "plan_predicted_link_bytes_per_step",
        "gauge",
        "Bytes the plan predicts to be copied between host memory and the device in one step.",
        _LINK,
    ),
    _rank("optimizer_updated_parameters_total", "counter", "Parameters updated, summed over the steps."),
    _rank(
        "checkpoint_duration_seconds",
        "histogram",
        "Seconds from the start of a checkpoint until it is durable.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    _rank("checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last durable checkpoint; 0 before."),
    _rank("training_loss", "gauge", "Loss that was reported last; 0 before."),
    _rank("training_learning_rate", "gauge", "Learning rate of the first param group in the last step; 0 before."),
    _rank("training_gradient_norm", "gauge", "Norm of all gradients when they were clipped last, before it; 0 before."),
    _rank("training_tokens_total", "counter", "Tokens that this rank has trained on, as reported."),
    _daemon("device_read_bytes_total", "counter", "Bytes read from a drive by everybody, since boot.", _DEVICE),
    _daemon("device_written_bytes_total", "counter", "Bytes written to a drive by everybody, since boot.", _DEVICE),
    _daemon(
        "device_read_operations_total",
        "counter",
        "Reads that a drive completed for everybody, since boot, as the kernel merges and splits them.",
        _DEVICE,
    ),
    _daemon(
        "device_write_operations_total",
        "counter",
        "Writes that a drive completed for everybody, since boot, as the kernel merges and splits them.",
        _DEVICE,
    ),
    _daemon(
        "device_read_seconds_total",
        "counter",
        "Seconds that the reads of a drive took, added up; over its reads: their mean latency.",
        _DEVICE,
    ),
    _daemon(
        "device_write_seconds_total",
        "counter",
        "Seconds that the writes of a drive took, added up; over its writes: their mean latency.",
        _DEVICE,
    ),
    _daemon(
        "device_busy_seconds_total",
        "counter",
        "Seconds in which a drive had something to do; a drive that does much at once may be busy and still be able to "
        "do more.",
        _DEVICE,
    ),
    _daemon(
        "device_bandwidth_bytes_per_second",
        "gauge",
        "What a drive can do, as it was measured (docs/monitoring.md); `mixed` is half reads and half writes.",
        _DEVICE,
        Label(name="op", values=(*OPS, "mixed")),
    ),
    _daemon("device_capacity_bytes", "gauge", "Size of the file system on a drive.", _DEVICE),
    _daemon("device_free_bytes", "gauge", "Bytes of the file system on a drive that are free to users.", _DEVICE),
    _daemon(
        "device_reserved_bytes",
        "gauge",
        "Bytes that ranks have reserved on a drive and not released.",
        _DEVICE,
    ),
    _daemon(
        "device_stale_runs",
        "gauge",
        "Runs in the configured folders of a drive that nobody holds any more (`infinity status`).",
        _DEVICE,
    ),
    _daemon("device_stale_bytes", "gauge", "Bytes that they take on the drive.", _DEVICE),
    _daemon(
        "device_wear_ratio",
        "gauge",
        "Share of its rated life that a drive has used, where it tells.",
        _DEVICE,
    ),
    _daemon(
        "device_endurance_days",
        "gauge",
        "Days until a drive has been written what it is rated for, at the rate of the last hour; where that is set.",
        _DEVICE,
    ),
    _daemon(
        "rank_device_info",
        "info",
        "Which drive is behind the device number of a rank; always 1.",
        _RUN,
        Label(name="rank"),
        _DEVICE,
        Label(name="block_device"),
    ),
    _daemon(
        "daemon_build_info",
        "info",
        "Versions the daemon runs with; always 1.",
        Label(name="version"),
        Label(name="python_version"),
    ),
    _daemon("daemon_start_time_seconds", "gauge", "Unix time at which the daemon started."),
    _daemon(
        "daemon_ranks",
        "gauge",
        "Stats pages found: of ranks that run (live), ended in order or died, and files that are none (broken).",
        Label(name="status", values=PAGE_STATUSES),
    ),
    _daemon("daemon_collector_success", "gauge", "1 if the collector's last run succeeded, else 0.", _COLLECTOR),
    _daemon("daemon_collector_duration_seconds", "gauge", "Seconds of the collector's last run.", _COLLECTOR),
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
        "Counted by each rank, all with the labels `run` (the id of the run) and `rank` as well. `device` is the\n"
        "number of the configured path (`nvme0` is the first one); `infinity_rank_device_info` tells the drive\n"
        "behind it.",
    ),
    ("daemon", "Per node", "Served by `infinityd`. `device` is the kernel's name of the block device."),
)


def markdown() -> str:
    """Return the table as the Markdown text of `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m infinity.telemetry.metrics`; do not edit. Every label set of a metric",
        "that a rank counts exists from the start at 0.",
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
