"""Counting and serving: the one table of metrics, the stats page of a rank, the exporter.

The exporter (`infinity.telemetry.exporter`) is not imported here, so that counting needs no
prometheus-client.
"""

from infinity.telemetry.metrics import BY_NAME, METRICS, PREFIX, Label, Metric, error_reason
from infinity.telemetry.page import (
    HistogramValue,
    PageHeader,
    Snapshot,
    StatsPageError,
    page_files,
    page_name,
    read_page,
    read_pages,
)
from infinity.telemetry.stats import Counter, Gauge, Histogram, Stats

__all__ = [
    "BY_NAME",
    "METRICS",
    "PREFIX",
    "Counter",
    "Gauge",
    "Histogram",
    "HistogramValue",
    "Label",
    "Metric",
    "PageHeader",
    "Snapshot",
    "Stats",
    "StatsPageError",
    "error_reason",
    "page_files",
    "page_name",
    "read_page",
    "read_pages",
]
