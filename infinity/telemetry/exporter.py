"""Prometheus exposition of stats pages, and the small HTTP server for it."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from infinity.errors import ConfigError
from infinity.extras import needs
from infinity.telemetry.cells import label_sets
from infinity.telemetry.metrics import METRICS, PREFIX, Metric
from infinity.telemetry.page import Snapshot

with needs("daemon", "serving metrics"):
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector

Source = Callable[[], Iterable[Snapshot]]
Buckets = tuple[list[tuple[str, float]], float]

LOOPBACK: Final = "127.0.0.1"
"""Where a server listens if nothing else is asked for: it has no authentication."""

_REQUEST_SECONDS: Final = 5.0
"""How long a client may take until its request is there, however it sends it."""
_ANSWER_SECONDS: Final = 30.0
"""How long a client may take, in all."""
_MAX_CLIENTS: Final = 16
_LOOK_SECONDS: Final = 0.1


class StatsCollector(Collector):
    """Turns snapshots into metric families: the prefix on every name, ``run`` and ``rank`` on every sample.

    There is one page of a rank of a run (`read_stats_page` sees to it), so no two samples are of one series.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Family]:
        """Return nothing: what is served is known only when it is read."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield one family per metric of a rank, with a sample for every label set of every page."""
        pages = sorted(self._source(), key=lambda page: (page.header.run_id, page.header.rank))
        for metric in METRICS:
            if metric.server == "rank":
                yield _family(metric, pages)


def new_family(metric: Metric) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
    """Return the empty family of a metric, with ``run`` and ``rank`` first among its labels if ranks count it."""
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


class _Request(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Read the rest of a request; from then on the client is one that is being served."""
        complete = super().parse_request()
        if complete and isinstance(self.server, _Server):
            self.server.request_is_here(self.connection)
        return complete

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line per scrape is noise."""


@dataclass
class _Client:
    """Since when (monotonic seconds) a client is connected, and whether its request is complete."""

    since: float
    asked: bool = False


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A WSGI server with a thread per client, a limit on clients, and one on the time that each may take.

    Where all places are taken, the client goes that has been connected longest without a complete request, or else
    longest of all, so that those who send nothing, or a byte now and then, or never read, keep nobody out.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int]) -> None:
        self._clients: dict[socket.socket, _Client] = {}
        """Those that have a place, in the order in which they came. Changed under `_lock` by the thread that accepts,
        and by a client's own at its end."""
        self._lock = threading.Lock()
        """Held for moments only: nothing is sent or received under it."""
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        # WSGIServer asks the name service for this machine's name here, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._clients) >= _MAX_CLIENTS:
                silent = (other for other, client in self._clients.items() if not client.asked)
                self._hang_up(next(silent, None) or next(iter(self._clients)))
            self._clients[request] = _Client(time.monotonic())
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._clients.pop(request, None)

    def request_is_here(self, request: socket.socket) -> None:
        """Note that a client has sent all of its request."""
        with self._lock:
            if request in self._clients:
                self._clients[request].asked = True

    def service_actions(self) -> None:
        """Hang up on those who take too long; called by the thread that accepts, all the time."""
        now = time.monotonic()
        with self._lock:
            for request, client in list(self._clients.items()):
                if now - client.since > (_ANSWER_SECONDS if client.asked else _REQUEST_SECONDS):
                    self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        """Take a client's place and end its connection, which ends its thread."""
        self._clients.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hangs up in the middle is its own affair."""


class ExporterServer:
    """A running server of ``/metrics`` and ``/healthz``; a context manager that closes it."""

    def __init__(self, server: _Server) -> None:
        self._server = server  # its socket listens from before until `close`
        self._thread = threading.Thread(  # accepts until `close`; the clients have threads of their own
            target=server.serve_forever, args=(_LOOK_SECONDS,), name="infinity-exporter", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port, also where 0 was asked for."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving and give the port back. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> ExporterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(port: int, source: Source, host: str = LOOPBACK) -> ExporterServer:
    """Serve the pages that `source` gives, from a thread of this process.

    `source` is called for every scrape: ``lambda: [stats.snapshot()]`` serves this rank.
    Port 0 takes any free one. Whoever reaches `host` may read; empty means all addresses.

    Raises:
        ConfigError: the port is taken or may not be used.
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
) -> ExporterServer:
    """Serve a registry as `serve` does.

    Args:
        health: adds to the JSON object of ``/healthz``.
        token: what whoever asks has to send in the header ``Authorization: Bearer <token>``, but for ``/healthz``; none
            if it is empty.

    Raises:
        ConfigError: the port is taken or may not be used.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"metrics port {port} must be from 0 to 65535")
    try:
        server = _Server((host, port))
    except (OSError, UnicodeError) as error:  # the latter for names that no host can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"metrics port {port} on {host or 'all addresses'} cannot be used: {reason}; "
            "choose another port, or 0 for any free one"
        ) from error
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "HEAD":  # as GET, without what it answers
            list(application({**environ, "REQUEST_METHOD": "GET"}, start))
            return []
        path = environ.get("PATH_INFO", "")
        if token and path != "/healthz" and not _has(token, environ):
            return _answer(start, "401 Unauthorized", {"error": "send the header Authorization: Bearer <token>"})
        if path == "/metrics":
            return metrics(environ, start)  # type: ignore[no-any-return]
        if path == "/healthz":
            return _answer(start, "200 OK", {"status": "ok", **health()})
        return _answer(start, "404 Not Found", {"error": "there are /metrics and /healthz"})

    server.set_app(application)
    return ExporterServer(server)


def _has(token: str, environ: WSGIEnvironment) -> bool:
    given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
    return hmac.compare_digest(given, b"Bearer " + token.encode())


def _answer(start: StartResponse, status: str, body: Mapping[str, object]) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/json")])
    return [json.dumps(body).encode() + b"\n"]
