"""What the drives of the node do now: looked at every second, by a thread of their own."""

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
    """Watches the drives behind some paths, from `start` to `stop`.

    A drive that is dead may keep whoever asks for its space waiting for ever. That is this thread, and nobody else:
    what was found last stays, with the time at which it was.
    """

    def __init__(self, *, bandwidth: Callable[[Drive], Profile | None], wear: WearWatch, sysfs: Path = SYSFS) -> None:
        """Watch nothing yet; `bandwidth` gives the profile of a drive or None, and `wear` is looked after here."""
        self.paths: tuple[str, ...] = ()
        """Replaced by others when there are new ones; read by the thread."""
        self._bandwidth, self._wear = bandwidth, wear
        self._looks = DriveLooks(sysfs)  # the thread's own
        self._found: tuple[float, list[Tree]] = (0.0, [])
        """The Unix time of the last look, and what was found; replaced by the thread, read by all."""
        self._watching = Background("drives", lambda: self.look(time.monotonic()), _LOOK_SECONDS)

    @property
    def found(self) -> tuple[float, list[Tree]]:
        """When the drives were looked at last, as a Unix time (0: never), and what is known of each."""
        return self._found

    def start(self) -> None:
        """Look from now on."""
        self._watching.start()

    def stop(self) -> None:
        """Look no more; a look that hangs is left behind."""
        self._watching.close()

    def look(self, now: float) -> None:
        """Look at the drives, at `now` in monotonic seconds."""
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
