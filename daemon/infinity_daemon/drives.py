"""What the drives of the node do now: looked at every second, by a thread of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from infinity.io.drives import SYSFS, Drive, DriveCounters, Place, counters, locate, space
from infinity_daemon.background import Background
from infinity_daemon.bandwidth import Profile
from infinity_daemon.runs import Tree, known
from infinity_daemon.wear import WearWatch

_LOOK_SECONDS: Final = 1.0
_RATE_SECONDS: Final = 5.0
"""Over how long bytes per second are averaged."""


class Drives:
    """Watches the drives behind some paths, from `start` to `stop`.

    A drive that is dead may keep whoever asks for its space waiting for ever. That is this thread, and nobody else:
    what was found last stays, with the time at which it was.
    """

    def __init__(self, *, bandwidth: Callable[[Drive], Profile | None], wear: WearWatch, sysfs: Path = SYSFS) -> None:
        """Watch nothing yet; `bandwidth` gives the profile of a drive or None, and `wear` is looked after here."""
        self.paths: tuple[str, ...] = ()
        """Replaced by others when there are new ones; read by the thread."""
        self._bandwidth, self._wear, self._sysfs = bandwidth, wear, sysfs
        self._counts: dict[str, deque[tuple[float, DriveCounters]]] = {}
        """By drive, monotonic seconds and bytes since boot of the last `_RATE_SECONDS`; the thread's own."""
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
        places, missing = self._places(self.paths)
        by_drive: dict[str, list[Place]] = {}
        for place in places:
            by_drive.setdefault(place.drive.name, []).append(place)
        self._wear.look(place.drive for place in places)
        self._counts = {name: self._counts.get(name, deque()) for name in by_drive}
        found = [self._tree(here, now) for _, here in sorted(by_drive.items())]
        self._found = time.time(), [*found, *missing]

    def _places(self, paths: Iterable[str]) -> tuple[list[Place], list[Tree]]:
        """Return where the paths are, and trees for those that cannot be looked at."""
        found: list[Place] = []
        missing: list[Tree] = []
        for path in dict.fromkeys(paths):
            try:
                found.append(locate(path, self._sysfs))
            except (OSError, ValueError) as error:
                missing.append({"name": path, "paths": [path], "error": _reason(error)})
        return found, missing

    def _tree(self, here: list[Place], now: float) -> Tree:
        drive = here[0].drive
        tree: Tree = {"name": drive.name, "paths": [place.path for place in here]}
        try:
            spaces = [space(place.path) for place in {place.file_system: place for place in here}.values()]
            tree |= {"capacity": sum(one.capacity for one in spaces), "free": sum(one.free for one in spaces)}
        except OSError as error:
            tree["error"] = _reason(error)
        tree |= self._rates(drive, now)
        profile = self._bandwidth(drive)
        if profile is not None:
            tree["profile"] = known(**asdict(profile))
        wear = known(**asdict(self._wear.of(drive)))
        return {**tree, "wear": wear} if wear else tree

    def _rates(self, drive: Drive, now: float) -> Mapping[str, float]:
        """Return what everybody does: bytes per second, share of the time in which it is busy, seconds per request.

        Nothing where the kernel does not count, or has counted anew.
        """
        counts, found = self._counts[drive.name], counters(drive, self._sysfs)
        if found is None or (counts and found.read + found.written < counts[-1][1].read + counts[-1][1].written):
            counts.clear()
        if found is None:
            return {}
        counts.append((now, found))
        while now - counts[0][0] > _RATE_SECONDS + 0.5:
            counts.popleft()
        begin, first = counts[0]
        if now <= begin:
            return {}
        passed = now - begin
        reads, writes = found.reads - first.reads, found.writes - first.writes
        return known(
            read=(found.read - first.read) / passed,
            write=(found.written - first.written) / passed,
            busy=(found.busy_seconds - first.busy_seconds) / passed,
            read_latency=(found.read_seconds - first.read_seconds) / reads if reads else None,
            write_latency=(found.write_seconds - first.write_seconds) / writes if writes else None,
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
