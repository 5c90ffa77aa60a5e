"""State of the node as a JSON object, shown on the dashboard and served at `/api/state` and over the Unix socket.

The daemon builds the state once per second from the same sources as the metrics, and serializes it once for all
clients. Unknown values are omitted rather than reported as 0.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from infinity.telemetry.drive_views import without_counters
from infinity.telemetry.run_views import DriveOf, Runs
from infinity.telemetry.trees import Tree, known, plain
from infinity_daemon.configured_drives import Drives
from infinity_daemon.reservations import Reservations
from infinity_daemon.stale import StaleRun, StaleRuns
from infinity_daemon.stats_files import Found

_BEAT_SECONDS: Final = 5.0
"""Maximum time between two messages of a stream, and maximum time that `/api/state` waits for the first state."""
_MAX_STALE: Final = 256
"""Maximum number of stale runs in the state."""
_NUMBER: Final = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
"""Host name that browsers interpret as an IPv4 address."""


class NodeState:
    """Builds the state of the node and publishes it to all clients.

    Calls of `observe` must not overlap; the other methods are thread-safe.
    """

    def __init__(
        self,
        *,
        drives: Drives,
        reservations: Reservations,
        stale: StaleRuns,
        drive_of: DriveOf,
        about: Callable[[], Mapping[str, object]],
    ) -> None:
        """Initialize without a state.

        Args:
            drives: Monitored drives of the node.
            reservations: Space reservations of the node.
            stale: Stale runs of the node.
            drive_of: Function that returns the name of the drive that stores a path, or None if unknown.
            about: Function that returns information about the daemon.
        """
        self._drives, self._reservations, self._stale, self._about = drives, reservations, stale, about
        self._runs = Runs(drive_of)  # only used by `observe`
        self.linked_port = 0
        """Port of the dashboards on other nodes, to which the runs refer; 0: none."""
        self._news = threading.Condition()  # held only briefly, except while waiting for a new state
        self._number = 0  # number of states built so far; protected by `_news`
        self._tree: Tree = {}  # the current state; replaced, never modified; protected by `_news`
        self._text: tuple[int, bytes] = (0, b"")
        """Number and JSON text of a state. The text is built when it is first requested. Protected by `_news`."""

    def observe(self, found: Found, limits: Mapping[str, Mapping[str, float]], now: float) -> None:
        """Build a new state.

        Args:
            found: Stats files on the node.
            limits: Bandwidth limit per rank in bytes per second, by run id and drive. Unlimited drives are absent.
            now: Current monotonic time in seconds.
        """
        unix = time.time()
        looked, drives = self._drives.found
        runs = self._runs.look(found.snapshots, limits, now, unix)
        reserved, host = self._reservations.by_drive(), socket.gethostname()
        tree = {
            "time": unix,
            "node": {"host": host, **self._about(), "broken_stats_files": found.broken},
            "runs": [{**run, **known(pages=_pages(run, host, self.linked_port) or None)} for run in runs],
            "omitted_runs": self._runs.omitted,
            "drives": [_with_runs(drive, runs, reserved) for drive in drives],
            "drives_time": looked,
            "reservations": self._reservations.largest(),
            "stale_runs": [_stale_tree(run) for run in self._stale.found[:_MAX_STALE]],
        }
        with self._news:
            self._tree = tree
            self._number += 1
            self._news.notify_all()

    def now(self) -> Tree:
        """Return the current state with the current reservations, but without the histories of the runs.

        Empty before the first state.
        """
        with self._news:
            tree = self._tree
        if not tree:
            return {}
        runs = [{name: value for name, value in run.items() if name != "history"} for run in tree["runs"]]
        now: Tree = plain({**tree, "runs": runs, "reservations": self._reservations.largest()})
        return now

    def text(self) -> bytes:
        """Return the current state as a JSON object on one line. Wait up to a few seconds for the first one."""
        return self._after(0)[1] or b"{}"

    def texts(self) -> Iterator[bytes]:
        """Yield the current state and each later one as JSON, endlessly. Yield an empty text after a while without a
        state.

        A slow client misses states, because states are not queued.
        """
        number = 0
        while True:
            number, text = self._after(number)
            yield text

    def _after(self, number: int) -> tuple[int, bytes]:
        """Wait for a state newer than `number`, and return its number and text. The text is empty on timeout."""
        with self._news:
            if not self._news.wait_for(lambda: self._number > number, _BEAT_SECONDS):
                return number, b""
            if self._text[0] != self._number:
                self._text = self._number, json.dumps(plain(self._tree), separators=(",", ":")).encode()
            return self._text


def _pages(run: Tree, host: str, port: int) -> dict[str, str]:
    """Return the addresses of a run's dashboards on its other nodes, by host name.

    Only hosts in the domain of this host are included, because another user may have written the names. In a container,
    the name of a rank's host is not the name of its node, so the names are used only if this host is one of them.
    """
    if not port or host not in run.get("hosts", ()):
        return {}
    domain = host.partition(".")[2]
    return {
        other: f"http://{other}:{port}/#{run['id']}"
        for other in run.get("other_hosts", ())
        if other.partition(".")[2] == domain and not _NUMBER.fullmatch(other)
    }


def _stale_tree(run: StaleRun) -> Tree:
    return {
        "id": run.run_id,
        "folders": [str(root) for root in run.roots],
        "complete": run.complete,
        "checkpointed": run.checkpointed,
        "bytes": run.nbytes,
        "changed": run.changed,
    }


def _with_runs(drive: Tree, runs: list[Tree], reserved: Mapping[str, int]) -> Tree:
    moved = {run["id"]: run["drives"][drive["name"]] for run in runs if drive["name"] in run.get("drives", {})}
    return {**without_counters(drive), "reserved": reserved.get(drive["name"], 0), "runs": moved}
