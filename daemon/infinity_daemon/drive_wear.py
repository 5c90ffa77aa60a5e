"""How fast drives are used up: what is written to them, what they tell of it, and what they are rated for."""

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

from infinity.io.block_devices import SYSFS, Drive, counters, wear_ratio
from infinity_daemon.log import event

DAY: Final = 86_400.0
_ASK_SECONDS: Final = 600.0
"""How often a drive is asked for its health log: it counts whole percents of years."""
_ANSWER_SECONDS: Final = 5.0
_SAMPLE_SECONDS: Final = 60.0
_WINDOW_SECONDS: Final = 3_600.0
_DATA_UNIT_BYTES: Final = 512_000  # of an NVMe health log
_MOST_PERCENT: Final = 255  # one byte in an NVMe health log; above 100 the rated life is over

# By program: its arguments before the device, and where in its answer is the percentage of the rated life that is used.
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
    """What a drive tells: the share of its rated life that is used, and the bytes written in its life, or None."""

    ratio: float | None = None
    written: int | None = None


@dataclass(frozen=True, kw_only=True)
class DriveWear:
    """What is known of the wear of a drive; None where it is not."""

    ratio: float | None
    """Share of its rated life that is used, as the drive tells."""
    rated: int | None
    """Bytes that may be written in its life (TBW), as configured."""
    bytes_per_second: float | None
    """Written to it, by everybody, in the last hour or since the daemon began."""
    left: int | None
    """Of the rated bytes, those that are not written yet."""
    days: float | None
    """Until the rated bytes are written at that rate."""


class WearWatch:
    """Watches drives. `look` comes by with every scrape; threads may share it.

    Health logs are read by a thread of their own, one drive after the other, so that nobody waits for a drive.
    """

    def __init__(self, endurance: Mapping[str, int], sysfs: Path = SYSFS) -> None:
        """Watch nothing yet.

        Args:
            endurance: bytes that each drive is rated for, by its name.
            sysfs: where the kernel's files are.
        """
        self.endurance = dict(endurance)
        """Replaced when settings are read again."""
        self._sysfs = sysfs
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        """By drive, monotonic seconds and bytes written since boot, of the last hour, once a minute at most; under
        `_lock`."""
        self._health: dict[str, Health] = {}  # by drive; under `_lock`
        self._asked: dict[str, float] = {}  # by drive, monotonic seconds at which it was asked last; under `_lock`
        self._asking: threading.Thread | None = None  # the one that asks, or has asked last; under `_lock`
        self._lock = threading.Lock()
        """Held for moments: no drive is asked under it."""

    def look(self, drives: Iterable[Drive]) -> None:
        """Take samples that are due, and have those drives asked for their health that have not been for long."""
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
            samples.clear()  # another drive under this name
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
        """Return what is known of a drive now."""
        with self._lock:
            health, samples = self._health.get(drive.name, Health()), list(self._samples.get(drive.name, ()))
        rated = self.endurance.get(drive.name)
        rate = None
        if len(samples) > 1:
            (start, first), (end, last) = samples[0], samples[-1]
            rate = (last - first) / (end - start)
        left = None
        if rated is not None:
            # What was written before boot is known only where the drive tells it.
            used = health.written if health.written is not None else samples[-1][1] if samples else 0
            if health.ratio is not None:
                used = max(used, int(health.ratio * rated))
            left = max(0, rated - used)
        days = left / rate / DAY if left is not None and rate else None
        return DriveWear(ratio=health.ratio, rated=rated, bytes_per_second=rate, left=left, days=days)


def health_of(drive: Drive, sysfs: Path = SYSFS) -> Health:
    """Return what a drive tells: in sysfs, else to `nvme` or `smartctl`, if one is installed and may ask it."""
    ratio = wear_ratio(drive, sysfs)
    if ratio is not None:
        return Health(ratio=ratio)
    if (sysfs / "class/block" / drive.name / "device").exists():  # not what is made of other drives, or of files
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
        # Its exit status says more than whether there is an answer: smartctl has bits for what is wrong with a drive.
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
    """Return the number of 0 or more at a place of an answer; some programs give large ones as texts."""
    for key in place:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(tree, str) and tree.isascii() and tree.isdigit() and len(tree) < 40:
        tree = int(tree)
    return tree if type(tree) is int and tree >= 0 else None
