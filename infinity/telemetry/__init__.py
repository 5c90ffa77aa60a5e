"""Metrics: the table of all metrics, the stats file of a rank, and the exporter.

The exporter (`infinity.telemetry.exporter`) is not imported here, so that counting does not depend on
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
