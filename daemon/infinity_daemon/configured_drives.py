"""Current figures for the drives of the node, updated once per second by a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from infinity.io.block_devices import SYSFS, Drive
from infinity.telemetry.drive_views import DriveLooks
from infinity.telemetry.trees import Tree, known
from infinity_daemon.background import Background
from infinity_daemon.drive_bandwidth import Profile
from infinity_daemon.drive_wear import WearWatch

_LOOK_SECONDS: Final = 1.0


class Drives:
    """Monitor the drives on which `paths` are stored, from `start` to `stop`.

    Querying an unresponsive drive may block forever. In that case, only the monitoring thread is blocked: the last
    figures remain available together with the time at which they were read.
    """

    def __init__(self, *, bandwidth: Callable[[Drive], Profile | None], wear: WearWatch, sysfs: Path = SYSFS) -> None:
        """Initialize without drives. `bandwidth` returns a drive's profile, or None. Updates also sample `wear`."""
        self.paths: tuple[str, ...] = ()
        """Monitored paths. Other threads replace the tuple when the paths change."""
        self._bandwidth, self._wear = bandwidth, wear
        self._looks = DriveLooks(sysfs)  # only used by the monitoring thread
        self._found: tuple[float, list[Tree]] = (0.0, [])
        """Unix time of the last reading, and its figures. Only replaced as a whole, because other threads read it."""
        self._watching = Background("drives", lambda: self.look(time.monotonic()), _LOOK_SECONDS)

    @property
    def found(self) -> tuple[float, list[Tree]]:
        """Unix time of the last reading (0 before the first one), and the figures for each drive."""
        return self._found

    def start(self) -> None:
        """Start the thread."""
        self._watching.start()

    def stop(self) -> None:
        """Stop the thread. A query that does not return is abandoned."""
        self._watching.close()

    def look(self, now: float) -> None:
        """Update the figures. `now` is the current monotonic time in seconds."""
        looked = self._looks.look(self.paths, now)
        self._wear.look(drive for drive, _ in looked if drive is not None)
        self._found = (
            time.time(),
            [tree if drive is None else self._with_profile(drive, tree) for drive, tree in looked],
        )

    def _with_profile(self, drive: Drive, tree: Tree) -> Tree:
        profile = self._bandwidth(drive)
        wear = known(**asdict(self._wear.of(drive)))
        profiled = {**tree, "profile": known(**asdict(profile))} if profile is not None else tree
        return {**profiled, "wear": wear} if wear else profiled
