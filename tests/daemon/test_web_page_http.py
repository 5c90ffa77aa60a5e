"""Tests of the daemon's HTTP interface for people: the web page, the state and its stream, with tokens and limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from pathlib import Path

import infinity_daemon
from support.counted_rank import CountedRank
from support.daemon_process import daemon

SITE = Path(infinity_daemon.__file__).parent / "site"
FILES = {
    "/": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/chart.js": "chart.js",
    "/units.js": "units.js",
}


def request(
    port: int, path: str, *, method: str = "GET", token: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    peer = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(peer):
        peer.request(method, path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = peer.getresponse()
        return answer.status, answer.headers, answer.read()


@contextlib.contextmanager
def stream(port: int, token: str = ""):
    """Yield the response of an open stream as a file, positioned at its first line."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer, peer.makefile("rb") as answer:
        peer.sendall(f"GET /api/events HTTP/1.0\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        yield answer


def next_state(answer) -> dict:
    while line := answer.readline():
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream ended")


def test_the_page_and_its_files_are_served_unchanged(tmp_path):
    """The content security policy blocks all other sources."""
    with daemon(tmp_path) as process:
        for path, name in FILES.items():
            status, headers, content = request(process.port, path)
            assert (status, content) == (200, (SITE / name).read_bytes())
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert request(process.port, path, method="HEAD")[::2] == (200, b"")
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            for path in ("/", "/metrics", "/api/events", "/none"):
                status, headers, _ = request(process.port, path, method=method)
                assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert request(process.port, "/icon.svg")[1]["Content-Type"] == "image/svg+xml"
        for path, expected in (("/metrics", 200), ("/healthz", 200), ("/nothing", 404)):
            status, headers, content = request(process.port, path, method="HEAD")
            assert (status, content) == (expected, b"")
            assert headers["Content-Type"] == request(process.port, path)[1]["Content-Type"]
        for path in ("/state.py", "/../service.py", "/site/page.js", "/index.html"):
            assert request(process.port, path)[0] == 404


def test_the_page_has_no_external_or_inline_code():
    """The files contain no other host's URL, no inline script or style, and no HTML built from strings."""
    assert {path.name for path in SITE.iterdir()} == {*FILES.values(), "icon.svg"}
    for path in SITE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", text), path.name
    page = (SITE / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)
    for name in ("page.js", "chart.js", "units.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", (SITE / name).read_text()
        )


def test_the_stream_sends_the_state_and_its_changes(tmp_path):
    rank = CountedRank(tmp_path, paths=[tmp_path])
    rank.step(loss=3.5)
    with daemon(tmp_path) as process, stream(process.port) as answer:
        assert b" 200 OK" in answer.readline()
        state = next_state(answer)
        assert [(run["id"], run["steps"], run["loss"]) for run in state["runs"]] == [("run-1", 1, 3.5)]
        rank.step(loss=3.25)
        while (state := next_state(answer))["runs"][0]["steps"] < 2:
            pass
        assert state["runs"][0]["loss"] == 3.25
        status, headers, content = request(process.port, "/api/state")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(content)["runs"][0]["steps"] == 2
        while not (state := next_state(answer))["drives"]:
            pass
        assert state["drives"][0]["paths"] == [str(tmp_path)]
        rank.stats.close()
        while (state := next_state(answer))["runs"][0]["status"] != "ended":
            pass
        assert state["runs"][0]["loss"] == 3.25  # as long as its stats file is served


def test_only_the_empty_page_and_health_are_served_without_a_token(tmp_path):
    """Container health checks have no token."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    CountedRank(tmp_path, run="secret-run").step()
    with daemon(tmp_path, "--token-file", str(token)) as process:
        for path in (*FILES, "/icon.svg"):
            status, _, content = request(process.port, path)
            assert (status, b"secret-run" in content) == (200, False)
        assert request(process.port, "/healthz")[0] == 200
        for path in ("/metrics", "/api/state", "/api/events"):
            for wrong in (None, "", "0123456789abcde", "0123456789abcdef0", "\xff"):
                assert request(process.port, path, token=wrong, method="HEAD")[0] == 401
            _, _, content = request(process.port, path)
            assert b"Authorization: Bearer" in content
            assert b"secret-run" not in content
            assert request(process.port, path, token="0123456789abcdef", method="HEAD")[0] == 200
        with stream(process.port, "0123456789abcdef") as answer:
            assert next_state(answer)["runs"][0]["id"] == "secret-run"
