"""Print the Grafana dashboard: `python docker/grafana/dashboard.py > docker/grafana/dashboards/infinity.json`.

Expressions use the metric names of the table (`infinity/telemetry/metrics.py`). This script adds the prefix and the
selection of instances, runs and ranks, and rejects names that are not in the table.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

from infinity.telemetry import METRICS, PREFIX

SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN: Final = {
    "daemon": 'instance=~"$instance"',
    "rank": 'instance=~"$instance",run=~"$run",rank=~"$rank"',
}
"""Selection by the variables of the dashboard, by the process that records a metric."""
COLUMNS, WIDTH, HEIGHT = 3, 8, 8

SERIES: Final = {
    metric.name + suffix: metric
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}
_NAME: Final = re.compile(rf"\b({'|'.join(sorted(SERIES, key=len, reverse=True))})\b(?:{{([^}}]*)}})?")


@dataclass(frozen=True)
class Panel:
    """A panel. `queries` are pairs of an expression and its legend; the legend of a table is not used."""

    title: str
    unit: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stacked", "stat", "table"] = "timeseries"


_RATE = "[$__rate_interval]"

ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Training": (
        Panel("Runs", "none", "Runs with stats files.", (("max by (name, run, user, world_size) (run_info)", ""),),
              "table"),
        Panel(
            "Nodes and ranks", "short",
            "Nodes and ranks with metrics. If there are fewer ranks than expected (with all instances and ranks "
            "selected), a node reports nothing.",
            (
                ("count by (run) (group by (run, instance) (run_info))", "{{run}} nodes"),
                ("count by (run) (group by (run, rank) (run_info))", "{{run}} ranks"),
                ('max by (run) (daemon_run_world_size{run=~"$run"})', "{{run}} ranks expected"),
            ),
        ),
        Panel("Loss", "none", "Last reported loss; mean over ranks.", (("avg by (run) (training_loss)", "{{run}}"),)),
        Panel(
            "Tokens per second", "short", "Sum over the ranks of a run.",
            ((f"sum by (run) (rate(training_tokens_total{_RATE}))", "{{run}}"),),
        ),
        Panel(
            "Step time", "s", "Mean and 95th percentile over the selected ranks.",
            (
                (f"sum by (run) (rate(step_duration_seconds_sum{_RATE})) / "
                 f"sum by (run) (rate(step_duration_seconds_count{_RATE}))", "{{run}} mean"),
                (f"histogram_quantile(0.95, sum by (run, le) (rate(step_duration_seconds_bucket{_RATE})))",
                 "{{run}} p95"),
            ),
        ),
        Panel(
            "Gradient norm", "none", "Norm before clipping; 0 if optimizer.clip_grad_norm_ is not called.",
            (("avg by (run) (training_gradient_norm)", "{{run}}"),),
        ),
        Panel(
            "Learning rate", "none", "Learning rate of the first optimizer param group.",
            (("avg by (run) (training_learning_rate)", "{{run}}"),),
        ),
        Panel("Steps", "short", "Steps since the start of the process.", (("max by (run) (steps_total)", "{{run}}"),)),
        Panel(
            "Remaining time", "s", "At the mean step time of the last five minutes, if the loop reports its last step.",
            (("(max by (run) (training_target_steps > 0) - max by (run) (steps_total)) / "
              "max by (run) (rate(steps_total[5m]))", "{{run}}"),), "stat",
        ),
        Panel(
            "Parameters updated", "ops", "Updates per second; sum over the ranks of a run.",
            ((f"sum by (run) (rate(optimizer_updated_parameters_total{_RATE}))", "{{run}}"),),
        ),
        Panel(
            "Time since the last step", "s", "A large value means that the run is not making progress.",
            (("time() - max by (run) (step_last_completed_timestamp_seconds > 0)", "{{run}}"),), "stat",
        ),
    ),
    "Step time": (
        Panel(
            "Step time by part", "s", "Mean over the selected ranks.",
            ((f"sum by (part) (rate(step_part_seconds_total{_RATE})) / on () group_left () "
              f"sum(rate(steps_total{_RATE}))", "{{part}}"),), "stacked",
        ),
        Panel(
            "Slowest rank", "s",
            "Time per step outside collectives, in which the other ranks wait. On a GPU, such waits count as compute.",
            ((f'topk by (run) (1, sum by (run, instance, rank) (rate(step_part_seconds_total{{part!="collective"}}'
              f"{_RATE})) / sum by (run, instance, rank) (rate(steps_total{_RATE})) > 0)",
              "{{run}}: rank {{rank}} on {{instance}}"),), "stat",
        ),
        Panel(
            "Time by phase", "percentunit", "Includes checkpoints and the time between steps; mean over ranks.",
            ((f"avg by (phase) (rate(step_phase_seconds_total{_RATE}))", "{{phase}}"),), "stacked",
        ),
        Panel(
            "Fetches by result", "percentunit",
            "Fraction of page requests that were ready (hit), still being read (late), or not being read (miss).",
            ((f"sum by (result) (rate(prefetch_fetches_total{_RATE})) / on () group_left () "
              f"sum(rate(prefetch_fetches_total{_RATE}))", "{{result}}"),), "stacked",
        ),
        Panel(
            "Stalls by cause", "percentunit", "Fraction of time that the training thread was stalled on storage.",
            ((f"avg by (run, cause) (sum by (run, rank, cause) (rate(stall_seconds_total{_RATE})))",
              "{{run}} {{cause}}"),),
        ),
        Panel(
            "Stalls by phase", "percentunit", "Fraction of stalled time, by phase of the step.",
            ((f"avg by (run, phase) (sum by (run, rank, phase) (rate(stall_seconds_total{_RATE})))",
              "{{run}} {{phase}}"),),
        ),
        Panel(
            "Waiting for a cache slot", "percentunit", "Fraction of time; mean over ranks.",
            ((f"avg by (run) (rate(cache_slot_wait_seconds_total{_RATE}))", "{{run}}"),),
        ),
    ),
    "NVMe traffic of the ranks": (
        Panel(
            "By operation and role", "Bps", "Bytes transferred by all selected ranks.",
            ((f"sum by (op, state) (rate(io_bytes_total{_RATE}))", "{{op}} {{state}}"),),
        ),
        Panel(
            "By run and drive", "Bps", "Bytes transferred by each run on each drive.",
            ((f"sum by (run, instance, block_device, op) (rate(io_bytes_total{_RATE}) * "
              "on (instance, run, rank, device) group_left (block_device) rank_device_info)",
              "{{run}} {{instance}} {{block_device}} {{op}}"),),
        ),
        Panel(
            "Bytes per step: predicted and measured", "bytes",
            "All selected ranks. Predicted reads equal measured reads plus spared reads.",
            (
                ("sum by (run, op) (plan_predicted_bytes_per_step)", "{{run}} {{op}} predicted"),
                (f"sum by (run, op) (rate(io_bytes_total{_RATE})) / on (run) group_left () "
                 f"avg by (run) (rate(steps_total{_RATE}))", "{{run}} {{op}} measured"),
                (f"sum by (run) (rate(prefetch_spared_bytes_total{_RATE})) / avg by (run) (rate(steps_total{_RATE}))",
                 "{{run}} read spared"),
            ),
        ),
        Panel(
            "Rank bandwidth during transfers", "Bps", "Bytes divided by the time with at least one page in transfer.",
            ((f"sum by (run) (rate(io_bytes_total{_RATE})) / sum by (run) (rate(transfer_seconds_total{_RATE}))",
              "{{run}}"),),
        ),
        Panel(
            "Request duration", "s", "Time from submission to completion: median and 99th percentile.",
            (
                (f"histogram_quantile(0.5, sum by (op, le) (rate(io_request_duration_seconds_bucket{_RATE})))",
                 "{{op}} p50"),
                (f"histogram_quantile(0.99, sum by (op, le) (rate(io_request_duration_seconds_bucket{_RATE})))",
                 "{{op}} p99"),
            ),
        ),
        Panel("Requests in flight", "short", "Page transfers in flight at the end of a step.",
              (("sum by (run, op) (io_inflight_requests)", "{{run}} {{op}}"),)),
        Panel(
            "Bytes written per token", "bytes", "NVMe writes of all ranks divided by trained tokens.",
            ((f'sum by (run) (rate(io_bytes_total{{op="write"}}{_RATE})) / '
              f"sum by (run) (rate(training_tokens_total{_RATE}))", "{{run}}"),),
        ),
        Panel(
            "Weights gathered", "Bps", "Weights copied into FSDP2's buffers by all ranks of a run.",
            ((f"sum by (run) (rate(gather_copied_bytes_total{_RATE}))", "{{run}}"),),
        ),
        Panel(
            "Host-device bytes per step: predicted and measured", "bytes",
            "Copies between host memory and the GPU in both directions; no data if the model runs on the CPU.",
            (
                ("sum by (run, direction) (plan_predicted_link_bytes_per_step)", "{{run}} {{direction}} predicted"),
                (f"sum by (run, direction) (rate(link_bytes_total{_RATE})) / on (run) group_left () "
                 f"avg by (run) (rate(steps_total{_RATE}))", "{{run}} {{direction}} measured"),
            ),
        ),
        Panel(
            "Errors, retries, plan divergences, skipped steps", "short",
            "Increase per interval; all values should be 0.",
            (
                (f"sum by (run, op, reason) (increase(io_errors_total{_RATE}))", "{{run}} {{op}} {{reason}}"),
                (f"sum by (run, op) (increase(io_retries_total{_RATE}))", "{{run}} {{op}} retries"),
                (f"sum by (run) (increase(plan_divergences_total{_RATE}))", "{{run}} divergences"),
                (f"max by (run) (increase(steps_skipped_total{_RATE}))", "{{run}} skipped"),
            ),
        ),
    ),
    "Memory and checkpoints": (
        Panel("Host cache slots", "short", "Host cache slots by status.",
              (("sum by (status) (cache_slots)", "{{status}}"),), "stacked"),
        Panel(
            "State by tier", "bytes", "Bytes of state held in each tier, and its capacity.",
            (
                ("sum by (run, tier, state) (tier_used_bytes)", "{{run}} {{tier}} {{state}}"),
                ("sum by (run, tier) (tier_capacity_bytes)", "{{run}} {{tier}} capacity"),
            ),
        ),
        Panel(
            "Checkpoint duration", "s", "Time until a checkpoint is durable, over the last hour.",
            (
                ("sum by (run) (increase(checkpoint_duration_seconds_sum[1h])) / "
                 "sum by (run) (increase(checkpoint_duration_seconds_count[1h]))", "{{run}} mean"),
                ("histogram_quantile(0.95, sum by (run, le) (increase(checkpoint_duration_seconds_bucket[1h])))",
                 "{{run}} p95"),
            ),
        ),
        Panel(
            "Age of the last checkpoint", "s", "Training time that a crash would lose; for the oldest rank.",
            (("time() - min by (run) (checkpoint_last_success_timestamp_seconds > 0)", "{{run}}"),), "stat",
        ),
    ),
    "Drives": (
        Panel(
            "Traffic", "Bps", "Traffic of all processes, from kernel counters, and the profiled bandwidth.",
            (
                (f"sum by (instance, device) (rate(device_read_bytes_total{_RATE}))", "{{instance}} {{device}} read"),
                (f"sum by (instance, device) (rate(device_written_bytes_total{_RATE}))",
                 "{{instance}} {{device}} written"),
                ("max by (instance, device, op) (device_bandwidth_bytes_per_second)",
                 "{{instance}} {{device}} {{op}} profiled"),
            ),
        ),
        Panel(
            "Latency", "s", "Mean latency of the reads and writes of all processes, from kernel counters.",
            (
                (f"sum by (instance, device) (rate(device_read_seconds_total{_RATE})) / "
                 f"sum by (instance, device) (rate(device_read_operations_total{_RATE}))",
                 "{{instance}} {{device}} read"),
                (f"sum by (instance, device) (rate(device_write_seconds_total{_RATE})) / "
                 f"sum by (instance, device) (rate(device_write_operations_total{_RATE}))",
                 "{{instance}} {{device}} write"),
            ),
        ),
        Panel(
            "Busy", "percentunit", "Fraction of time during which a drive had at least one request.",
            ((f"max by (instance, device) (rate(device_busy_seconds_total{_RATE}))", "{{instance}} {{device}}"),),
        ),
        Panel(
            "Share of runs", "percentunit", "Fraction of a drive's traffic that is caused by runs of this node.",
            ((f'sum by (instance, device) (label_replace(rate(io_bytes_total{_RATE}) * '
              'on (instance, run, rank, device) group_left (block_device) rank_device_info, '
              '"device", "$1", "block_device", "(.*)")) / on (instance, device) ('
              f"sum by (instance, device) (rate(device_read_bytes_total{_RATE})) + "
              f"sum by (instance, device) (rate(device_written_bytes_total{_RATE})))", "{{instance}} {{device}}"),),
        ),
        Panel(
            "Space", "bytes", "Free space, space used by stale runs, reserved space, and capacity.",
            (
                ("max by (instance, device) (device_free_bytes)", "{{instance}} {{device}} free"),
                ("max by (instance, device) (device_stale_bytes)", "{{instance}} {{device}} stale"),
                ("max by (instance, device) (device_reserved_bytes)", "{{instance}} {{device}} reserved"),
                ("max by (instance, device) (device_capacity_bytes)", "{{instance}} {{device}} capacity"),
            ),
        ),
        Panel("Stale runs", "short", "Runs without a live process in configured folders (see `infinity status`).",
              (("max by (instance, device) (device_stale_runs)", "{{instance}} {{device}}"),), "stat"),
        Panel("Wear", "percentunit", "Fraction of its rated life that a drive has used, if the drive reports it.",
              (("max by (instance, device) (device_wear_ratio)", "{{instance}} {{device}}"),), "stat"),
        Panel("Days left", "d", "Days until the rated endurance, if configured, at the write rate of the last hour.",
              (("min by (instance, device) (device_endurance_days)", "{{instance}} {{device}}"),), "stat"),
    ),
    "Daemon": (
        Panel("Ranks", "short", "Stats files found by the daemon, by status.",
              (("sum by (instance, status) (daemon_ranks)", "{{instance}} {{status}}"),), "stat"),
        Panel("Collectors", "none", "1 if the last run of the collector succeeded.",
              (("min by (instance, collector) (daemon_collector_success)", "{{instance}} {{collector}}"),), "stat"),
        Panel("Collector duration", "s", "Duration of the last run.",
              (("max by (instance, collector) (daemon_collector_duration_seconds)", "{{instance}} {{collector}}"),)),
        Panel("Uptime", "s", "Time since the start of the daemon.",
              (("time() - daemon_start_time_seconds", "{{instance}}"),), "stat"),
        Panel("Versions of ranks", "none", "Versions of infinity and torch, and the I/O engine.",
              (("count by (run, version, torch_version, io_engine) (build_info)", ""),), "table"),
        Panel("Versions of daemons", "none", "Versions of infinity and Python.",
              (("max by (instance, version, python_version) (daemon_build_info)", ""),), "table"),
    ),
}  # fmt: skip


def expand(expression: str) -> str:
    """Return a PromQL expression with full metric names and the selection of the dashboard.

    Raises:
        ValueError: if the expression has no metric of the table, or one that is not in the table.
    """
    if not _NAME.search(expression):
        raise ValueError(f"{expression}: contains no metric of the table")

    def full(match: re.Match[str]) -> str:
        name, given = match.groups()
        return f"{PREFIX}{name}{{{','.join(filter(None, (CHOSEN[SERIES[name].server], given)))}}}"

    left = re.findall(r"\b\w+(?:_total|_seconds|_bytes|_info|_sum|_count|_bucket)\b", _NAME.sub("", expression))
    if left:
        raise ValueError(f"{expression}: {left[0]} is not in the table of metrics")
    return _NAME.sub(full, expression)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if panel.kind == "stacked":
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    lines = panel.kind in ("timeseries", "stacked")
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if not lines:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "textMode": "value_and_name"}
    found: dict[str, Any] = {
        "id": number,
        "type": "timeseries" if lines else panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **({"custom": custom} if lines else {})},
            "overrides": [],
        },
        "options": {"showHeader": True} if table else options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expand(expression),
                **({"format": "table", "instant": True} if table else {"legendFormat": legend}),
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
    if table:
        hidden = {"excludeByName": {"Time": True, "Value": True}}
        found["transformations"] = [{"id": "organize", "options": hidden}]
    return found


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": top}
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        for index, panel in enumerate(panels):
            row, column = divmod(index, COLUMNS)
            place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": top + 1 + row * HEIGHT}
            found.append(_panel(panel, len(found) + 1, place))
        top += 1 + HEIGHT * -(-len(panels) // COLUMNS)
    return found


def _variable(name: str, label: str, query: str, pattern: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "regex": pattern,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 3,
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "uid": "infinity",
        "title": "infinity",
        "tags": ["infinity"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("instance", "Instance", f"label_values({PREFIX}daemon_build_info, instance)"),
                _variable(
                    "run",
                    "Run",
                    f'query_result(label_join(max by (name, run) ({PREFIX}run_info{{instance=~"$instance"}}), '
                    '"shown", " ", "name", "run"))',
                    '/run="(?<value>[^"]+)".*shown="(?<text>[^"]+)"/',
                ),
                _variable("rank", "Rank", f'label_values({PREFIX}run_info{{instance=~"$instance",run=~"$run"}}, rank)'),
            ]
        },
        "panels": _panels(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
