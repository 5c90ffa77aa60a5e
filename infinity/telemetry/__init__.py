"""Metrics of a run: their definitions, the stats file that each rank writes, and the Prometheus exporter.

This package does not import the exporter (`infinity.telemetry.exporter`), so ranks can record metrics without
prometheus-client.
"""

from infinity.telemetry.metrics import BY_NAME, METRICS, PREFIX, Metric, error_reason
from infinity.telemetry.stats import Stats
from infinity.telemetry.stats_file import Snapshot, StatsFileError, find_stats_files, read_stats_file

__all__ = [
    "BY_NAME",
    "METRICS",
    "PREFIX",
    "Metric",
    "Snapshot",
    "Stats",
    "StatsFileError",
    "error_reason",
    "find_stats_files",
    "read_stats_file",
]
