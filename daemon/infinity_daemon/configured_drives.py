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
from infinity_daemon.drive_bandwidth import Profile
from infinity_daemon.drive_wear import WearWatch

LOOK_SECONDS: Final = 1.0
"""Interval between two readings."""

Bandwidth = Callable[[Drive], Profile | None]
"""Function that returns the profile of a drive, or None if the drive has not been measured."""


class Drives:
    """Monitor the drives on which `paths` are stored, in a thread that calls `look`.

    Querying an unresponsive drive may block forever. In that case, only the monitoring thread is blocked: the last
    figures remain available together with the time at which they were read.
    """

    def __init__(self, *, bandwidth: Bandwidth, wear: WearWatch, sysfs: Path = SYSFS) -> None:
        """Initialize without drives."""
        self.paths: tuple[str, ...] = ()
        """Monitored paths. Other threads replace the tuple when the paths change."""
        self._bandwidth, self._wear = bandwidth, wear
        self._looks = DriveLooks(sysfs)  # only used by the monitoring thread
        self.found: tuple[float, list[Tree]] = (time.time(), [])
        """Unix time of the last reading, or of the start of the daemon before the first one, and the figures for each
        drive. Only replaced as a whole, because other threads read it."""

    def look(self) -> None:
        """Update the figures. Called once per second."""
        looked = self._looks.look(self.paths, time.monotonic())
        self._wear.look(drive for drive, _ in looked if drive is not None)
        trees = []
        for drive, tree in looked:
            if drive is not None:
                profile, worn = self._bandwidth(drive), known(**asdict(self._wear.of(drive)))
                tree = tree | known(profile=known(**asdict(profile)) if profile else None, wear=worn or None)
            trees.append(tree)
        self.found = time.time(), trees
