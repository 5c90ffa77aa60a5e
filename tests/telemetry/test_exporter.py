"""Tests of the metrics exporter: exposition format, metric table and HTTP server."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infinity.errors import ConfigError
from infinity.telemetry import METRICS, PREFIX, Stats
from infinity.telemetry import http_server as module
from infinity.telemetry.exporter import StatsCollector, serve
from infinity.telemetry.http_server import Route, serve_routes


def snapshot(rank=0, run_id="run-1", *, world_size=2, devices=("nvme0", "nvme1")):
    """Return a snapshot with known values; its exposition does not depend on time or machine."""
    stats = Stats.create(
        None,
        run_id=run_id,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        devices=devices,
        info={"version": "0.1.0", "torch_version": '2.13.0+cpu "x"', "io_engine": "threads", "paths": "[]"},
    )
    stats.counter("io_bytes_total", op="read", state="update", device="nvme1").add(1 << 40)
    stats.counter("stall_seconds_total", phase="backward", cause="host_cache").add(0.25)
    stats.gauge("tier_capacity_bytes", tier="host").set(2**31)
    for seconds in (0.3, 7.0, 1e6):
        stats.histogram("step_duration_seconds").observe(seconds)
    return replace(stats.snapshot(), uid=0)


def exposition(snapshots):
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: snapshots))
    return generate_latest(registry).decode()


def test_exposition_contains_every_metric_and_its_values():
    """The buckets of a histogram are cumulative, and unused label combinations are 0."""
    lines = exposition([snapshot(0)]).splitlines()
    rank = [metric for metric in METRICS if metric.server == "rank"]
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == [PREFIX + one.name for one in rank]
    samples = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    escaped = r'torch_version="2.13.0+cpu \"x\"",version="0.1.0"'
    expected = {
        f'build_info{{io_engine="threads",rank="0",run="run-1",{escaped}}}': 1,
        'run_info{name="run-1",rank="0",run="run-1",user="root",world_size="2"}': 1,
        'io_bytes_total{device="nvme1",op="read",rank="0",run="run-1",state="update"}': 1 << 40,
        'io_bytes_total{device="nvme0",op="write",rank="0",run="run-1",state="activation"}': 0,
        'stall_seconds_total{cause="host_cache",phase="backward",rank="0",run="run-1"}': 0.25,
        'tier_capacity_bytes{rank="0",run="run-1",tier="host"}': 2**31,
        'step_duration_seconds_count{rank="0",run="run-1"}': 3,
        'step_duration_seconds_sum{rank="0",run="run-1"}': 1000007.3,
    }
    buckets = {"0.25": 0, "0.5": 1, "4.0": 1, "8.0": 2, "512.0": 2, "+Inf": 3}
    expected |= {
        f'step_duration_seconds_bucket{{le="{bound}",rank="0",run="run-1"}}': count for bound, count in buckets.items()
    }
    assert {name: float(samples[PREFIX + name]) for name in expected} == expected


def test_promtool_accepts_the_exposition():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    text = exposition([snapshot(0), snapshot(1)])
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.status, answer.read()


def test_server_serves_metrics_and_health_and_releases_its_port():
    snapshots = [snapshot()]
    with serve(0, lambda: snapshots, host="127.0.0.1") as server:
        assert get(server.port, "/metrics") == (200, exposition(snapshots).encode())
        status, body = get(server.port, "/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ok"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.port, "/else")
        with pytest.raises(ConfigError, match=f"port {server.port} .*choose another port"):
            serve(server.port, lambda: snapshots, host="127.0.0.1")
        port = server.port
    serve(port, lambda: snapshots, host="127.0.0.1").close()
    with pytest.raises(ConfigError, match="0 to 65535"):
        serve(70000, lambda: snapshots)


def test_metric_names_follow_prometheus_conventions():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_info") == (metric.kind == "info"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.doc.endswith("."), metric.name


PART = b"x" * 100_000


def hello(_, start):
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def endless(_, start) -> Iterator[bytes]:
    start("200 OK", [("Content-Type", "text/event-stream")])
    return parts()


def parts() -> Iterator[bytes]:
    while True:
        yield PART
        time.sleep(0.01)


ROUTES = {
    "/hello": Route(application=hello),
    "/open": Route(application=hello, public=True),
    "/stream": Route(application=endless, stream=True),
}


def ask(port: int, path: str, method: str = "GET", token: str | None = None) -> http.client.HTTPResponse:
    peer = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    peer.request(method, path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    return peer.getresponse()


def open_stream(port: int) -> socket.socket:
    """Open a stream and read its status line."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=60)
    peer.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
    assert b" 200 OK\r\n" in peer.recv(1000)
    return peer


def continues(port: int) -> bool:
    """Return whether a stream that is read is still open after 2.5 s."""
    with contextlib.suppress(ConnectionResetError), open_stream(port) as reader:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            if not reader.recv(1 << 20):
                return False
        return True
    return False


def test_head_of_a_stream_completes():
    """A completed request releases its slot."""
    with serve_routes(0, ROUTES) as server:
        for _ in range(module.MAX_STREAMS + 5):
            answer = ask(server.port, "/stream", "HEAD")
            assert (answer.status, answer.headers["Content-Type"], answer.read()) == (200, "text/event-stream", b"")


def test_streams_are_limited_and_do_not_block_requests():
    """A stream above the limit gets status 503 until another stream ends."""
    with serve_routes(0, ROUTES) as server, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(open_stream(server.port)) for _ in range(module.MAX_STREAMS)]
        for _ in range(3):
            assert ask(server.port, "/hello").read() == b"hello"
        rejected = ask(server.port, "/stream")
        assert (rejected.status, "64 streams" in rejected.read().decode()) == (503, True)
        for peer in peers:
            peer.recv(1000)  # the stream is still open
        peers[0].close()
        end = time.monotonic() + 60
        while ask(server.port, "/stream", "HEAD").status == 503:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_stream_that_is_not_read_is_closed(monkeypatch):
    """Streams that are read continue, and the server buffers nothing for either."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 1.0)
    sent = []

    def counted(_, start) -> Iterator[bytes]:
        return (sent.append(len(part)) or part for part in endless(_, start))

    routes = {"/stream": Route(application=counted, stream=True)}
    with serve_routes(0, routes) as server, open_stream(server.port) as idle:
        with contextlib.suppress(TimeoutError):
            end = time.monotonic() + 60
            while server._server._clients:
                assert time.monotonic() < end, "it is still served"
                time.sleep(0.05)
        assert sum(sent) < 64 << 20  # socket buffers take a limited amount
        threads = {thread.name for thread in threading.enumerate()}
        assert "infinity-http" in threads
        idle.settimeout(60)
        received = 0
        while data := idle.recv(1 << 20):  # data in transit, then the end of the stream
            received += len(data)
        assert received <= sum(sent) + 1000
        # On a busy machine, a reader may pause for longer than the limit.
        assert any(continues(server.port) for _ in range(20))


def test_closing_the_server_ends_its_streams():
    with serve_routes(0, ROUTES) as server:
        peer = open_stream(server.port)
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(1 << 20):
            pass
    peer.close()
