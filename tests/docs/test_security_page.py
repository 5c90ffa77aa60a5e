"""Tests of docs/how-to/security.md: every cited test exists, and the description of authentication is correct."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client import CollectorRegistry

from infinity.telemetry.exporter import serve_registry
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_wear import WearWatch
from infinity_daemon.node_state import NodeState
from infinity_daemon.reservations import Reservations
from infinity_daemon.stale import StaleRuns
from infinity_daemon.web import routes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/security.md").read_text()


def test_every_cited_test_exists() -> None:
    """A citation names a file, a test, or a test in the file that was cited before."""
    file, cited = "", 0
    for path, test in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", PAGE):
        file = path or file
        if path or test:
            content = (ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in content, f"{file}::{test}"
            cited += 1
    assert cited >= 30


def test_every_network_channel_has_a_test() -> None:
    """Each row of the table of channels names a test; `test_every_cited_test_exists` checks that it exists."""
    table = re.findall(r"^\|(.*)\|$", PAGE.partition("## Network\n\n")[2].partition("\n\n")[0], re.M)
    header, _, *rows = [[cell.strip() for cell in row.split("|")] for row in table]
    assert header == ["channel", "listener", "interface", "authentication", "encryption", "test"]
    assert len(rows) == 5
    for row in rows:
        assert re.fullmatch(r"`(\w+/)*test_\w+\.py::test_\w+`", row[-1]), row


def test_paths_without_a_token_match_the_server() -> None:
    """The page lists exactly the paths that the daemon's HTTP server answers without the token."""
    state = NodeState(
        drives=Drives(bandwidth=lambda drive: None, wear=WearWatch({})),
        reservations=Reservations(),
        stale=StaleRuns(),
        drive_of=lambda path: None,
        about=dict,
    )
    served = {"/metrics", "/healthz", *routes(state)}
    with serve_registry(0, CollectorRegistry(), dict, token="0123456789abcdef", more=routes(state)) as server:
        open_paths = {path for path in served if answers(server.port, path)}
    authentication = PAGE.partition("### Authentication")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(/[\w.]*)`", authentication)) == open_paths


def answers(port: int, path: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).close()
        return True
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return False
        raise
