"""The state of the node as one tree: what the page for people shows, and `/api/state` gives to programs.

It is made once per second, by the daemon's sweep, from what the metrics are made from. However many look, they get the
same text. Whatever is not known is left out of the tree, and is not 0.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from infinity.telemetry.run_views import DriveOf, Runs
from infinity.telemetry.trees import Tree, plain
from infinity_daemon.configured_drives import Drives
from infinity_daemon.reservations import Reservations
from infinity_daemon.stats_files import Found

_BEAT_SECONDS: Final = 5.0
"""How long a stream is silent at most, and whoever asks for the state waits for the first."""


class NodeState:
    """Makes the state and tells it to all who look. `observe` has one caller at a time; the rest any thread."""

    def __init__(
        self,
        *,
        drives: Drives,
        reservations: Reservations,
        drive_of: DriveOf,
        about: Callable[[], Mapping[str, object]],
    ) -> None:
        """Have seen nothing yet.

        Args:
            drive_of: gives the name of the drive that a path of a live rank is on, or None.
            about: what the daemon tells about itself.
        """
        self._drives, self._reservations, self._about = drives, reservations, about
        self._runs = Runs(drive_of)  # used by `observe` only
        self._news = threading.Condition()  # nothing is waited for under it but news
        self._number = 0  # of states made; under `_news`
        self._tree: Tree = {}  # the newest; replaced, never changed; under `_news`
        self._text: tuple[int, bytes] = (0, b"")
        """A number, and the text of that state: made when somebody wants it, once; under `_news`."""

    def observe(self, found: Found, limits: Mapping[str, Mapping[str, float]], now: float) -> None:
        """Make the state anew.

        Args:
            found: the stats pages.
            limits: bytes per second that each rank of a run may move, by run and drive, where there is a limit.
            now: monotonic seconds.
        """
        unix = time.time()
        looked, drives = self._drives.found
        runs = self._runs.look(found.pages, limits, now, unix)
        reserved = self._reservations.by_drive()
        tree = {
            "time": unix,
            "node": {**self._about(), "broken_pages": found.broken},
            "runs": runs,
            "drives": [_with_runs(drive, runs, reserved) for drive in drives],
            "drives_time": looked,
            "reservations": [
                {
                    "run": entry.run_id,
                    "drive": entry.place.drive.name,
                    "path": entry.place.path,
                    "bytes": entry.size,
                    "pid": entry.owner.pid,
                }
                for entry in self._reservations.entries()
            ],
        }
        with self._news:
            self._tree = tree
            self._number += 1
            self._news.notify_all()

    def now(self) -> Tree:
        """Return the newest state without the curves of runs, which are long; an empty one if there is none yet."""
        with self._news:
            tree = self._tree
        if not tree:
            return {}
        runs = [{name: value for name, value in run.items() if name != "history"} for run in tree["runs"]]
        now: Tree = plain({**tree, "runs": runs})
        return now

    def text(self) -> bytes:
        """Return the newest state as a JSON object in one line; an empty one if there is none for long."""
        return self._after(0)[1] or b"{}"

    def texts(self) -> Iterator[bytes]:
        """Yield the newest state, then those that come; nothing (empty) if there is none for long. Has no end.

        Who is slow misses some: none is kept.
        """
        number = 0
        while True:
            number, text = self._after(number)
            yield text

    def _after(self, number: int) -> tuple[int, bytes]:
        """Return number and text of the newest state when there is one after `number`, or nothing after a while."""
        with self._news:
            if not self._news.wait_for(lambda: self._number > number, _BEAT_SECONDS):
                return number, b""
            if self._text[0] != self._number:
                self._text = self._number, json.dumps(plain(self._tree), separators=(",", ":")).encode()
            return self._text


def _with_runs(drive: Tree, runs: list[Tree], reserved: Mapping[str, int]) -> Tree:
    """Return the tree of a drive with what is reserved on it, and what runs move on it, by run."""
    moved = {run["id"]: run["drives"][drive["name"]] for run in runs if drive["name"] in run.get("drives", {})}
    return {**drive, "reserved": reserved.get(drive["name"], 0), "runs": moved}
