"""HTTP routes of the dashboard and of the state that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from infinity.telemetry.http_server import Route
from infinity_daemon.node_state import NodeState

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in ("page", "chart", "units")},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File in the folder `site` and its media type, by URL path."""
_HEADERS: Final = (
    # Browsers only load and execute files from `site`, regardless of the text that the dashboard shows.
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def routes(state: NodeState) -> Mapping[str, Route]:
    """Return the routes of the dashboard files (public) and of the state (`/api/state` and `/api/events`)."""

    def now(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [state.text() + b"\n"]

    def events(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", "text/event-stream"), ("Cache-Control", "no-store")])
        return (b"data: %b\n\n" % text if text else b":\n\n" for text in state.texts())

    site = files("infinity_daemon") / "site"
    pages = {path: _file((site / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
    return {
        **{path: Route(application=page, public=True) for path, page in pages.items()},
        "/api/state": Route(application=now),
        "/api/events": Route(application=events, stream=True),
    }


def _file(content: bytes, kind: str) -> WSGIApplication:
    def answer(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", kind), *_HEADERS])
        return [content]

    return answer
