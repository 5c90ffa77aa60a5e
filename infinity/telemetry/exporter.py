"""Prometheus exporter for stats files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from wsgiref.types import StartResponse, WSGIEnvironment

from infinity.optional_dependencies import needs
from infinity.telemetry.http_server import LOOPBACK, HTTPServer, Route, answer_json, serve_routes
from infinity.telemetry.metrics import METRICS, PREFIX, Metric
from infinity.telemetry.stats_cells import label_sets
from infinity.telemetry.stats_file import Snapshot
from infinity.untrusted_files import user_name

with needs("daemon", "serving metrics"):
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector

Source = Callable[[], Iterable[Snapshot]]
Buckets = tuple[list[tuple[str, float]], float]


class StatsCollector(Collector):
    """Convert snapshots of stats files to Prometheus metric families.

    Each metric name gets the prefix, and each sample gets the labels ``run`` and ``rank``. Each rank of a run has one
    stats file (`read_stats_file` checks its name), so no two samples belong to the same time series.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Family]:
        """Yield one family per rank metric, with one sample per stats file for each combination of label values."""
        snapshots = sorted(self._source(), key=lambda snapshot: (snapshot.header.run_id, snapshot.header.rank))
        for metric in METRICS:
            if metric.server == "rank":
                yield _family(metric, snapshots)


def new_family(metric: Metric) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
    """Return an empty family for a metric. Rank metrics have ``run`` and ``rank`` as their first labels."""
    labels = (*(("run", "rank") if metric.server == "rank" else ()), *metric.label_names)
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return CounterMetricFamily(name, metric.doc, labels=labels)
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, metric.doc, labels=labels)
    return GaugeMetricFamily(name, metric.doc, labels=labels)


def _family(metric: Metric, snapshots: list[Snapshot]) -> Family:
    family = new_family(metric)
    for snapshot in snapshots:
        who = snapshot.header.run_id, str(snapshot.header.rank)
        if metric.kind == "info":
            family.add_metric((*who, *_info(metric, snapshot)), 1)  # type: ignore[call-arg,arg-type]
            continue
        for values in label_sets(metric, snapshot.header.devices):
            if isinstance(family, HistogramMetricFamily):
                family.add_metric((*who, *values), *_buckets(metric, snapshot, values))
            else:
                family.add_metric((*who, *values), snapshot.value_at(metric, values))
    return family


def _info(metric: Metric, snapshot: Snapshot) -> tuple[str, ...]:
    known: Mapping[str, str] = {
        **snapshot.header.info,
        "world_size": str(snapshot.header.world_size),
        "name": snapshot.header.name,
        "user": user_name(snapshot.uid),
    }
    return tuple(known.get(name, "unknown") for name in metric.label_names)


def _buckets(metric: Metric, snapshot: Snapshot, values: tuple[str, ...]) -> Buckets:
    found = snapshot.histogram_at(metric, values)
    bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
    return list(zip(bounds, accumulate(found.counts), strict=True)), found.sum


def serve(port: int, source: Source, host: str = LOOPBACK) -> HTTPServer:
    """Serve the metrics of snapshots over HTTP, like `serve_routes`. `source` returns the snapshots for each scrape."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(source))
    return serve_registry(port, registry, dict, host)


def serve_registry(
    port: int,
    registry: CollectorRegistry,
    health: Callable[[], Mapping[str, object]],
    host: str = LOOPBACK,
    *,
    token: str = "",
    more: Mapping[str, Route] | None = None,
) -> HTTPServer:
    """Serve a registry at ``/metrics``, a health check at ``/healthz`` and the routes `more`, like `serve_routes`.

    `health` returns additional entries for the JSON object at ``/healthz``, which does not require the token.
    """

    def healthz(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return answer_json(start, "200 OK", {"status": "ok", **health()})

    routes = {
        "/metrics": Route(application=make_wsgi_app(registry)),
        "/healthz": Route(application=healthz, public=True),
        **(more or {}),
    }
    return serve_routes(port, routes, host, token=token)
