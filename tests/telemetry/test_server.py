"""Tests of the HTTP server: routes and streams, and that clients do not block each other."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

from infinity.telemetry import http_server as module
from infinity.telemetry.http_server import Route, serve_routes

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
