"""Current figures of the node's drives, read once per second by a separate thread."""

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
    """Watch the drives of some paths, from `start` to `stop`.

    A query of a dead drive may block forever. Only this thread is then blocked: the last figures stay available,
    together with the time at which they were read.
    """

    def __init__(self, *, bandwidth: Callable[[Drive], Profile | None], wear: WearWatch, sysfs: Path = SYSFS) -> None:
        """Start without drives. `bandwidth` returns the profile of a drive or None; `wear` is sampled here."""
        self.paths: tuple[str, ...] = ()
        """Replaced by other threads when paths change; read by the thread."""
        self._bandwidth, self._wear = bandwidth, wear
        self._looks = DriveLooks(sysfs)  # used by the thread only
        self._found: tuple[float, list[Tree]] = (0.0, [])
        """Unix time of the last reading and its figures; replaced by the thread, read by all."""
        self._watching = Background("drives", lambda: self.look(time.monotonic()), _LOOK_SECONDS)

    @property
    def found(self) -> tuple[float, list[Tree]]:
        """Unix time of the last reading (0: never) and the figures of each drive."""
        return self._found

    def start(self) -> None:
        """Start watching."""
        self._watching.start()

    def stop(self) -> None:
        """Stop watching. A query that hangs is abandoned."""
        self._watching.close()

    def look(self, now: float) -> None:
        """Read the drives. `now` is the current time in monotonic seconds."""
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
