"""Prometheus exporter for stats files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from wsgiref.types import StartResponse, WSGIEnvironment

from infinity.optional_dependencies import needs
from infinity.telemetry.http_server import LOOPBACK, HTTPServer, Route, Stream, answer_json, serve_routes
from infinity.telemetry.metrics import METRICS, PREFIX, Metric
from infinity.telemetry.stats_cells import label_sets
from infinity.telemetry.stats_file import Snapshot

with needs("daemon", "serving metrics"):
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector

Source = Callable[[], Iterable[Snapshot]]
Buckets = tuple[list[tuple[str, float]], float]


class StatsCollector(Collector):
    """Convert snapshots to metric families with the prefix on every name and ``run`` and ``rank`` on every sample.

    Each rank of a run has one stats file (`read_stats_file` checks its name), so no two samples share a series.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Family]:
        """Return no families, because the served metrics are known only when they are read."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield one family per rank metric, with a sample for every label set of every stats file."""
        pages = sorted(self._source(), key=lambda page: (page.header.run_id, page.header.rank))
        for metric in METRICS:
            if metric.server == "rank":
                yield _family(metric, pages)


def new_family(metric: Metric) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
    """Return an empty family for a metric. Rank metrics have ``run`` and ``rank`` as their first labels."""
    labels = (*(("run", "rank") if metric.server == "rank" else ()), *metric.label_names)
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return CounterMetricFamily(name, metric.doc, labels=labels)
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, metric.doc, labels=labels)
    return GaugeMetricFamily(name, metric.doc, labels=labels)


def _family(metric: Metric, pages: list[Snapshot]) -> Family:
    family = new_family(metric)
    for page in pages:
        who = page.header.run_id, str(page.header.rank)
        if metric.kind == "info":
            family.add_metric((*who, *_info(metric, page)), 1)  # type: ignore[call-arg,arg-type]
            continue
        for values in label_sets(metric, page.header.devices):
            if isinstance(family, HistogramMetricFamily):
                family.add_metric((*who, *values), *_buckets(metric, page, values))
            else:
                family.add_metric((*who, *values), page.value_at(metric, values))
    return family


def _info(metric: Metric, page: Snapshot) -> tuple[str, ...]:
    known: Mapping[str, str] = {
        **page.header.info,
        "world_size": str(page.header.world_size),
    }
    return tuple(known.get(name, "unknown") for name in metric.label_names)


def _buckets(metric: Metric, page: Snapshot, values: tuple[str, ...]) -> Buckets:
    found = page.histogram_at(metric, values)
    bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
    return list(zip(bounds, accumulate(found.counts), strict=True)), found.sum


def serve(port: int, source: Source, host: str = LOOPBACK) -> HTTPServer:
    """Serve the metrics of `source` from a thread of this process.

    Args:
        port: TCP port, or 0 for any free port.
        source: Called for every scrape; ``lambda: [stats.snapshot()]`` serves this rank.
        host: Address to listen on. Everyone who can reach it may read the metrics; empty means all addresses.

    Raises:
        ConfigError: if the port is in use or not permitted.
    """
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
    more: Mapping[str, Route | Stream] | None = None,
) -> HTTPServer:
    """Serve a registry at ``/metrics`` as `serve` does, and ``/healthz``, which needs no token.

    Args:
        port: TCP port, or 0 for any free port.
        registry: Registry of the served metrics.
        health: Returns further entries of the JSON object at ``/healthz``.
        host: Address to listen on; empty means all addresses.
        token: Token that clients must send as ``Authorization: Bearer <token>``. Empty means that no token is required.
        more: Further routes by path.

    Raises:
        ConfigError: if the port is in use or not permitted.
    """

    def healthz(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return answer_json(start, "200 OK", {"status": "ok", **health()})

    routes: Mapping[str, Route | Stream] = {
        "/metrics": Route(application=make_wsgi_app(registry)),
        "/healthz": Route(application=healthz, public=True),
        **(more or {}),
    }
    return serve_routes(port, routes, host, token=token)
