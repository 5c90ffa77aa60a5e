"""The small HTTP server of exporter and daemon: every client bounded in time, all of them in number."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from infinity.errors import ConfigError
from infinity.units import KIB

LOOPBACK: Final = "127.0.0.1"
"""Where a server listens if nothing else is asked for: all users of this machine may read, and nobody else."""

MAX_STREAMS: Final = 64
_REQUEST_SECONDS: Final = 5.0
"""How long a client may take until its request is there, however it sends it."""
_ANSWER_SECONDS: Final = 30.0
"""How long a client may take, in all; that of a stream, for each part."""
_MAX_CLIENTS: Final = 16
_STREAM_BUFFER: Final = 64 * KIB
"""How much the kernel keeps for a stream's reader: what it has not taken, it is told later, or never."""
_LOOK_SECONDS: Final = 0.1
_CONNECTION: Final = "infinity.connection"
"""Key of a request's socket in its WSGI environment."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What is served under a path; `public` if without the token, too."""

    application: WSGIApplication
    public: bool = False


@dataclass(frozen=True, kw_only=True)
class Stream:
    """An answer without an end, of one media type; each client has `parts` of its own.

    `parts` must give something every few seconds: only so is it found out that a client is gone.
    """

    parts: Callable[[], Iterator[bytes]]
    media_type: str
    public: bool = field(default=False, init=False)


class _Request(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Read the rest of a request; from then on the client is one that is being served."""
        complete = super().parse_request()
        if complete and isinstance(self.server, _Server):
            self.server.request_is_here(self.connection)
        return complete

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), _CONNECTION: self.connection}

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line per scrape is noise."""


@dataclass
class _Client:
    """Since when (monotonic seconds) a client is connected, or has a stream's part to take; whether its request is
    complete; whether it is given a stream."""

    since: float
    asked: bool = False
    streams: bool = False


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A WSGI server with a thread per client, a limit on clients, and one on the time that each may take.

    Where all places are taken, the client goes that has been connected longest without a complete request, or else
    longest of all, so that those who send nothing, or a byte now and then, or never read, keep nobody out. Streams have
    places of their own, which are not taken away but by not reading.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int]) -> None:
        self._clients: dict[socket.socket, _Client] = {}
        """Those that have a place, in the order in which they came. Changed under `_lock` by the thread that accepts,
        and by a client's own."""
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
        """Note that a client has sent all of its request."""
        with self._lock:
            if request in self._clients:
                self._clients[request].asked = True

    def streams_to(self, request: socket.socket) -> bool:
        """Give a client the place of a stream, or return False where none is left."""
        with self._lock:
            if request not in self._clients or sum(one.streams for one in self._clients.values()) >= MAX_STREAMS:
                return False
            self._clients[request].streams = True
        request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BUFFER)
        return True

    def parts_for(self, request: socket.socket, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of a stream; the time that the client has begins anew with each."""
        for part in parts:
            yield part
            with self._lock:
                if request in self._clients:
                    self._clients[request].since = time.monotonic()

    def service_actions(self) -> None:
        """Hang up on those who take too long; called by the thread that accepts, all the time."""
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
        """Take a client's place and end its connection, which ends its thread."""
        self._clients.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hangs up in the middle is its own affair."""


class HTTPServer:
    """A running server; a context manager that closes it."""

    def __init__(self, server: _Server) -> None:
        self._server = server  # its socket listens from before until `close`
        self._thread = threading.Thread(  # accepts until `close`; the clients have threads of their own
            target=server.serve_forever, args=(_LOOK_SECONDS,), name="infinity-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port, also where 0 was asked for."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving, hang up, and give the port back. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> HTTPServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_routes(
    port: int, routes: Mapping[str, Route | Stream], host: str = LOOPBACK, *, token: str = ""
) -> HTTPServer:
    """Serve from a thread of this process what stands under each path.

    Port 0 takes any free one. Whoever reaches `host` may ask; empty means all addresses.

    Args:
        routes: by path.
        token: what must be sent in the header ``Authorization: Bearer <token>`` for what is not public; none if empty.

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

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "HEAD":  # as GET, without what it answers
            answer = application({**environ, "REQUEST_METHOD": "GET"}, start)
            getattr(answer, "close", lambda: None)()
            return []
        if environ["REQUEST_METHOD"] != "GET":
            return answer_json(start, "405 Method Not Allowed", {"error": "only GET and HEAD"}, ("Allow", "GET, HEAD"))
        route = routes.get(environ.get("PATH_INFO", ""))
        if token and not (route and route.public) and not _has(token, environ):
            return answer_json(start, "401 Unauthorized", {"error": "send the header Authorization: Bearer <token>"})
        if route is None:
            return answer_json(start, "404 Not Found", {"error": f"there are {', '.join(routes)}"})
        if isinstance(route, Route):
            return route.application(environ, start)
        if not server.streams_to(environ[_CONNECTION]):
            busy = {"error": f"{MAX_STREAMS} streams are open already, and no more are served; try again later"}
            return answer_json(start, "503 Service Unavailable", busy)
        start("200 OK", [("Content-Type", route.media_type), ("Cache-Control", "no-store")])
        return server.parts_for(environ[_CONNECTION], route.parts())

    server.set_app(application)
    return HTTPServer(server)


def _has(token: str, environ: WSGIEnvironment) -> bool:
    given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
    return hmac.compare_digest(given, b"Bearer " + token.encode())


def answer_json(
    start: StartResponse, status: str, body: Mapping[str, object], *headers: tuple[str, str]
) -> Iterable[bytes]:
    """Answer with a JSON object."""
    start(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store"), *headers])
    return [json.dumps(body).encode() + b"\n"]
