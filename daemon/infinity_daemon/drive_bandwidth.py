"""Bandwidth of drives: a history of measurements, stored in a JSON file, and profiles derived from it.

[Note: profiles] A measurement contains the throughput of one drive, or of several drives measured at the same time,
under one to three loads: reads, writes, and a mix of both. Measurements by the daemon (`drive_measurement.py`), by
`infinity probe` and by runs are treated equally. For each load, the profile of a drive is the median of the `RECENT`
newest measurements of that drive alone, so that a single measurement that was disturbed, or taken with a full SLC
cache, does not affect it. If a drive was only measured together with other drives, the profile is derived from these
measurements. A set of drives has a joint profile if exactly these drives were measured at the same time, because they
may share a bus that limits their total throughput.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from infinity.io.block_devices import Drive
from infinity.schema import Mismatch, number, one_of, optional, record, sequence, table, text
from infinity.untrusted_files import read_own, write_own
from infinity_daemon.log import event

FILE_NAME: Final = "bandwidth.json"
RECENT: Final = 5
"""Number of measurements from which a profile is computed."""
LOADS: Final = ("read", "write", "mixed")
SOURCES: Final = ("daemon", "probe", "run")
_MOST_KEPT: Final = 512
"""Maximum number of measurements in the history. For each set of drives, it keeps the `RECENT` newest per source."""
_MAX_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput in bytes per second by load; None if not measured. `mixed` is the sum of reads and writes."""

    read: float | None = None
    write: float | None = None
    mixed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of one drive, or of several drives at the same time."""

    rates: Mapping[str, Rates]
    """Throughput by drive identity."""
    source: str
    """Source of the measurement: one of `SOURCES`."""
    measured: float
    """Unix time of the measurement."""

    @property
    def drives(self) -> frozenset[str]:
        """Identities of the drives."""
        return frozenset(self.rates)


@dataclass(frozen=True, kw_only=True)
class Profile(Rates):
    """Bandwidth of a drive, and the Unix time of the newest measurement that it is derived from. [Note: profiles]"""

    measured: float


def rates(value: Any) -> Rates:
    """Return `value`, a JSON object, as `Rates`. Raises `Mismatch` unless it contains at least one load."""
    found: Rates = _RATES(value)
    if found == Rates():
        raise Mismatch(value, f"must contain at least one of {', '.join(LOADS)}")
    return found


_SPEED = optional(number(1))
_RATES = record(Rates, lacking=LOADS, read=_SPEED, write=_SPEED, mixed=_SPEED)
_MEASURED = record(Measured, rates=table(text(), rates), source=one_of(*SOURCES), measured=number(1))
_FILE = record(measurements=sequence(_MEASURED, most=_MOST_KEPT))


class Profiles:
    """History of measurements, stored in a file in `folder`, and the profiles derived from it. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._kept: tuple[Measured, ...] = ()
        """Measurements, newest first. The tuple is replaced with `_lock` held, and can be read without the lock."""
        self._lock = threading.Lock()
        """Held while a measurement is added and the file is written, so that the file ends up with the newest data."""

    def of(self, drive: Drive) -> Profile | None:
        """Return the profile of a drive, or None if the drive has not been measured."""
        name = drive.identity
        return _profile(name, [one for one in self._kept if one.drives == {name}]) or _profile(name, self._kept)

    def together(self, drives: Collection[str]) -> dict[str, Profile] | None:
        """Return the joint profile by drive identity, or None if these drives have not been measured together."""
        same = [one for one in self._kept if one.drives == frozenset(drives)]
        found = {drive: _profile(drive, same) for drive in drives}
        known = {drive: profile for drive, profile in found.items() if profile is not None}
        return known if known and len(known) == len(found) else None

    def measured(self, drives: Collection[str], source: str) -> float:
        """Return the Unix time of the last measurement of exactly these drives by `source`, or 0 if there is none."""
        wanted = frozenset(drives)
        return max((one.measured for one in self._kept if one.drives == wanted and one.source == source), default=0.0)

    def load(self) -> None:
        """Read the history from the file. If the file is malformed, log a warning and continue without it."""
        try:
            found = _FILE(json.loads(read_own(self._file, _MAX_FILE)))["measurements"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            event(logging.WARNING, "bandwidth.unreadable", file=self._file, reason=error)
            return
        with self._lock:
            self._kept = _newest([*self._kept, *found])

    def record(self, measured: Measured) -> None:
        """Add a measurement to the history, and write the file.

        Raises:
            OSError: if the file cannot be written. In that case, the measurement is kept in memory only.
        """
        with self._lock:
            self._kept = _newest([measured, *self._kept])
            while len(data := _encoded(self._kept)) > _MAX_FILE:
                self._kept = self._kept[: len(self._kept) // 2]
            write_own(self._file, data, durable=True)


def _newest(measurements: Iterable[Measured]) -> tuple[Measured, ...]:
    kept, counts = [], dict[tuple[frozenset[str], str], int]()
    for one in sorted(measurements, key=lambda one: -one.measured):
        key = one.drives, one.source
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= RECENT:
            kept.append(one)
    return tuple(kept[:_MOST_KEPT])


def _profile(drive: str, measurements: Iterable[Measured]) -> Profile | None:
    """Return the profile of a drive, or None. The measurements must be sorted, newest first. [Note: profiles]"""
    found = [(one.measured, one.rates[drive]) for one in measurements if drive in one.rates]
    recent = {load: list(islice(((t, r) for t, one in found if (r := getattr(one, load))), RECENT)) for load in LOADS}
    times = [when for values in recent.values() for when, _ in values]
    if not times:
        return None
    middle = {load: median(value for _, value in values) for load, values in recent.items() if values}
    return Profile(**middle, measured=max(times))


def _encoded(measurements: Iterable[Measured]) -> bytes:
    return json.dumps({"measurements": [asdict(one) for one in measurements]}, indent=1).encode() + b"\n"
