"""Small HTTP server for the exporter and the daemon. It limits the number of clients and the time spent on each."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from infinity.errors import ConfigError
from infinity.units import KIB

LOOPBACK: Final = "127.0.0.1"
"""Default address. All users of this machine can connect to it; other machines cannot."""

MAX_STREAMS: Final = 64
_REQUEST_SECONDS: Final = 5.0
"""Maximum time for a client to send its complete request."""
_ANSWER_SECONDS: Final = 30.0
"""Maximum time for a request and its response; for a stream, the maximum time per part."""
_MAX_CLIENTS: Final = 16
_STREAM_BUFFER: Final = 64 * KIB
"""Size of the socket send buffer for a stream. Once it is full, further parts wait until the client reads."""
_LOOK_SECONDS: Final = 0.1
_CONNECTION: Final = "infinity.connection"
"""Key of a request's socket in its WSGI environment."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """WSGI application that is served at a path."""

    application: WSGIApplication
    public: bool = False
    """``True`` if the token is not required."""
    stream: bool = False
    """``True`` if the response is endless. It must yield a part at least every few seconds, because the server can only
    detect that a client has disconnected when it writes to it."""


class _Request(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Parse a request, and record that the client has sent it completely."""
        complete = super().parse_request()
        if complete and isinstance(self.server, _Server):
            self.server.request_is_here(self.connection)
        return complete

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), _CONNECTION: self.connection}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a log line per scrape would be noise."""


@dataclass
class _Client:
    """State of a connected client."""

    since: float
    """Monotonic time in seconds at which it connected or, for a stream, was sent the previous part."""
    asked: bool = False
    """``True`` if it has sent its complete request."""
    streams: bool = False
    """``True`` if it receives a stream."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """WSGI server that uses one thread per client and limits the number of clients and the time spent on each.

    If the maximum number of clients is connected, the server makes room for a new one by disconnecting the oldest
    client that has not sent a complete request, or else the oldest client. Clients that send nothing, send slowly or
    never read therefore cannot lock out others. Streams have a separate limit, and the server ends them only if the
    client stops reading.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int]) -> None:
        self._clients: dict[socket.socket, _Client] = {}
        """Connected clients in order of arrival. Protected by `_lock`, because the accepting thread and the client
        threads modify it."""
        self._lock = threading.Lock()
        """Held only briefly: no data is sent or received while it is held."""
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        # The method of WSGIServer looks up this machine's host name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            brief = [other for other, client in self._clients.items() if not client.streams]
            if len(brief) >= _MAX_CLIENTS:
                silent = (other for other in brief if not self._clients[other].asked)
                self._hang_up(next(silent, brief[0]))
            self._clients[request] = _Client(time.monotonic())
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._clients.pop(request, None)

    def request_is_here(self, request: socket.socket) -> None:
        with self._lock:
            if request in self._clients:
                self._clients[request].asked = True

    def streams_to(self, request: socket.socket) -> bool:
        """Mark a client as a receiver of a stream. Return ``False`` if the maximum number of streams is in use."""
        with self._lock:
            if request not in self._clients or sum(one.streams for one in self._clients.values()) >= MAX_STREAMS:
                return False
            self._clients[request].streams = True
        request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BUFFER)
        return True

    def parts_for(self, request: socket.socket, parts: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the parts of a stream. Each part restarts the client's time limit."""
        for part in parts:
            yield part
            with self._lock:
                if request in self._clients:
                    self._clients[request].since = time.monotonic()

    def service_actions(self) -> None:
        """Disconnect clients that have exceeded their time limit. Called repeatedly by the accepting thread."""
        now = time.monotonic()
        with self._lock:
            for request, client in list(self._clients.items()):
                if now - client.since > (_ANSWER_SECONDS if client.asked else _REQUEST_SECONDS):
                    self._hang_up(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for request in list(self._clients):
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        """Shut down a client's connection, which ends its thread. The caller must hold the lock."""
        self._clients.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: clients may disconnect at any time."""


class HTTPServer:
    """Running HTTP server, and context manager that closes it."""

    def __init__(self, server: _Server) -> None:
        self.port = server.server_port
        """TCP port that the server listens on. If port 0 was requested, this is the port that was chosen."""
        self.loopback = ipaddress.ip_address(server.server_name).is_loopback
        """``True`` if other machines cannot connect."""
        self._server = server  # its socket listens until `close`
        self._thread = threading.Thread(  # accepts connections until `close`; each client has its own thread
            target=server.serve_forever, args=(_LOOK_SECONDS,), name="infinity-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving, disconnect all clients and release the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> HTTPServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_routes(port: int, routes: Mapping[str, Route], host: str = LOOPBACK, *, token: str = "") -> HTTPServer:
    """Serve applications by path, from a background thread.

    Args:
        port: TCP port, or 0 for any free port.
        routes: Applications by path.
        host: Address to listen on; empty means all addresses. Anyone who can reach it can send requests.
        token: Token that clients must send as ``Authorization: Bearer <token>`` for routes that are not public. Empty
            means that no token is required.

    Raises:
        ConfigError: if the port is in use or not permitted.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"metrics port {port} is out of range; use 0 to 65535")
    try:
        server = _Server((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"metrics port {port} on {host or 'all addresses'} cannot be used: {reason}; "
            "choose another port, or 0 for any free one"
        ) from error

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "HEAD":  # the headers of a GET response, without its body
            answer = application({**environ, "REQUEST_METHOD": "GET"}, start)
            getattr(answer, "close", lambda: None)()
            return []
        if environ["REQUEST_METHOD"] != "GET":
            return answer_json(
                start, "405 Method Not Allowed", {"error": "only GET and HEAD are supported"}, ("Allow", "GET, HEAD")
            )
        route = routes.get(environ.get("PATH_INFO", ""))
        if token and not (route and route.public) and not _has(token, environ):
            return answer_json(start, "401 Unauthorized", {"error": "send the header Authorization: Bearer <token>"})
        if route is None:
            return answer_json(start, "404 Not Found", {"error": f"not found; available paths: {', '.join(routes)}"})
        if not route.stream:
            return route.application(environ, start)
        if not server.streams_to(environ[_CONNECTION]):
            busy = {"error": f"all {MAX_STREAMS} streams are in use; try again later"}
            return answer_json(start, "503 Service Unavailable", busy)
        return server.parts_for(environ[_CONNECTION], route.application(environ, start))

    server.set_app(application)
    return HTTPServer(server)


def _has(token: str, environ: WSGIEnvironment) -> bool:
    given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
    return hmac.compare_digest(given, b"Bearer " + token.encode())


def answer_json(
    start: StartResponse, status: str, body: Mapping[str, object], *headers: tuple[str, str]
) -> Iterable[bytes]:
    """Send `body` as a JSON object with the given status and headers."""
    start(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store"), *headers])
    return [json.dumps(body).encode() + b"\n"]
