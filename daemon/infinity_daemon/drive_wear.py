"""Wear of drives, from bytes written, rated endurance and the health data that drives report."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infinity.io.block_devices import SYSFS, Drive, counters
from infinity_daemon.log import event

DAY: Final = 86_400.0
_ASK_SECONDS: Final = 600.0
"""Interval between two queries of a drive's health log, which changes slowly because it reports whole percentages."""
_ANSWER_SECONDS: Final = 5.0
_SAMPLE_SECONDS: Final = 60.0
_WINDOW_SECONDS: Final = 3_600.0
_DATA_UNIT_BYTES: Final = 512_000  # unit of the NVMe health log
_MOST_PERCENT: Final = 255  # one byte in the NVMe health log; above 100, the rated life is exceeded

# For each program: its arguments before the device, and the possible locations of the percentage used in its output.
_PROGRAMS: Final[Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]]] = {
    "nvme": (("smart-log", "-o", "json"), (("percent_used",), ("percentage_used",))),
    "smartctl": (
        ("-j", "-A", "-n", "standby"),
        (("nvme_smart_health_information_log", "percentage_used"), ("endurance_used", "current_percent")),
    ),
}
_WRITTEN: Final = {
    "nvme": ("data_units_written",),
    "smartctl": ("nvme_smart_health_information_log", "data_units_written"),
}


@dataclass(frozen=True, kw_only=True)
class Health:
    """Health data reported by a drive: the used fraction of its rated life, and bytes written. None if unknown."""

    ratio: float | None = None
    written: int | None = None


@dataclass(frozen=True, kw_only=True)
class DriveWear:
    """Wear of a drive. Unknown values are None."""

    ratio: float | None
    """Used fraction of the drive's rated life, as reported by the drive."""
    rated: int | None
    """Configured rated endurance (TBW), in bytes."""
    bytes_per_second: float | None
    """Write rate of all processes over the last hour or since the daemon started, in bytes per second."""
    left: int | None
    """Bytes that can be written before the rated endurance is reached."""
    days: float | None
    """Days until the rated endurance is reached at this write rate."""


class WearWatch:
    """Track the wear of drives. Thread-safe.

    A separate thread queries the health logs, one drive after another, so that callers never wait for a drive.
    """

    def __init__(self, endurance: Mapping[str, int], sysfs: Path = SYSFS) -> None:
        """Initialize without drives.

        Args:
            endurance: Rated endurance in bytes, by drive name.
            sysfs: Root folder of sysfs.
        """
        self.endurance = dict(endurance)
        """Rated endurance in bytes, by drive name. Replaced when the settings are reloaded."""
        self._sysfs = sysfs
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        """Samples of the last hour by drive name, at most one per minute: monotonic time in seconds, and bytes written
        since boot. Protected by `_lock`."""
        self._health: dict[str, Health] = {}  # by drive name; protected by `_lock`
        self._asked: dict[str, float] = {}  # monotonic time of the last health query; likewise
        self._asking: threading.Thread | None = None  # the last query thread; protected by `_lock`
        self._lock = threading.Lock()
        """Held only briefly: no drive is queried while it is held."""

    def look(self, drives: Iterable[Drive]) -> None:
        """Take the samples that are due, and start to query drives whose health data is outdated. Call it regularly."""
        now = time.monotonic()
        drives = list(drives)
        with self._lock:
            for drive in drives:
                self._sample(drive, now)
            due = [drive for drive in drives if now - self._asked.get(drive.name, -_ASK_SECONDS) >= _ASK_SECONDS]
            if due and not (self._asking and self._asking.is_alive()):
                self._asked.update((drive.name, now) for drive in due)
                self._asking = threading.Thread(target=self._ask, args=(due,), name="wear", daemon=True)
                self._asking.start()

    def _sample(self, drive: Drive, now: float) -> None:
        samples = self._samples.setdefault(drive.name, deque())
        if samples and now - samples[-1][0] < _SAMPLE_SECONDS:
            return
        found = counters(drive, self._sysfs)
        if found is None or (samples and found.written < samples[-1][1]):
            samples.clear()  # a different drive now has this name
        if found is not None:
            samples.append((now, found.written))
        while len(samples) > 2 and now - samples[0][0] > _WINDOW_SECONDS:
            samples.popleft()

    def _ask(self, drives: Iterable[Drive]) -> None:
        for drive in drives:
            found = health_of(drive, self._sysfs)
            with self._lock:
                self._health[drive.name] = found

    def of(self, drive: Drive) -> DriveWear:
        """Return the current wear of a drive."""
        with self._lock:
            health, samples = self._health.get(drive.name, Health()), list(self._samples.get(drive.name, ()))
        rated = self.endurance.get(drive.name)
        rate = None
        if len(samples) > 1:
            (start, first), (end, last) = samples[0], samples[-1]
            rate = (last - first) / (end - start)
        left = None
        if rated is not None:
            # Bytes written before the last boot are known only if the drive reports them.
            used = health.written if health.written is not None else samples[-1][1] if samples else 0
            if health.ratio is not None:
                used = max(used, int(health.ratio * rated))
            left = max(0, rated - used)
        days = left / rate / DAY if left is not None and rate else None
        return DriveWear(ratio=health.ratio, rated=rated, bytes_per_second=rate, left=left, days=days)


def health_of(drive: Drive, sysfs: Path = SYSFS) -> Health:
    """Return a drive's health data from the program `nvme` or `smartctl`."""
    if (sysfs / "class/block" / drive.name / "device").exists():  # a physical drive, not a RAID or loop device
        for program in _PROGRAMS if drive.name.startswith("nvme") else ("smartctl",):
            found = _told_to(program, f"/dev/{drive.name}")
            if found != Health():
                return found
    return Health()


def _told_to(program: str, device: str) -> Health:
    path = shutil.which(program)
    if path is None:
        return Health()
    before, places = _PROGRAMS[program]
    try:
        # Ignore the exit status: smartctl uses it to report problems of the drive, even if the output is complete.
        done = subprocess.run(
            [path, *before, device], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS, check=False
        )
        tree = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError) as error:
        event(logging.INFO, "wear.unknown", device=device, program=program, reason=type(error).__name__)
        return Health()
    percent = next((value for place in places if (value := _number_at(tree, place)) is not None), None)
    if percent is not None and percent > _MOST_PERCENT:
        percent = None
    units = _number_at(tree, _WRITTEN[program])
    return Health(
        ratio=None if percent is None else percent / 100,
        written=None if units is None else units * _DATA_UNIT_BYTES,
    )


def _number_at(tree: Any, place: tuple[str, ...]) -> int | None:
    """Return the non-negative integer at a location in the output, or None. Large numbers may be given as strings."""
    for key in place:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(tree, str) and tree.isascii() and tree.isdigit() and len(tree) < 40:
        tree = int(tree)
    return tree if type(tree) is int and tree >= 0 else None
